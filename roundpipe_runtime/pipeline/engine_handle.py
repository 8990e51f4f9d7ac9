"""Base classes of :class:`RoundPipe`: attributes of the wrapped model, devices, optimizer steps, training state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..device.accelerator import DeviceSpec
from ..device.disk import HOST_IN_MEMORY, disk_folder
from ..device.protocol import Device
from ..device.transfer import send_as
from ..engine.code_state import gradient_mode_kept
from ..engine.config import RoundPipeRunConfig, check_compile_options
from ..engine.driver import Engine
from ..engine.lifecycle import PipelineProgress
from ..engine.parameters.kept import ParameterTraffic
from ..errors import ConfigError, RoundPipeWarning, warn
from ..optim.in_backward import InBackwardStore
from ..optim.layer_contents import LargeTables, check_large_tables
from ..optim.parameters import Update
from ..optim.step import in_optimizer_ctx
from ..optim.torch_steps import check_clipped
from ..schedule.partitioning import LayerCost
from .live import bound_now

if TYPE_CHECKING:
    from ..distributed.ranks.ranks import Ranks
    from ..distributed.replicas.rank_groups import RankGroups


CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# The wrapper shares these dictionaries with the wrapped model: parameters, modules, hooks.
_SHARED = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))


class ModelProxy(nn.Module):
    """Base class of wrappers around a module. Attributes whose names begin with ``_rp_`` belong to the wrapper.

    Attributes with any other name are read, set and deleted on the wrapped model.
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
        """Set the model to training mode, or with ``mode=False`` to evaluation mode."""
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
    """A model, the engine that runs it on devices, and the methods that optimizers and checkpoints need."""

    _rp_engine: Engine
    _rp_groups: RankGroups | None = None
    _rp_options: PipelineOptions

    @property
    def name(self) -> str:
        """The name of the pipeline in errors (default: ``"file:line"`` of the call that created the pipeline)."""
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
        """Return each layer's memory and time (seconds; before the first run, estimated multiplications per token)."""
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

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """Yield each parameter that the optimizer updates, once.

        With ``optim_dtype`` and ``update="masters"``, master weights are yielded: copies of the parameters in
        ``optim_dtype``, whose ``grad`` has the gradients. Without master weights, the model's parameters are yielded.
        """
        for _, parameter in self.optim_named_parameters():
            yield parameter

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters that the optimizer updates, see :meth:`optim_parameters`.

        Args:
            prefix: prefix of the names.
            remove_duplicate: whether a parameter with several names is yielded only once.

        Returns:
            An iterator over names and parameters.
        """
        yield from self._rp_engine.store.named(prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters of the model. Inside :class:`OptimizerCtx`, yield the optimizer's parameters.

        Args:
            prefix: prefix of the names.
            recurse: whether to include parameters of submodules.
            remove_duplicate: whether a parameter with several names is yielded only once.

        Returns:
            An iterator over names and parameters.
        """
        if in_optimizer_ctx():
            yield from self.optim_named_parameters(prefix, remove_duplicate)
        else:
            yield from self._rp_model.named_parameters(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield names and modules of the model.

        If another module contains the pipeline, ``named_parameters`` of that module calls this method with ``memo``.
        Inside :class:`OptimizerCtx`, such a call yields a single module with the parameters of the optimizer.

        Args:
            memo: modules that were yielded already.
            prefix: prefix of the names.
            remove_duplicate: whether a module with several names is yielded only once.

        Returns:
            An iterator over names and modules.
        """
        if memo is None or not in_optimizer_ctx() or self._rp_engine.store.optim_dtype is None:
            yield from super().named_modules(memo, prefix, remove_duplicate)
        elif self not in memo:
            memo.add(self)
            holder = nn.Module()  # the names have dots, which `register_parameter` refuses
            holder.__dict__["_parameters"] = dict(self.optim_named_parameters(remove_duplicate=remove_duplicate))
            yield prefix, holder

    def step_with(self, *optimizers: torch.optim.Optimizer) -> None:
        """Set the optimizers with which ``forward_backward`` updates each layer if ``update="in_backward"``.

        ``optimizer.step()`` must still be called after each ``forward_backward``, because schedulers expect the call.
        ``optimizer.step()`` updates only the parameters outside of the layers, such as parameters of a loss function.

        Args:
            *optimizers: optimizers that together update all :meth:`optim_parameters`.

        Raises:
            ConfigError: the pipeline does not have ``update="in_backward"``.

        >>> from roundpipe_runtime import RoundPipe
        >>> layer = nn.Linear(4, 4).bfloat16()
        >>> model = RoundPipe(layer, optim_dtype=torch.float32, update="in_backward", devices="virtual:1")
        >>> optimizer = torch.optim.AdamW(model.optim_parameters())
        >>> model.step_with(optimizer)
        >>> loss = model.forward_backward((torch.ones(2, 4).bfloat16(),), loss_fn=lambda outputs, _: outputs.sum())
        >>> layer.weight.dtype, layer.weight.grad, optimizer.state[layer.weight]["step"].item()
        (torch.float32, None, 1.0)
        >>> optimizer.step()
        >>> model.close()
        """
        store = self._rp_engine.store
        if not isinstance(store, InBackwardStore):
            raise ConfigError(
                "step_with needs a pipeline that updates parameters in forward_backward:\n"
                '    RoundPipe(model, optim_dtype=torch.float32, update="in_backward")'
            )
        store.use(optimizers)

    def step(
        self, step_fn: Callable[..., Any], is_async: bool | Literal["exact"] = False, *args: Any, **kwargs: Any
    ) -> None:
        """Run an optimizer step, immediately or in the background.

        Args:
            step_fn: function that runs the step: ``lambda: (optimizer.step(), optimizer.zero_grad())``.
            is_async: when the step runs (default: before this method returns). With ``is_async="exact"``, the step runs
                in the background, and a layer waits for its update before it runs again, so results are unchanged. With
                ``is_async=True``, the step runs in the background, and the next forward and backward use old weights.
            *args: arguments of ``step_fn``.
            **kwargs: keyword arguments of ``step_fn``.

        Raises:
            ConfigError: ``step_fn`` is not a function, or ``is_async`` is not ``True``, ``False`` or ``"exact"``.
        """
        if not callable(step_fn):
            raise ConfigError(
                f"step_fn must be a function, found {step_fn!r}:\n"
                "    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))"
            )
        if isinstance(is_async, str) and is_async != "exact":
            raise ConfigError(f'is_async must be True, False or "exact", found {is_async!r}.')
        engine = self._rp_engine
        is_in_backward = isinstance(engine.store, InBackwardStore)
        if is_in_backward and is_async is True:
            raise ConfigError(
                'is_async=True lets the next forward use the parameters from before the step, but update="in_backward" '
                "has already updated the parameters. Leave is_async out:\n    model.step(step_fn)"
            )
        if is_in_backward or not is_async:
            with gradient_mode_kept():
                engine.steps.run(functools.partial(step_fn, *args, **kwargs))
        elif is_async == "exact":
            engine.steps.run_exact(functools.partial(bound_now(step_fn), *args, **kwargs), engine.lock)
        else:
            engine.steps.start(functools.partial(bound_now(step_fn), *args, **kwargs))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of the optimizer's parameters so that their total norm is at most ``max_norm``.

        The norm is computed from the gradients of all ranks, so all ranks must call this method. The norm is bitwise
        identical for every number of ranks.

        Args:
            max_norm: largest total norm of the gradients.
            norm_type: exponent of the norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: whether to raise an error if the norm is not finite.

        Returns:
            The norm before scaling.

        Raises:
            ConfigError: ``norm_type`` is not positive.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is true.
        """
        from ..distributed.weights import clip_grad_norm  # torch's DTensor takes a while to load

        targets = list(self.optim_parameters())
        check_clipped(targets)
        return clip_grad_norm(targets, self.ranks, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def synchronize(self) -> None:
        """Wait for an optimizer step in the background, so that the model's parameters and gradients are up to date."""
        self._rp_engine.synchronize()
        self._rp_engine.store.show_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including the gradients of the optimizer's parameters."""
        self._rp_engine.zero_grad(set_to_none)

    def progress(self) -> PipelineProgress:
        """Return the training progress that the state dict does not contain, such as the master weights.

        Returns:
            The number of completed calls, the master weights and gradients (not copied), and the value of ``replicas``.
        """
        return dataclasses.replace(self._rp_engine.progress(), replicas=self.replicas)

    def load_progress(self, progress: PipelineProgress) -> None:
        """Load the result of :meth:`progress`, after the parameters have been loaded, and discard existing gradients.

        Args:
            progress: training state of a pipeline with the parameter names of this pipeline. The master weights in
                ``progress`` are ignored if this pipeline does not use master weights. Each batch is split into as many
                groups of rows as in the saved training, unless this pipeline was created with ``replicas``.
        """
        self._rp_engine.load_progress(progress)
        self._rp_keep_replicas(progress.replicas or 1)

    def _rp_keep_replicas(self, replicas: int) -> None:
        """Split batches into ``replicas`` groups of rows, as the saved training did; warn if this is impossible."""
        if replicas == self.replicas or replicas == 1:
            return
        if self._rp_options.replicas is None and self.mesh is not None and replicas >= self.ranks.size:
            self._rp_engine.groups.replicas = replicas
            return
        warn(
            f"The loaded training split each batch into {replicas} groups of rows, but {self.name} makes "
            f"{self.replicas} groups, so it adds up losses and gradients in a different order. For identical results:\n"
            f"    RoundPipe(..., replicas={replicas})",
            RoundPipeWarning,
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for an optimizer step in the background, and return the state dict of the wrapped model.

        Args:
            *args: positional arguments of the model's ``state_dict``.
            **kwargs: keyword arguments of the model's ``state_dict``.

        Returns:
            The state dict.
        """
        self._rp_engine.synchronize()
        return self._rp_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict into the model, and update the optimizer's master weights.

        Args:
            state_dict: parameters and buffers by name.
            strict: whether the names must be exactly those of the model.
            assign: whether the tensors of ``state_dict`` become the parameters (default: their values are copied).

        Returns:
            The missing and the unexpected keys, as ``nn.Module.load_state_dict`` returns them.

        Raises:
            RuntimeError: names or shapes do not fit the model.
        """
        self._rp_engine.synchronize()
        result = self._rp_model.load_state_dict(state_dict, strict, assign)
        self._rp_engine.store.publish()
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # torch calls this method instead of `load_state_dict` if another module contains the pipeline. A background
        # step that ended later would overwrite the loaded values.
        self._rp_engine.synchronize()
        super()._load_from_state_dict(*args, **kwargs)

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

    title: str  # name in errors: `name`, or `"file:line"` of the call
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
                f'update="{self.update}" cannot be combined with {other}. Leave {other} out, '
                'or use the default update:\n    RoundPipe(model, update="masters")'
            )
        if self.replicas is not None and not (type(self.replicas) is int and self.replicas >= 1):
            raise ConfigError(f"replicas must be a whole number of at least 1, found {self.replicas!r}.")

    @property
    def has_groups(self) -> bool:
        """Whether batches are split into groups of rows, because ``mesh`` or ``replicas`` was given."""
        return self.mesh is not None or self.replicas is not None
