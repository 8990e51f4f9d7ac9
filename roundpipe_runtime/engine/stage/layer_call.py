"""Call a layer in a stage: random numbers, saved data, and in-place writes to inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn

from ...batch.averages import SteadyDraws, count_items
from ...batch.loss import BackwardTerm
from ...device.protocol import Device
from ...errors import RoundPipeError, StageError
from ..layer_graph import Values, enter, is_refused_write, other_leaves
from ..parameters.on_device import LayerOnDevice, check_not_kept
from ..recompute.draws import CallDraws
from ..recompute.generators import LayerTraits
from ..recompute.states import CURRENT, CallState, VisitGenerator, run_seeded
from ..run import Run
from .nested_checkpoint import run_backward, watch_forward

CallKind = Literal["forward", "fused", "recompute"]

_AS_IT_IS = contextlib.nullcontext()

# Errors that a layer also raises with all of its parameters.
_NOT_OF_THE_LAYER = (RoundPipeError, torch.OutOfMemoryError, MemoryError)


def call_layer(
    run: Run,
    device: Device,
    resident: LayerOnDevice,
    microbatch: int,
    values: Values,
    kind: CallKind,
    generator: VisitGenerator,
    data: tuple[Any, ...] | None = None,
) -> LayerCall:
    """Call a layer with a microbatch, once more if the first attempt showed how it has to be called.

    A layer that never wrote its inputs in place gets the leaves themselves, which is quicker. torch refuses to write a
    leaf; then the layer is called again with tensors that it may write, provided that nothing was written before.
    """
    # kind: `"forward"` (a backward stage will call the layer again), `"fused"` or `"recompute"`
    # data: data that the first forward saved, for a recomputation
    call = LayerCall(run, device, resident, microbatch, values, kind, generator, data)
    # By mode: a layer with in-place dropout writes its inputs in training only.
    mutates_inputs = call.traits.mutates_inputs
    as_leaves = mutates_inputs.get(call.training) is False
    try:
        call.attempt_with_all(as_leaves=as_leaves)
    except RuntimeError as error:
        if not as_leaves or not is_refused_write(error):
            raise
        call.check_repeatable("write its input in place")
        mutates_inputs[call.training] = True
        call.attempt_with_all(as_leaves=False)
    return call


class LayerCall(CallState):
    """The attempts to make one call. There are several per layer and microbatch, so nothing is bound to arguments."""

    # entries: Leaves in which the gradients of the inputs end; `None` where none flow

    __slots__ = (
        *(
            "contents",
            "device",
            "drawing",
            "draws",
            "entered",
            "entries",
            "given",
            "generator",
            "microbatch",
            "module",
            "output",
        ),
        *("resident", "spec", "traits", "training", "values", "versions"),
    )

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
        self.draws = run.draws
        self.drawing: CallDraws | None = None
        self.microbatch, self.values, self.kind, self.given = microbatch, values, kind, data
        # a trial, which draws nothing, shows nothing of what the layer does in other runs
        self.contents, self.traits = resident.contents, LayerTraits() if run.spec.trial else resident.traits
        self.module = module = resident.contents.module
        self.training = module.training
        self.entries: list[torch.Tensor | None] = []
        self.entered: list[torch.Tensor] = []
        self.output: Any = None
        # From before the first attempt: only an attempt that wrote nothing can be repeated with the same result.
        self.versions = self._versions()

    @property
    def kept(self) -> tuple[Any, ...] | None:
        """Data that the layer saved for its recomputation, ``None`` without any."""
        # A fused stage goes back through this very call, so what the layer saved is not needed again.
        return self.data if self.kind == "forward" else None

    def _versions(self) -> list[int]:
        """The version counters of every input and buffer, which count in-place writes."""
        found = [tensor._version for tensor in self.values.tensors]
        if self.contents.buffers:
            found += [tensor._version for tensor in self.resident.buffers()]
        return found

    def is_repeatable(self) -> bool:
        """Report whether the layer has written no input and no buffer."""
        return self.versions == self._versions()

    def check_repeatable(self, what: str) -> None:
        """Check that the layer can be called once more."""
        if not self.is_repeatable():
            raise StageError(
                f"{self.contents.title} began to {what} for the first time, after it wrote an input or a buffer in "
                "place, so the call cannot be repeated. Call the pipeline again."
            )

    def attempt_with_all(self, *, as_leaves: bool) -> None:
        """Call the layer; if the call fails, copy its missing parameters and call it again.

        Code that is not Python, such as kernels of extensions, may refuse what stands for a parameter.
        """
        try:
            self.attempt(as_leaves=as_leaves)
        except _NOT_OF_THE_LAYER:
            raise
        except Exception as error:
            if (as_leaves and is_refused_write(error)) or not self.is_repeatable() or not self.resident.complete():
                raise
            self.attempt(as_leaves=as_leaves)

    def attempt(self, *, as_leaves: bool) -> None:
        """Call the layer."""
        # as_leaves: whether the layer gets leaves, which it cannot write in place
        self.entries, self.entered = enter(self.values, as_leaves=as_leaves)
        # Leaves show nothing new: torch refuses to write them.
        versions = None if as_leaves else [tensor._version for tensor in self.entered]
        before, self.data, CURRENT.call = CURRENT.call, self.given, self
        try:
            self.output = self.resident.call(self._seeded if self.spec.preserve_rng_state else self._watched)
        finally:
            # The layer may have been called by another layer of this thread, whose own call continues.
            CURRENT.call = before
            self.drawing = None  # it refers to this call, whose tensors would stay on the device until a collection
        if versions is not None:
            self.traits.mutates_inputs[self.training] = versions != [tensor._version for tensor in self.entered]

    def _seeded(self) -> Any:
        return run_seeded(self._watched, self.module, self._seed, self.generator, self._again, self.traits, self._place)

    def _place(self) -> CallDraws:
        is_recomputed, title = self.kind == "recompute", self.contents.title
        microbatch = 0 if self.spec.trial == "others" else self.microbatch
        self.drawing = CallDraws(
            self.draws, self.contents.index, microbatch, is_recomputed, title, is_repeatable=self.is_repeatable
        )
        return self.drawing

    def restart_generators(self) -> None:
        """Bring the generators of the call to the state in which all calls of this microbatch restart."""
        if self.drawing is not None:
            self.drawing.restart()

    def _seed(self) -> int:
        return self.spec.seed(self.contents.index, self.microbatch)

    def _again(self) -> Any:
        self.check_repeatable("draw random numbers")
        self.data = self.given
        return self._watched()

    def _watched(self) -> Any:
        if self.training in self.traits.reenters:
            return self._invoke()
        return watch_forward(self._invoke, self.module, self.device.torch_device)

    def _invoke(self) -> Any:
        with SteadyDraws(self.generator.of_device()) if self.spec.trial == "parts" else _AS_IT_IS:
            return self._called()

    def _called(self) -> Any:
        if self.spec.compiled.is_empty:
            return self._call_module()
        with self.spec.compiled.standing(self.contents.index):
            return self._call_module()

    def _call_module(self) -> Any:
        value = self.values.structure.rebuild(self.entered)
        if self.contents.index == 0:  # the first layer has the arguments of the model, the others what came before
            args, kwargs = value
            return self.module(*args, **kwargs)
        return self.module(value)


# Compute the loss of one microbatch, and its backward to the outputs of the last layer.


class MicrobatchLoss:
    """The loss of one microbatch: :meth:`compute` it, then go :meth:`back`."""

    # device: device of the outputs of the last layer

    def __init__(self, run: Run, device: Device, microbatch: int, outputs: Values, generator: VisitGenerator) -> None:
        self._run, self._device, self._microbatch, self._generator = run, device, microbatch, generator
        self._entries, entered = enter(outputs, as_leaves=False)
        self._outputs = outputs.structure.rebuild(entered)
        self._terms: Sequence[BackwardTerm] = ()
        # What the means in the loss were taken over, as far as it is known.
        self._items: Sequence[float] = ()

    def compute(self, labels: Any) -> None:
        """Call the loss function with labels on the device."""
        run, spec = self._run, self._run.spec
        invoke = partial(self._invoke, labels)
        call = partial(watch_forward, invoke, spec.loss_fn, self._device.torch_device)
        if spec.preserve_rng_state:
            seed = partial(spec.seed, len(spec.contents), self._microbatch)
            place = partial(CallDraws, run.draws, len(spec.contents), self._microbatch)
            call = partial(run_seeded, call, spec.loss_fn, seed, self._generator, call, None, place)
        with run.loss_lock:
            result = call()
        self._terms = run.contract.add(self._microbatch, result, self._items)

    def _invoke(self, labels: Any) -> Any:
        """Call the loss function; a second time if the first one shows that it draws, so only the last one counts."""
        loss_fn = self._run.spec.loss_fn
        if self._run.contract.reduction not in ("mean", "items"):  # counting waits for an accelerator
            return loss_fn(self._outputs, labels)
        with count_items() as items:
            result = loss_fn(self._outputs, labels)
        self._items = items.trained
        return result

    def back(self) -> list[torch.Tensor | None]:
        """Go back; return the gradients of the last layer's outputs, ``None`` where none flows."""
        if self._terms:
            with self._run.loss_lock:
                run_backward(self._back, self._run.spec.loss_fn, self._device.torch_device)
        return [None if entry is None else entry.grad for entry in self._entries]

    def _back(self) -> None:
        losses, seeds = [term.tensor for term in self._terms], [term.seed for term in self._terms]
        outside = other_leaves(losses, self._entries)
        if not outside:
            torch.autograd.backward(losses, seeds)
            return
        for leaf in outside:
            check_not_kept(leaf)
        wanted = [entry for entry in self._entries if entry is not None]
        found = torch.autograd.grad(losses, [*wanted, *outside], seeds, allow_unused=True)
        for entry, gradient in zip(wanted, found, strict=False):
            entry.grad = gradient
        # what the loss itself trains is collected like the gradients of a layer after the last
        pairs = zip(cast(list[nn.Parameter], outside), found[len(wanted) :], strict=True)
        collected = self._run.collected
        own = collected.loss_gradients[self._microbatch] = {}
        for leaf, gradient in pairs:
            if gradient is not None:
                own[leaf] = gradient
        if not self._run.spec.has_copies:
            collected.add_loss_gradients(len(self._run.spec.contents))
