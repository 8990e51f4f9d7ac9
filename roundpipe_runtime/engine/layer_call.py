"""Call a layer in a stage, with its random numbers, its saved data, and in-place writes to its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ..device.transfer import TreeStructure
from ..device.virtual import Device
from ..errors import StageError
from .layer_graph import Values, enter, is_refused_write
from .layer_traits import traits_of
from .nested_checkpoint import watch_forward
from .recompute import CALL, run_seeded
from .resident import LayerOnDevice
from .run import Run

__all__ = ["CallKind", "CallResult", "call_layer"]

CallKind = Literal["forward", "fused", "recompute"]


@dataclasses.dataclass(slots=True)
class CallResult:
    """The result of a layer call.

    Attributes:
        entries: Leaves in which the gradients of the inputs end; ``None`` where none flow.
        output: Output of the layer.
        kept: Data that the layer saved for its recomputation, ``None`` without any.
    """

    entries: list[torch.Tensor | None]
    output: Any
    kept: tuple[Any, ...] | None


def call_layer(
    run: Run,
    device: Device,
    resident: LayerOnDevice,
    microbatch: int,
    values: Values,
    kind: CallKind,
    data: tuple[Any, ...] | None = None,
) -> CallResult:
    """Call a layer with a microbatch, once more if the first attempt showed how it has to be called.

    A layer that never wrote its inputs in place gets the leaves themselves, which is quicker. torch refuses to write a
    leaf; then the layer is called again with tensors that it may write, provided that nothing was written before.

    Args:
        run: run that this call belongs to.
        device: device of the layer.
        resident: layer on the device.
        microbatch: index of the microbatch.
        values: inputs, on the device.
        kind: ``"forward"`` (a backward stage will call the layer again), ``"fused"`` or ``"recompute"``.
        data: data that the first forward saved, for a recomputation.

    Returns:
        The output, the leaves of the graph, and saved data.

    Raises:
        StageError: when the layer would have to be called again, and has written an input or a buffer already.
    """
    call = _Call(run, device, resident, microbatch, values, kind, data)
    module = resident.contents.module
    mutates_inputs = traits_of(module).mutates_inputs
    # By mode: a layer with in-place dropout writes its inputs in training only.
    as_leaves = mutates_inputs.get(module.training) is False
    try:
        return call.attempt(as_leaves=as_leaves)
    except RuntimeError as error:
        if not as_leaves or not is_refused_write(error):
            raise
        call.check_repeatable("write its input in place")
        mutates_inputs[module.training] = True
        return call.attempt(as_leaves=False)


class _Call:
    """The attempts to make one call."""

    def __init__(
        self,
        run: Run,
        device: Device,
        resident: LayerOnDevice,
        microbatch: int,
        values: Values,
        kind: CallKind,
        data: tuple[Any, ...] | None,
    ) -> None:
        self.run, self.device, self.resident = run, device, resident
        self.microbatch, self.values, self.kind, self.data = microbatch, values, kind, data
        self.contents = resident.contents
        # From before the first attempt: only an attempt that wrote nothing can be repeated with the same result.
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        """The version counters of every input and buffer, which count in-place writes."""
        return [tensor._version for tensor in [*self.values.tensors, *self.resident.buffers()]]

    def check_repeatable(self, what: str) -> None:
        if self.versions != self._versions():
            raise StageError(
                f"{self.contents.title} began to {what}, which it never did before, and wrote an input or a buffer in "
                "place before that, so the call cannot be repeated. Call the pipeline again."
            )

    def attempt(self, *, as_leaves: bool) -> CallResult:
        entries, entered = enter(self.values, as_leaves=as_leaves)
        versions = [tensor._version for tensor in entered]
        before = CALL.enter(self.kind, self.data)
        try:
            output = self.resident.call(partial(self._seeded, entered))
            # A fused stage goes back through this very call, so what the layer saved is not needed again.
            kept = CALL.data if self.kind == "forward" else None
        finally:
            # The layer may have been called by another layer of this thread, whose own call goes on.
            CALL.enter(*before)
        # Leaves show nothing new: torch refuses to write them.
        if not as_leaves:
            module = self.contents.module
            written = versions != [tensor._version for tensor in entered]
            traits_of(module).mutates_inputs[module.training] = written
        return CallResult(entries, output, kept)

    def _seeded(self, entered: list[torch.Tensor]) -> Any:
        module = self.contents.module
        invoke = partial(_invoke, module, self.contents.index, self.values.structure, entered)
        call = partial(watch_forward, invoke, module, self.device.torch_device)
        if not self.run.spec.preserve_rng_state:
            return call()

        def again() -> Any:
            self.check_repeatable("draw random numbers")
            return call()

        seed = partial(self.run.spec.seed, self.contents.index, self.microbatch)
        return run_seeded(call, module, seed, self.device.torch_device, again)


def _invoke(module: nn.Module, index: int, structure: TreeStructure, tensors: Sequence[torch.Tensor]) -> Any:
    value = structure.rebuild(tensors)
    if index == 0:  # the first layer has the arguments of the model, the others what the layer before returned
        args, kwargs = value
        return module(*args, **kwargs)
    return module(value)
