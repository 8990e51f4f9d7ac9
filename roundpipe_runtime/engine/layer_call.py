"""Call a layer in a stage, with its random numbers, its saved data, and in-place writes to its inputs."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from ..device.virtual import Device
from ..errors import StageError
from .layer_graph import Values, enter, is_refused_write
from .layer_traits import traits_of
from .nested_checkpoint import watch_forward
from .recompute import CALL, VisitGenerator, run_seeded
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
    generator: VisitGenerator,
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
        generator: generator of the device.
        data: data that the first forward saved, for a recomputation.

    Returns:
        The output, the leaves of the graph, and saved data.

    Raises:
        StageError: when the layer would have to be called again, and has written an input or a buffer already.
    """
    call = _Call(run, device, resident, microbatch, values, kind, generator, data)
    # By mode: a layer with in-place dropout writes its inputs in training only.
    mutates_inputs, training = call.traits.mutates_inputs, call.module.training
    as_leaves = mutates_inputs.get(training) is False
    try:
        return call.attempt(as_leaves=as_leaves)
    except RuntimeError as error:
        if not as_leaves or not is_refused_write(error):
            raise
        call.check_repeatable("write its input in place")
        mutates_inputs[training] = True
        return call.attempt(as_leaves=False)


class _Call:
    """The attempts to make one call. There are several per layer and microbatch, so nothing is bound to arguments."""

    def __init__(
        self,
        run: Run,
        device: Device,
        resident: LayerOnDevice,
        microbatch: int,
        values: Values,
        kind: CallKind,
        generator: VisitGenerator,
        data: tuple[Any, ...] | None,
    ) -> None:
        self.spec, self.device, self.resident, self.generator = run.spec, device, resident, generator
        self.microbatch, self.values, self.kind, self.data = microbatch, values, kind, data
        self.contents = resident.contents
        self.module = resident.contents.module
        self.traits = traits_of(self.module)
        self.entered: list[torch.Tensor] = []
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
        entries, self.entered = enter(self.values, as_leaves=as_leaves)
        # Leaves show nothing new: torch refuses to write them.
        versions = None if as_leaves else [tensor._version for tensor in self.entered]
        before = CALL.enter(self.kind, self.data)
        try:
            output = self.resident.call(self._seeded if self.spec.preserve_rng_state else self._watched)
            # A fused stage goes back through this very call, so what the layer saved is not needed again.
            kept = CALL.data if self.kind == "forward" else None
        finally:
            # The layer may have been called by another layer of this thread, whose own call goes on.
            CALL.enter(*before)
        if versions is not None:
            written = versions != [tensor._version for tensor in self.entered]
            self.traits.mutates_inputs[self.module.training] = written
        return CallResult(entries, output, kept)

    def _seeded(self) -> Any:
        return run_seeded(self._watched, self.module, self._seed, self.generator, self._again)

    def _seed(self) -> int:
        return self.spec.seed(self.contents.index, self.microbatch)

    def _again(self) -> Any:
        self.check_repeatable("draw random numbers")
        return self._watched()

    def _watched(self) -> Any:
        if self.module.training in self.traits.reenters:
            return self._invoke()
        return watch_forward(self._invoke, self.module, self.device.torch_device)

    def _invoke(self) -> Any:
        value = self.values.structure.rebuild(self.entered)
        if self.contents.index == 0:  # the first layer has the arguments of the model, the others what came before
            args, kwargs = value
            return self.module(*args, **kwargs)
        return self.module(value)
