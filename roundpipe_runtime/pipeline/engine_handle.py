"""Base classes of :class:`RoundPipe`: access to the wrapped model's attributes, and to devices and costs of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..device.accelerator import DeviceSpec
from ..device.disk import HOST_IN_MEMORY, disk_folder
from ..device.protocol import Device
from ..device.transfer import send_as
from ..engine.config import RoundPipeRunConfig, check_compile_options
from ..engine.driver import Engine
from ..engine.parameters.kept import ParameterTraffic
from ..errors import ConfigError
from ..optim.layer_contents import LargeTables, check_large_tables
from ..optim.parameters import Update
from ..schedule.partitioning import LayerCost

if TYPE_CHECKING:
    from ..distributed.ranks.ranks import Ranks
    from ..distributed.replicas.rank_groups import RankGroups


CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# The wrapper shares these dictionaries with the wrapped model: parameters, modules, hooks.
_SHARED = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))


class ModelProxy(nn.Module):
    """Base class of wrappers around a module. Attributes whose names begin with ``_rp_`` belong to the wrapper.

    All other attributes are read, set and deleted on the wrapped model.
    """

    _rp_model: nn.Module
    _rp_original: nn.Module | None

    def _rp_stand_for(self, model: nn.Module, original: nn.Module | None) -> None:
        # original: model from which `model` was made, and which has the attributes; `None` if it is `model` itself
        own = self.__dict__
        for shared in _SHARED:
            own[shared] = model.__dict__[shared]
        own.pop("_is_full_backward_hook", None)  # so that it is read from the model, as all other attributes are
        own["training"] = model.training
        own["_rp_model"], own["_rp_original"] = model, original

    def train(self, mode: bool = True) -> Self:
        """Set the model's training mode."""
        self._rp_model.train(mode)
        self.__dict__["training"] = self._rp_model.training
        return self

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if "_rp_model" not in own:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        for model in (own["_rp_original"], own["_rp_model"]):
            if model is not None and hasattr(model, name):
                return getattr(model, name)
        kind = type(own["_rp_original"] or own["_rp_model"]).__name__
        raise AttributeError(f"neither 'RoundPipe' nor the wrapped {kind!r} has an attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_rp_model" not in self.__dict__:
            super().__setattr__(name, value)
        elif name.startswith("_rp_") or name == "training" or name in _SHARED:
            self.__dict__[name] = value
        else:
            setattr(self._rp_original or self._rp_model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._rp_original or self._rp_model, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._rp_original or self._rp_model)})

    def __len__(self) -> int:
        return len(self._rp_model)  # type: ignore[arg-type] # raises TypeError if the model has no length

    def __getitem__(self, index: Any) -> Any:
        return self._rp_model[index]  # type: ignore[index] # raises TypeError if the model has no items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rp_model)  # type: ignore[call-overload,no-any-return] # as above

    def __bool__(self) -> bool:
        return True


def wrapped_model(module: nn.Module) -> nn.Module:
    """Return the model that a pipeline wraps; a module that is not a pipeline is returned unchanged.

    >>> layer = nn.Linear(1, 1)
    >>> wrapped_model(layer) is layer
    True
    """
    return module._rp_model if isinstance(module, ModelProxy) else module


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return a model as one module; layers in a list become an ``nn.Sequential``."""
    if isinstance(model, ModelProxy):
        raise ConfigError("The model is a RoundPipe already: do not wrap the model again.")
    found = f"the class {model.__qualname__}" if isinstance(model, type) else type(model).__qualname__
    if type(model) is nn.Sequential or isinstance(model, (nn.ModuleList, list, tuple)):
        layers = list(model)
        others = [type(layer).__qualname__ for layer in layers if not isinstance(layer, nn.Module)]
        found += f" with {others[0]}" if others else " of no layers"
        if layers and not others:
            return model if type(model) is nn.Sequential else nn.Sequential(*layers)
    elif isinstance(model, nn.Module):
        return model
    raise ConfigError(
        f"RoundPipe wraps an nn.Module or a list of nn.Modules, found {found}. Give RoundPipe layers:\n"
        "    RoundPipe(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))"
    )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: the children of a plain ``nn.Sequential``, otherwise the model itself."""
    kind = type(model)
    is_plain = "forward" not in vars(model) and (kind.__call__, getattr(kind, "forward", None)) == _SEQUENTIAL
    return list(model) if isinstance(model, nn.Sequential) and is_plain and len(model) else [model]


_SEQUENTIAL = nn.Sequential.__call__, nn.Sequential.forward


class EngineHandle(ModelProxy):
    """A model together with the engine that runs the model on devices."""

    _rp_engine: Engine
    _rp_groups: RankGroups | None = None
    _rp_options: PipelineOptions

    @property
    def name(self) -> str:
        """The name of the pipeline."""
        return self._rp_options.title

    @property
    def model(self) -> nn.Module:
        """The wrapped model."""
        return self._rp_model

    @property
    def devices(self) -> list[Device]:
        """The devices of the pipeline; another pipeline can share them: ``RoundPipe(other, devices=model.devices)``."""
        return list(self._rp_engine.devices)

    @property
    def host(self) -> str:
        """Where weights, gradients and optimizer state are stored: ``"memory"``, or ``"disk:DIR"``."""
        return self._rp_options.host

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the processes that train the model; ``None`` for one process alone."""
        return self._rp_options.mesh

    @property
    def replicas(self) -> int:
        """The number of groups that the rows of a batch are split into (default: the number of ranks)."""
        return self._rp_engine.groups.replicas

    @property
    def ranks(self) -> Ranks:
        """The processes that train the model; without a mesh, only this process."""
        from ..distributed.ranks.ranks import Ranks

        return Ranks() if self._rp_groups is None else self._rp_groups.ranks

    @property
    def num_devices(self) -> int:
        """The number of devices of this process."""
        return len(self._rp_engine.devices)

    @property
    def model_memory_limit(self) -> float | None:
        """Limit in GB for parameters and gradients on the smallest device; ``None`` if no memory size is known."""
        return self._rp_engine.planner.memory_limit()

    def layer_costs(self) -> list[LayerCost]:
        """Return the cost of each layer, which is estimated until the pipeline has run, and then measured."""
        return self._rp_engine.planner.layer_costs()

    @property
    def parameter_traffic(self) -> ParameterTraffic:
        """Bytes of parameters copied to devices since the pipeline was created, and bytes kept on devices now."""
        return self._rp_engine.kept.traffic

    def drop_kept_parameters(self) -> None:
        """Release the copies of parameters that stay on devices (``keep_parameters`` of :class:`RoundPipeRunConfig`).

        The next forward or backward uploads the parameters again. Call this method after a write that does not increase
        the version counter of a tensor, such as a write through ``parameter.data`` or by another library.
        """
        with self._rp_engine.lock:
            self._rp_engine.kept.drop()

    def set_original_model(self, original_model: nn.Module) -> None:
        """Set the model from which the wrapped model was made; attributes are read from the original model first."""
        self._rp_original = original_model

    def close(self) -> None:
        """Wait for an optimizer step in the background, and end all threads; the pipeline cannot run afterwards."""
        self._rp_engine.close()
        send_as(self._rp_model, {})

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self.devices)
        return f"RoundPipe on {devices}:\n{self._rp_model!r}"


def _is_floating_or_none(dtype: Any) -> bool:
    return dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The arguments of :class:`RoundPipe` except the model."""

    title: str  # name in errors and timelines: `name`, or `"file:line"` of the call
    optim_dtype: torch.dtype | None = None
    name: str | None = None
    model_run_config: RoundPipeRunConfig = dataclasses.field(default_factory=RoundPipeRunConfig)
    pin_model: Literal["alloc", "register", "off"] = "alloc"
    devices: DeviceSpec = None
    mesh: DeviceMesh | None = None
    replicas: int | None = None
    reduce_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    compile: bool | Mapping[str, object] = False
    large_tables: LargeTables = "auto"
    host: str = HOST_IN_MEMORY
    update: Update = "masters"

    def __post_init__(self) -> None:
        config = self.model_run_config
        if not _is_floating_or_none(self.optim_dtype):
            raise ConfigError(f"optim_dtype must be a floating dtype, like torch.float32, found {self.optim_dtype!r}.")
        if self.gradient_dtype is not None and not (self.optim_dtype and _is_floating_or_none(self.gradient_dtype)):
            raise ConfigError(
                "gradient_dtype, the dtype of gradients of master weights, needs optim_dtype; found "
                f"{self.gradient_dtype!r} with optim_dtype={self.optim_dtype!r}. Give both:\n"
                "    RoundPipe(model, optim_dtype=torch.float32, gradient_dtype=torch.bfloat16)"
            )
        if not isinstance(config, RoundPipeRunConfig):
            raise ConfigError(f"model_run_config must be a RoundPipeRunConfig, found {type(config).__qualname__}.")
        if not _is_floating_or_none(self.reduce_dtype):
            raise ConfigError(
                f"reduce_dtype must be a floating dtype, like torch.bfloat16, found {self.reduce_dtype!r}."
            )
        check_compile_options(self.compile)
        check_large_tables(self.large_tables)
        if disk_folder(self.host) is not None and self.has_groups:
            raise ConfigError(
                f'host="{self.host}" works only in one process, without mesh= and replicas=. '
                'Leave mesh= and replicas= out, or train in memory:\n    RoundPipe(model, mesh=mesh, host="memory")'
            )
        if self.update not in ("masters", "in_place", "in_backward"):
            raise ConfigError(f'update must be "masters", "in_place" or "in_backward", found {self.update!r}.')
        if self.update != "masters" and (self.has_groups or disk_folder(self.host) is not None):
            other = "mesh= or replicas=" if self.has_groups else f'host="{self.host}"'
            raise ConfigError(
                f'update="{self.update}" works only in one process and in memory, without {other}. Leave {other} out, '
                'or use the default update:\n    RoundPipe(model, update="masters")'
            )
        if self.replicas is not None and not (type(self.replicas) is int and self.replicas >= 1):
            raise ConfigError(f"replicas must be a number of at least 1, found {self.replicas!r}.")

    @property
    def has_groups(self) -> bool:
        """Whether a batch is split into groups, on one rank or on several."""
        return self.mesh is not None or self.replicas is not None
