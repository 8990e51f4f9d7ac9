"""``RoundPipe``, the class that trains a model larger than device memory, stage by stage."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.registry.recipe.aliases import PyTree

from ..batch.entries import check_call
from ..batch.loss import LossContract, WeightedLoss
from ..device.accelerator import AcceleratorDevice, DeviceSpec, parse_devices
from ..device.composite import check_copyable
from ..device.disk import HOST_IN_MEMORY, DiskMemory, disk_folder, disk_of
from ..device.pinning import PinnedModel
from ..device.transfer import send_as, sent_as, shapes_of, widen
from ..device.worker import noting
from ..engine.config import CompiledLayers, RoundPipeRunConfig, check_compile_options
from ..engine.driver import Engine
from ..engine.lifecycle import EngineOptions, in_two_passes
from ..engine.loss_check import JoinedLossError
from ..engine.rows import RowCheck
from ..errors import ConfigError, LossError, RoundPipeWarning, StageError, call_site, warn
from ..optim.layer_contents import scan
from ..optim.parts import widened
from ..optim.torch_steps import take_over_always
from .engine_handle import CALL_HOOKS, EngineHandle, PipelineOptions, as_module, layers_of
from .live import ModelReading, changed_layers

# Types of `forward_backward`, in which the type of `loss_fn` determines the type of the result.

Loss: TypeAlias = torch.Tensor | WeightedLoss | tuple[torch.Tensor | float, torch.Tensor | float]
Outputs = TypeVar("Outputs")


class ForwardBackward(Protocol):
    """The overloads of :meth:`RoundPipe.forward_backward`: the result type for each combination of argument types."""

    @overload
    def __call__(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Loss] = ...,
        return_outputs: Literal[False] = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> torch.Tensor: ...

    @overload
    def __call__(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        *,
        loss_fn: Callable[[Any, Any], list[torch.Tensor]],
        return_outputs: Literal[False] = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> list[torch.Tensor]: ...

    @overload
    def __call__(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        *,
        return_outputs: Literal[True],
        run_config: RoundPipeRunConfig | None = None,
    ) -> tuple[torch.Tensor, object]: ...

    @overload
    def __call__(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        *,
        loss_fn: Callable[[Outputs, Any], Loss],
        return_outputs: Literal[True],
        run_config: RoundPipeRunConfig | None = None,
    ) -> tuple[torch.Tensor, Outputs]: ...

    @overload
    def __call__(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Loss | list[torch.Tensor]] = ...,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor | list[torch.Tensor], object]: ...


def forward_backward_method(method: Callable[..., object]) -> ForwardBackward:
    """Return a method unchanged, typed as :class:`ForwardBackward`."""
    return cast(ForwardBackward, method)


def back_from(outputs: PyTree, label: Any, loss_fn: Callable[[Any, Any], Any], return_outputs: bool) -> PyTree:
    found = shapes_of([leaf for leaf in pytree.tree_leaves((outputs, label)) if isinstance(leaf, torch.Tensor)])
    note = f"In the loss, called once with the joined outputs and the labels of all rows: tensors {found}"
    with torch.enable_grad(), noting(note):
        # outputs of microbatches carry the weights of their losses, but joined outputs do not
        own = getattr(loss_fn, "__wrapped__", loss_fn) if hasattr(loss_fn, "has_proven_weights") else loss_fn
        contract = LossContract("sum", [1])  # the whole batch is one microbatch
        terms = contract.add(0, own(outputs, label))
        scale, loss = contract.gradient_scale(), contract.total()  # before the backward, which may fail
    if terms:
        torch.autograd.backward([term.tensor for term in terms], [term.seed * scale for term in terms])
    total = pytree.tree_map(torch.Tensor.cpu, loss)
    return (total, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)) if return_outputs else total


def _identity(outputs: Any, labels: Any) -> Any:
    return outputs


class RoundPipe(EngineHandle):
    """Train a model larger than device memory: the pipeline copies a few layers at a time to the devices.

    A pipeline has the parameters, buffers, names and ``state_dict`` of its model; ``train`` and ``eval`` set the mode
    of the model. Attributes that a pipeline does not have are read, set and deleted on the model.

    Args:
        model: a list or an ``nn.Sequential`` of layers; any other ``nn.Module`` is a single layer.
        optim_dtype: dtype of the optimizer's parameters and of gradients (default: the dtype of each parameter).
        name: name in errors, and in seeds of layers such as dropout (default: in errors ``"file:line"`` of the call).
        model_run_config: default settings for all calls of the pipeline.
        pin_model: how parameters are pinned in host memory if there is an accelerator. ``"alloc"`` (default) moves
            parameters to pinned memory, ``"register"`` pins parameters in place (CUDA only), ``"off"`` pins nothing.
        devices: ``"virtual:N"``, a list of torch devices or of :class:`Device` objects, or ``None``: all accelerators,
            or ``"virtual:2"`` without an accelerator.
        mesh: mesh of the processes that train the model, such as ``init_device_mesh("cpu", (N,))`` (default: this
            process alone). With a mesh, each process passes its part of the batch to ``forward_backward``, and stores
            the optimizer state for some rows of every matrix. With a mesh of shape ``(R, S)``, the optimizer state is
            split among ``S`` processes, and ``R`` processes have the same part of the state. With shape ``(N, 1)``,
            each process has the whole state.
        replicas: number of groups that the rows of a batch are split into (default: number of ranks N). Rank r gets the
            groups r, r + N, r + 2N, ... With the same ``replicas``, every number of ranks gives the same results.
        reduce_dtype: dtype in which gradients are sent between ranks (default: the dtype in which they are summed).
        gradient_dtype: dtype in which gradients of master weights are stored until the optimizer step (default:
            ``optim_dtype``). Within a backward, gradients are summed in ``optim_dtype``.
        compile: ``True``, or keyword arguments of ``torch.compile``, to compile the layers (default: layers are not
            compiled). Layers are compiled with ``dynamic=True``, unless the keyword arguments contain ``dynamic``.
        large_tables: how embeddings and heads of at least 16 MiB are copied to a device. ``"auto"``: of an embedding,
            only the rows that a microbatch reads are copied. The head (output layer) of a transformers model is copied
            in slices if it is too large for a stage. ``"slices"``: a head is always copied in slices, which changes the
            loss by rounding errors. ``"whole"``: embeddings and heads are copied like every other parameter.
        host: with ``"disk:DIR"``, parameters, gradients, master weights and optimizer state are in a scratch file in
            this folder, and only a few layers are in memory at a time (default: ``"memory"``). Results are unchanged.
        update: what the optimizer updates (default: ``"masters"``). ``"masters"``: copies of the parameters in
            ``optim_dtype`` (master weights). After each step, the rounded master weights are copied to the parameters.
            ``"in_place"``: the parameters of the model, converted to ``optim_dtype``. Copies on devices are rounded to
            the original dtype. ``"in_backward"``: as ``"in_place"``, but ``forward_backward`` updates each layer when
            the gradients of the layer are complete, see :meth:`step_with`. All three values give the same results.

    Raises:
        ConfigError: an argument has an invalid value.

    >>> model = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), devices="virtual:2")
    >>> loss_fn = nn.functional.mse_loss
    >>> loss = model.forward_backward((torch.ones(6, 4),), label=torch.ones(6, 2), loss_fn=loss_fn)
    >>> loss.shape, model[0].weight.grad.shape
    (torch.Size([]), torch.Size([4, 4]))
    >>> model.close()
    """

    _rp_warned: bool = False
    _rp_warned_of_loss: bool = False

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
        compile: bool | Mapping[str, object] = False,
        large_tables: Literal["auto", "whole", "slices"] = "auto",
        host: str = HOST_IN_MEMORY,
        update: Literal["masters", "in_place", "in_backward"] = "masters",
    ) -> None:
        super().__init__()
        config = RoundPipeRunConfig() if model_run_config is None else model_run_config
        options = PipelineOptions(
            name or call_site(), optim_dtype, name, config, pin_model, devices, mesh, replicas, reduce_dtype,
            gradient_dtype, compile, large_tables, host, update,
        )  # fmt: skip
        self._rp_build(as_module(model), options, None)

    def _rp_build(self, model: nn.Module, options: PipelineOptions, original: nn.Module | None) -> None:
        found = parse_devices(options.devices)
        layers = self._rp_layers(model)
        scan(layers)  # refuses what cannot be copied
        check_copyable(model)
        if options.update != "masters" and options.optim_dtype is not None:
            widen(model.parameters(), options.optim_dtype)
        folder = disk_folder(options.host)
        pins = PinnedModel(model, options.pin_model if folder is None else "off", found)
        tag = f"{options.name or ''}|{len(layers)}|{sum(p.numel() for p in model.parameters())}"
        self._rp_stand_for(model, original)
        self._rp_options = options
        if options.gradient_dtype is not None:
            take_over_always(widened)
        self._rp_groups = None
        if options.has_groups:
            from ..distributed.ranks.ranks import ranks_of
            from ..distributed.replicas.rank_groups import RankGroups  # torch's DTensor takes a while to load

            self._rp_groups = RankGroups(ranks_of(options.mesh), options.replicas, options.reduce_dtype)
        compiled = CompiledLayers(layers, check_compile_options(options.compile))
        disk = None
        if folder is not None:  # parameters of the model may be stored there already
            held = next((memory for p in model.parameters() if (memory := disk_of(p)) is not None), None)
            disk = DiskMemory(folder) if held is None or held.folder != folder else held
        of_engine = EngineOptions(
            options.optim_dtype, tag, pins, options.gradient_dtype, compiled, options.large_tables, disk, options.update
        )
        self._rp_engine = Engine(model, layers, found, of_engine, self._rp_groups)
        self._rp_reading = ModelReading(model, layers)

    def _rp_layers(self, model: nn.Module) -> list[nn.Module]:
        return layers_of(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run :meth:`forward` and the hooks of the wrapped model."""
        if self._rp_runs_model:  # the hooks run inside, for each microbatch
            return self.forward(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, roundpipe_run_config: RoundPipeRunConfig | None = None, **kwargs: Any) -> Any:
        """Run the model forward, microbatch by microbatch, and return the joined output.

        If gradients are enabled, the output is part of the caller's autograd graph, and ``backward`` runs the backward
        of the layers.

        Args:
            *args: positional arguments of the model.
            roundpipe_run_config: settings of this call, which override ``model_run_config`` of the pipeline.
            **kwargs: keyword arguments of the model.

        Returns:
            The output of the whole batch.

        Raises:
            SplitError: inputs cannot be split into microbatches.
            JoinError: the outputs of the microbatches cannot be joined.
        """
        self._rp_check_model()
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
        """Run forward, loss and backward, and return the loss.

        The backward of a microbatch starts when its loss is known. Gradients are added to the parameters' gradients
        after the whole call has succeeded; after an exception the gradients are unchanged.

        Args:
            input_args: positional arguments of the model.
            input_kwargs: keyword arguments of the model.
            label: labels of the batch, which are split into microbatches like the inputs.
            loss_fn: ``loss_fn(outputs, labels)`` returns the loss of a microbatch: a tensor, a sequence of tensors, or
                a pair ``(sum, weight)`` (default: the outputs are the loss). The loss of the batch equals the loss
                without a pipeline, unless the setting ``loss_reduction`` states otherwise.
            return_outputs: whether to also return the outputs, joined and detached.
            run_config: settings of this call, which override ``model_run_config`` of the pipeline.

        Returns:
            The loss of the batch, detached, in CPU memory; or the list of losses if ``loss_fn`` returns several. With
            ``return_outputs``, ``(loss, outputs)``.

        Raises:
            ConfigError: an argument does not match the signature.
            SplitError: inputs or labels cannot be split into microbatches.
            LossError: ``loss_fn`` returned something that is not a loss.
        """
        if not self._rp_warned and not self._rp_options.has_groups and _world_size() > 1:
            self._rp_warned = True
            warn(
                f"{self.name} runs in one of {_world_size()} processes, and exchanges no gradients with the others: "
                "each trains its own model. Give the pipeline a mesh:\n"
                '    RoundPipe(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))',
                RoundPipeWarning,
            )
        with self._rp_engine.groups.entering():
            args, kwargs = check_call(input_args, input_kwargs, loss_fn)
            self._rp_check_model()
            held, kind = vars(self._rp_model), type(self._rp_model).__name__
            if not self._rp_runs_model and (found := next((name for name in CALL_HOOKS if held[name]), None)):
                raise StageError(
                    f"{self.name}: the {kind} has {found.strip('_').replace('_', ' ')}, which forward_backward does "
                    "not run, because it calls the layers directly. Register hooks on a layer:\n"
                    "    model[0].register_forward_pre_hook(hook); model[-1].register_forward_hook(hook)"
                )
            config = self._rp_config(run_config)

            def joined(is_checked: bool) -> Any:
                two = in_two_passes(dataclasses.replace(config, requires_grad=True))
                outputs = self._rp_engine.forward(args, kwargs, two, is_checked=is_checked)
                return back_from(outputs, label, loss_fn, return_outputs)

            if config.loss_reduction == "joined":
                self._rp_check_alone()
                return joined(False)
            try:
                return self._rp_engine.forward_backward(args, kwargs, label, loss_fn, return_outputs, config)
            except JoinedLossError as error:
                if self._rp_options.has_groups:
                    raise
                reason = error
            return self._rp_joined_instead(reason, lambda: joined(True))

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that accumulates gradients on each rank, without exchange between ranks.

        The first ``forward_backward`` after the with block also sends the accumulated gradients.
        """
        return self._rp_engine.groups.no_sync()

    def _rp_joined_instead(self, error: JoinedLossError, compute: Callable[[], Any]) -> Any:
        """Compute the loss from joined outputs instead of from the losses of microbatches, and warn once."""
        try:
            found = compute()
        except Exception:
            self._rp_engine.loss_checks.forget(error.proof)
            raise
        if error.proof.compared and not self._rp_warned_of_loss:
            self._rp_warned_of_loss = True
            warn(
                f"The loss cannot be computed from the losses of microbatches: {error.proof.reason} So the loss is "
                "computed once from all outputs, which must fit in memory together. To do this without a warning, set "
                'loss_reduction="joined".',
                RoundPipeWarning,
            )
        return found

    def _rp_check_alone(self) -> None:
        if self._rp_options.has_groups:
            raise LossError(
                'loss_reduction="joined" computes the loss from all rows, but each process of a mesh has only some of '
                "them. Train in one process, or let loss_fn return sums and their weights:\n"
                "    return WeightedLoss(total, weight)"
            )

    def _rp_config(self, config: RoundPipeRunConfig | None) -> RoundPipeRunConfig:
        if not isinstance(config, RoundPipeRunConfig | None):
            raise ConfigError(
                f"A run configuration must be a RoundPipeRunConfig, found {type(config).__qualname__}. Write:\n"
                "    forward_backward(..., run_config=RoundPipeRunConfig(num_microbatch=4))\n"
                "    model(..., roundpipe_run_config=RoundPipeRunConfig(num_microbatch=4))"
            )
        return (config or RoundPipeRunConfig()).over(self._rp_options.model_run_config).resolved(self.num_devices)

    def _rp_check_model(self) -> None:
        """Raise an error if layers of the model were replaced since the pipeline was created."""
        model, layers = self._rp_model, self._rp_engine.layers
        reading = ModelReading(model, layers)
        if reading.matches(self._rp_reading):
            return
        now = self._rp_layers(model)
        names = [{str(number): one for number, one in enumerate(held)} for held in (layers, now)]
        changed = "its forward was replaced" if now[0] is model is not layers[0] else changed_layers(*names)
        if changed:
            raise StageError(
                f"{self.name} was made of {len(layers)} layers, and then {changed}. Wrap the model again:\n"
                "    pipeline = RoundPipe(pipeline.model, devices=pipeline.devices)"
            )
        self._rp_reading = reading
        if self._rp_engine.row_check is not None:
            self._rp_engine.row_check = RowCheck()  # checks the changed layers again

    @property
    def _rp_runs_model(self) -> bool:
        """Whether the model is a single layer, so that calls of the layer run the hooks of the model."""
        return self._rp_engine.layers[0] is self._rp_model

    def __getstate__(self) -> dict[str, Any]:
        self._rp_engine.synchronize()
        options, devices = self._rp_options, self._rp_engine.devices
        if options.mesh is not None:
            raise ConfigError(
                "A pipeline of several ranks has a part of its state on each rank, so it cannot be pickled. All ranks "
                "save the training together; rank 0 alone can save the weights:\n"
                "    save_checkpoint(folder, model, optimizer=optimizer)\n"
                "    torch.save(model.state_dict(), file)"
            )
        if not isinstance(options.devices, str | None):  # names, so that another process can create the pipeline
            on_accelerators = all(isinstance(device, AcceleratorDevice) for device in devices)
            names = [device.name for device in devices] if on_accelerators else f"virtual:{len(devices)}"
            options = dataclasses.replace(options, devices=names)
        return {
            "model": self._rp_model,
            "original": self._rp_original,
            "options": options,
            "step": self._rp_engine.step,
            "masters": self._rp_engine.store.masters(),
            "sent": sent_as(self._rp_model),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        send_as(state["model"], state.get("sent", {}))
        self._rp_build(state["model"], state["options"], state["original"])
        self._rp_engine.step = state["step"]
        self._rp_engine.store.load_masters(state["masters"])


def _world_size() -> int:
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_there else 1
