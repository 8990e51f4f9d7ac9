"""``RoundPipe``: train a model that is larger than device memory, stage by stage."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..batch.arguments import check_call, check_loss_fn
from ..device.pinning import PinnedModel
from ..device.virtual import Device, DeviceSpec, parse_devices
from ..engine.config import RoundPipeRunConfig
from ..engine.driver import Engine
from ..engine.parameters.kept import ParameterTraffic
from ..engine.progress import PipelineProgress
from ..errors import ConfigError, LossError, RoundPipeWarning, StageError, call_site, warn
from ..optim.copyable import check_copyable
from ..optim.parameters import scan
from ..optim.parts import widened
from ..optim.step import in_optimizer_ctx
from ..optim.torch_steps import take_over_always
from ..schedule.costs import LayerCost
from .call_types import forward_backward_method
from .joined_loss import back_from
from .layers import as_module, layers_of
from .model_proxy import ModelProxy
from .options import PipelineOptions

if TYPE_CHECKING:
    from ..distributed.ranks.ranks import Ranks
    from ..distributed.replicas.rank_groups import RankGroups

__all__ = ["RoundPipe"]


def _identity(outputs: Any, labels: Any) -> Any:
    return outputs


class RoundPipe(ModelProxy):
    """Train a model larger than device memory: layers travel through devices, the interface is unchanged.

    Parameters, buffers, names, ``state_dict``, ``train``, ``eval`` are those of the model; attributes that a pipeline
    does not have are read from it, written to it and deleted from it.

    Args:
        model: an ``nn.Sequential``, whose children are the layers; a list of layers; or any other module, which is one
            layer.
        optim_dtype: dtype of the optimizer's parameters and of gradients. Default: that of each parameter.
        name: name in errors and timelines; if given, also part of the seeds of random layers. Default: ``"file:line"``.
        model_run_config: defaults for every call.
        pin_model: ``"alloc"`` or ``"register"`` puts parameters into pinned memory, where there is an accelerator.
        devices: ``"virtual:N"``, a list of torch devices or of :class:`Device` objects, or ``None``: all accelerators,
            else ``"virtual:2"``.
        mesh: mesh of the processes that train the model, ``init_device_mesh("cpu", (N,))``: each holds what the
            optimizer needs for its rows of every matrix, and gives ``forward_backward`` its part of the batch. Of two
            axes the first holds copies, so ``(N, 1)`` keeps everything whole. Default: this process alone.
        replicas: number of groups that a batch is cut into; group g runs on rank g modulo N. The numbers are the same
            for every number of ranks. Default: number of ranks.
        reduce_dtype: dtype in which gradients travel between ranks. Default: that of their sums.
        gradient_dtype: dtype of the gradients of ``optim_dtype``'s copies between a run and the step; a run sums them
            in ``optim_dtype`` all the same. Default: ``optim_dtype``.
        host_weights: ``"own"``: each process of a mesh has a copy of the weights; ``"shared"``: those of a machine have
            one together, with the same numbers.

    Raises:
        ConfigError: when an argument has a value that it cannot have.

    >>> model = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), devices="virtual:2")
    >>> loss_fn = nn.functional.mse_loss
    >>> config = RoundPipeRunConfig(loss_reduction="mean")
    >>> loss = model.forward_backward((torch.ones(6, 4),), label=torch.ones(6, 2), loss_fn=loss_fn, run_config=config)
    >>> loss.shape, model[0].weight.grad.shape
    (torch.Size([]), torch.Size([4, 4]))
    >>> model.close()
    """

    _rp_engine: Engine
    _rp_groups: RankGroups | None = None
    _rp_options: PipelineOptions
    _rp_warned: bool = False

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig | None = None,
        pin_model: Literal["alloc", "register", "off"] = "alloc",
        devices: DeviceSpec = None,
        *,
        mesh: DeviceMesh | None = None,
        replicas: int | None = None,
        reduce_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        host_weights: Literal["own", "shared"] = "own",
    ) -> None:
        super().__init__()
        config = RoundPipeRunConfig() if model_run_config is None else model_run_config
        options = PipelineOptions(
            name or call_site(),
            optim_dtype,
            name,
            config,
            pin_model,
            devices,
            mesh,
            replicas,
            reduce_dtype,
            gradient_dtype,
            host_weights,
        )
        self._rp_build(as_module(model), options, None)

    def _rp_build(self, model: nn.Module, options: PipelineOptions, original: nn.Module | None) -> None:
        found = parse_devices(options.devices)
        layers = self._rp_layers(model)
        scan(layers)  # refuses what cannot travel
        check_copyable(model)
        shares = options.shares_host_weights
        pinned = PinnedModel(model, "off" if shares else options.pin_model, found)
        tag = f"{options.name or ''}|{len(layers)}|{sum(p.numel() for p in model.parameters())}"
        self._rp_stand_for(model, original)
        self._rp_options = options
        if options.gradient_dtype is not None:
            take_over_always(widened)
        self._rp_groups = _rank_groups(options) if options.has_groups else None
        self._rp_engine = Engine(
            model, layers, found, options.optim_dtype, tag, pinned, self._rp_groups, options.gradient_dtype
        )
        if shares and options.pin_model != "off" and torch.cuda.is_available():  # they are where they stay now
            self._rp_engine.pin(PinnedModel(model, "register", found))

    def _rp_layers(self, model: nn.Module) -> list[nn.Module]:
        """The layers that the engine runs."""
        return layers_of(model)

    # -- running -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, roundpipe_run_config: RoundPipeRunConfig | None = None, **kwargs: Any) -> Any:
        """Run the model forward, microbatch by microbatch, and return its joined output.

        With gradients enabled the output is part of the caller's graph, and ``backward`` through it runs the layers
        backward.

        Args:
            *args: positional arguments of the model.
            roundpipe_run_config: settings of this call, which override those of the model.
            **kwargs: keyword arguments of the model.

        Returns:
            The output of the whole batch.

        Raises:
            SplitError: inputs cannot be split into microbatches.
            JoinError: the outputs of the microbatches cannot be joined.
        """
        self._rp_check_layers()
        return self._rp_engine.forward(args, kwargs, self._rp_config(roundpipe_run_config))

    @forward_backward_method
    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Any] = _identity,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> Any:
        """Run forward, loss and backward in one go, and return the loss.

        The last stage starts the backward as soon as it has the loss of a microbatch. Gradients are added to the
        gradient buffers when the whole call has succeeded; after an exception they are unchanged.

        Args:
            input_args: positional arguments of the model.
            input_kwargs: keyword arguments of the model.
            label: labels, split like the inputs.
            loss_fn: ``loss_fn(outputs, labels)`` of a microbatch: a tensor, a sequence of tensors, or a pair
                ``(sum, weight)``. Default: the outputs are the loss.
            return_outputs: whether to also return the outputs, joined and detached.
            run_config: settings of this call, which override those of the model.

        Returns:
            The loss of the batch, detached, on the host, or the list of losses where ``loss_fn`` returns several; with
            ``return_outputs``, ``(loss, outputs)``.

        Raises:
            ConfigError: an argument is not what the signature asks for.
            SplitError: inputs or labels cannot be split into microbatches.
            LossError: ``loss_fn`` returned something that is not a loss.
        """
        self._rp_check_ranks()
        with self._rp_engine.groups.entering():
            args, kwargs = check_call(input_args, input_kwargs)
            check_loss_fn(loss_fn)
            self._rp_check_layers()
            config = self._rp_config(run_config)
            if config.loss_reduction == "joined":
                self._rp_check_alone()
                outputs = self._rp_engine.forward(args, kwargs, dataclasses.replace(config, requires_grad=True))
                return back_from(outputs, label, loss_fn, return_outputs)
            return self._rp_engine.forward_backward(args, kwargs, label, loss_fn, return_outputs, config)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which sums of gradients stay on their rank, to accumulate several batches.

        The first ``forward_backward`` after it sends them, together with its own.
        """
        return self._rp_engine.groups.no_sync()

    def _rp_check_alone(self) -> None:
        """Check that no other process has rows of the same batches, which a joined loss would not see."""
        if self._rp_options.has_groups:
            raise LossError(
                'loss_reduction="joined" computes a loss of all rows, and each process of a mesh has only its own. '
                "Train in one process, or let loss_fn return sums and their weights:\n"
                "    return WeightedLoss(total, weight)"
            )

    def _rp_check_ranks(self) -> None:
        """Warn once that the processes of a group train a model of their own each."""
        if not self._rp_warned and not self._rp_options.has_groups and _world_size() > 1:
            self._rp_warned = True
            warn(
                f"{self.name} runs in one of {_world_size()} processes, and exchanges no gradients with the others: "
                "each trains a model of its own. Give it a mesh:\n"
                '    RoundPipe(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))',
                RoundPipeWarning,
            )

    def _rp_config(self, config: RoundPipeRunConfig | None) -> RoundPipeRunConfig:
        if not isinstance(config, RoundPipeRunConfig | None):
            raise ConfigError(
                f"A run configuration must be a RoundPipeRunConfig, found {type(config).__qualname__}. One of:\n"
                "    forward_backward(..., run_config=RoundPipeRunConfig(num_microbatch=4))\n"
                "    model(..., roundpipe_run_config=RoundPipeRunConfig(num_microbatch=4))"
            )
        return (config or RoundPipeRunConfig()).over(self._rp_options.model_run_config).resolved(self.num_devices)

    def _rp_check_layers(self) -> None:
        """Check that the model has the layers that were wrapped."""
        before, now = self._rp_engine.layers, self._rp_layers(self._rp_model)
        if len(before) != len(now) or any(one is not other for one, other in zip(before, now, strict=True)):
            raise StageError(
                f"{self.name} was made of {len(before)} layers; since then, layers of the model were added, removed or "
                "replaced. Wrap the model again:\n"
                "    pipeline = RoundPipe(pipeline.model, devices=pipeline.devices)"
            )

    # -- optimizing --------------------------------------------------------------------------------------------------

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters for the optimizer, each once.

        Without ``optim_dtype`` these are the model's own; with it, copies of that dtype, which hold the gradients.
        """
        for _, parameter in self.optim_named_parameters():
            yield parameter

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters for the optimizer.

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
        """Yield names and parameters of the model; inside :class:`OptimizerCtx`, those for the optimizer.

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

        A module that contains this one calls it with its ``memo`` to find parameters. Inside :class:`OptimizerCtx` it
        finds those for the optimizer.

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
            yield prefix, _Holder(dict(self.optim_named_parameters(remove_duplicate=remove_duplicate)))

    def step(
        self, step_fn: Callable[..., Any], is_async: bool | Literal["exact"] = False, *args: Any, **kwargs: Any
    ) -> None:
        """Run an optimizer step; the next run sees the new parameters.

        Args:
            step_fn: function that does the step: ``lambda: (optimizer.step(), optimizer.zero_grad())``.
            is_async: ``"exact"``: run it in the background, layer by layer; the next run waits for each layer's update,
                and nothing else differs. ``True``: run it in the background; the next run reads the parameters as they
                were before the step. Default: run it before this returns.
            *args: arguments of ``step_fn``.
            **kwargs: keyword arguments of ``step_fn``.

        Raises:
            ConfigError: ``step_fn`` is not a function, or ``is_async`` is something else.
        """
        if not callable(step_fn):
            raise ConfigError(
                f"step_fn must be a function, found {step_fn!r}:\n"
                "    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))"
            )
        steps = self._rp_engine.steps
        if isinstance(is_async, str):
            if is_async != "exact":
                raise ConfigError(f'is_async must be True, False or "exact", found {is_async!r}.')
            self._rp_engine.step_exact(lambda: step_fn(*args, **kwargs))
        elif is_async:
            steps.start(lambda: step_fn(*args, **kwargs))
        else:
            steps.run(lambda: step_fn(*args, **kwargs))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of the optimizer's parameters such that their norm is at most a number.

        The norm is that of all gradients of all ranks, with the same bits for every number of ranks; all ranks call it.

        Args:
            max_norm: largest norm.
            norm_type: exponent of the norm, ``inf`` for the largest number.
            error_if_nonfinite: whether a norm that is not finite is an error.

        Returns:
            The norm before.

        Raises:
            ConfigError: an exponent that is not positive.
            RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
        """
        from ..distributed.weights.gradient_norm import clip_grad_norm  # torch's DTensor takes a while to load

        targets = list(self.optim_parameters())
        return clip_grad_norm(targets, self.ranks, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def synchronize(self) -> None:
        """Wait for a background step; afterwards the model's parameters and their gradients are up to date."""
        self._rp_engine.synchronize()
        self._rp_engine.store.show_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those of the optimizer's parameters."""
        self._rp_engine.zero_grad(set_to_none)

    # -- what belongs to the pipeline --------------------------------------------------------------------------------

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
        """The devices, which other pipelines may share: ``RoundPipe(other, devices=model.devices)``."""
        return list(self._rp_engine.devices)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the processes that train the model; ``None`` for one process alone."""
        return self._rp_options.mesh

    @property
    def replicas(self) -> int:
        """The number of groups that a batch is cut into, whatever the number of ranks."""
        return self._rp_engine.groups.replicas

    @property
    def ranks(self) -> Ranks:
        """The processes that train the model; this one alone without a mesh."""
        from ..distributed.ranks.ranks import Ranks

        return Ranks() if self._rp_groups is None else self._rp_groups.ranks

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self._rp_engine.devices)

    @property
    def model_memory_limit(self) -> float | None:
        """Memory limit in GB for parameters and gradients on the smallest device, where it is known."""
        return self._rp_engine.planner.memory_limit()

    def layer_costs(self) -> list[LayerCost]:
        """Return the cost of each layer: estimated at first, measured once the pipeline has run."""
        return self._rp_engine.planner.layer_costs()

    @property
    def parameter_traffic(self) -> ParameterTraffic:
        """Bytes of parameters that were copied to devices since the pipeline was made, and what stays there now."""
        return self._rp_engine.kept.traffic

    def drop_kept_parameters(self) -> None:
        """Release the copies of parameters that stay on devices (``keep_parameters`` of :class:`RoundPipeRunConfig`).

        The next run uploads them again. This is for writes that torch does not count: by ``parameter.data``, or by
        another library through the address.
        """
        with self._rp_engine.lock:
            self._rp_engine.kept.drop()

    def set_original_model(self, original_model: nn.Module) -> None:
        """Read, write and delete attributes on this model, from which the wrapped one was made."""
        self._rp_original = original_model

    def close(self) -> None:
        """Wait for a background step and end the threads; the pipeline cannot run afterwards."""
        self._rp_engine.close()

    # -- what is saved -----------------------------------------------------------------------------------------------

    def progress(self) -> PipelineProgress:
        """Return the training state that the state dict does not hold, after the last step.

        Returns:
            The number of runs, the optimizer's copies of parameters, gradients, and the number of groups; the tensors
            are not copied.
        """
        return dataclasses.replace(self._rp_engine.progress(), replicas=self.replicas)

    def load_progress(self, progress: PipelineProgress) -> None:
        """Load what :meth:`progress` returned, after the parameters; gradients that are there now are forgotten.

        Args:
            progress: progress of a pipeline whose parameters have the same names. Copies of the optimizer are left
                out where this pipeline has none. The number of groups is kept, unless this pipeline was given one.
        """
        self._rp_engine.load_progress(progress)
        self._rp_keep_replicas(progress.replicas or 1)

    def _rp_keep_replicas(self, replicas: int) -> None:
        """Cut batches into as many groups as before, for the same sums on another number of ranks."""
        if replicas == self.replicas or replicas == 1:
            return
        if self._rp_options.replicas is None and self.mesh is not None and replicas >= self.ranks.size:
            self._rp_engine.groups.replicas = replicas
            return
        warn(
            f"The training that is loaded cut its batches into {replicas} groups, and {self.name} cuts them into "
            f"{self.replicas}: sums are taken in another order. For the same numbers:\n"
            f"    RoundPipe(..., replicas={replicas})",
            RoundPipeWarning,
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the model, with its own names, after the last step.

        Args:
            *args: positional arguments of the model's ``state_dict``.
            **kwargs: keyword arguments of the model's ``state_dict``.

        Returns:
            The state dict.
        """
        self._rp_engine.synchronize()
        return self._rp_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict into the model; the optimizer's copies are updated.

        Args:
            state_dict: parameters and buffers by name.
            strict: whether the names must be exactly those of the model.
            assign: whether the tensors replace the parameters instead of being copied into them.

        Returns:
            The missing and the unexpected keys, as ``nn.Module.load_state_dict`` returns them.

        Raises:
            RuntimeError: names or shapes do not fit.
        """
        self._rp_engine.synchronize()
        result = self._rp_model.load_state_dict(state_dict, strict, assign)
        self._rp_engine.store.publish()
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # torch calls this in place of `load_state_dict` where another module holds the pipeline. A step that ended
        # later would overwrite what is loaded.
        self._rp_engine.synchronize()
        super()._load_from_state_dict(*args, **kwargs)

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self.devices)
        return f"RoundPipe on {devices}:\n{self._rp_model!r}"

    def __getstate__(self) -> dict[str, Any]:
        self._rp_engine.synchronize()
        return {
            "model": self._rp_model,
            "original": self._rp_original,
            "options": self._rp_options.picklable(self._rp_engine.devices),
            "step": self._rp_engine.step,
            "masters": self._rp_engine.store.masters(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        self._rp_build(state["model"], state["options"], state["original"])
        self._rp_engine.step = state["step"]
        self._rp_engine.store.load_masters(state["masters"])


def _rank_groups(options: PipelineOptions) -> RankGroups:
    """Return the groups that the ranks of a mesh run."""
    from ..distributed.ranks.ranks import ranks_of
    from ..distributed.replicas.rank_groups import RankGroups  # torch's DTensor takes a while to load

    return RankGroups(ranks_of(options.mesh), options.replicas, options.reduce_dtype, options.host_weights)


def _world_size() -> int:
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_there else 1


class _Holder(nn.Module):
    """Parameters under names with dots, in the place where a parent module looks for them."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.__dict__["_parameters"] = parameters
