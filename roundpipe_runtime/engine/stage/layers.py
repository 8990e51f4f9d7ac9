"""Upload a pipeline stage's layers to a device, call them with seeded random generators, and download gradients."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn

from ...batch.loss import BackwardTerm, check_reaches
from ...batch.loss_proof import SteadyDraws, count_items
from ...device.protocol import Device, HasRoom
from ...device.transfer import shapes_of
from ...errors import DeviceMemoryError, RoundPipeError, StageError
from ...schedule.round_robin import Stage
from ..draws import CallDraws, LayerTraits
from ..layer_graph import Values, enter, is_refused_write, other_leaves, run_backward, watch_forward
from ..parameters.on_device import LAYER_TITLE, LayerOnDevice
from ..recomputed import CURRENT, CallState, VisitGenerator, run_seeded
from ..run import Run, RunSpec

_NOTHING = contextlib.nullcontext()
_DOWNLOAD = "the download of its gradients"


class StageLayers:
    """The copies of a pipeline stage's layers on a device, plus layers of the next stage if there is free memory."""

    def __init__(self, run: Run, stage: Stage, device: Device, following: Stage | None, place: Place) -> None:
        self.run, self.stage, self.device, self._following, self._place = run, stage, device, following, place
        self.here: dict[int, LayerOnDevice] = {}
        self.is_measured = True
        # Layers of the following stage that are not on the device yet.
        self.ahead = collections.deque(() if following is None else following.layers)
        self._nbytes_ahead = 0 if following is None else run.spec.stage_nbytes(following)
        # Reports whether the device has room for this many bytes of another stage; `None`: nothing is uploaded ahead.
        self.has_room: HasRoom | None = None

    def measure(self, kind: str, microbatch: int = -1, layer: int = -1) -> contextlib.AbstractContextManager[None]:
        if not self.is_measured:
            return _NOTHING
        return self.run.timer.measure(kind, self.stage.index, self.device, microbatch, layer)

    def resident(self, layer: int) -> LayerOnDevice:
        following = self._following
        # Otherwise the upload would begin after the current stage: a layer that reads a value back from the device
        # makes the host wait, so the host reaches the next stage no earlier than the device.
        if self.ahead and following is not None and self.has_room is not None and self.has_room(self._nbytes_ahead):
            self._place.doing = "the upload of the following stage"
            while self.ahead and self.run.table.can_read(self.ahead[0], self.run.version):
                ahead = self.ahead.popleft()
                if ahead in self.here or (self.device.name, ahead) in self.run.residents:
                    continue
                try:
                    self.run.residents[self.device.name, ahead] = self._copy(ahead, following)
                except DeviceMemoryError:  # activations of this stage need the room
                    self.ahead.clear()
        if layer not in self.here:
            self._upload(layer)
            self.upload_ready()
        return self.here[layer]

    def upload_ready(self) -> None:
        """Upload the next layers of the stage, but stop before a layer whose optimizer update is still running."""
        for layer in self.stage.layers[len(self.here) :]:
            # A layer whose update is still running would delay layers that are ready. The stage waits when it needs the
            # layer.
            if not self.run.table.can_read(layer, self.run.version):
                break
            self._upload(layer)

    def _upload(self, layer: int) -> None:
        there = self.run.residents.pop((self.device.name, layer), None)
        self.here[layer] = self._copy(layer, self.stage) if there is None else there
        if self.stage.copies > 1:  # their gradients are added in microbatch order, not in order of arrival
            self.here[layer].keep_apart()

    def _copy(self, layer: int, stage: Stage) -> LayerOnDevice:
        self._place.layer = layer
        run, store = self.run, self.run.store
        measured = run.timer.measure("upload", stage.index, self.device, layer=layer)
        # Waits until the publication of an asynchronous step has reached this layer, and not for all layers.
        with measured, run.reading(layer):
            contents = run.spec.contents[layer]
            how = store.source, store.gradient_dtype, run.kept, run.version, run.gradient_memory, run.partial_plan
            return LayerOnDevice(contents, self.device, *how)

    def download(self) -> None:
        collected = self.run.collected
        self._place.doing = _DOWNLOAD
        for layer, resident in self.here.items():
            self._place.layer = layer
            with self.measure("download", layer=layer):
                if self.stage.kind != "forward" and layer not in collected.gradients:
                    self._download_gradients(resident)
                if self.stage.kind != "backward":
                    collected.buffers.add(layer, resident.download_buffers())
                if self.stage.kind == "forward":
                    self._check_parameters(resident)

    def download_early(self, layer: int) -> None:
        place = self._place
        microbatch = place.microbatch
        place.layer, place.microbatch, place.doing, place.tensors = layer, None, _DOWNLOAD, None
        with self.measure("download", layer=layer):
            self._download_gradients(self.here[layer])
        place.microbatch = microbatch

    def _check_parameters(self, resident: LayerOnDevice) -> None:
        if self.run.spec.looks:
            with self.run.at_hand(resident.contents.index), self.device.computing(resident.ready):
                resident.check_parameters(self.run.store.source)

    def _download_gradients(self, resident: LayerOnDevice) -> None:
        run, index = self.run, resident.contents.index
        if self.stage.kind == "fused":  # before a step writes the values to compare with
            self._check_parameters(resident)
        run.wait_cleared()
        gradients = resident.download_gradients(run.gradient_scale(), run.gradient_memory, run.store.landing_dtype)
        # gradients of a trial are only compared; zeros for all parameters are added when the run is committed
        if run.gradient_scale() != 0.0 and run.spec.trial is None:
            gradients = run.store.land(index, gradients)
        run.collected.gradients[index] = gradients
        if run.spec.gradients_landed is not None:
            run.spec.gradients_landed(index, gradients)

    def leave(self) -> None:
        """Release the device copies of the layers, except layers that stay on the device until their backward."""
        for layer, resident in self.here.items():
            # A layer with buffers is copied again, because its copies contain what the forward wrote.
            if self.run.spec.stays and self.stage.kind == "forward" and not resident.contents.buffers:
                self.run.residents[self.device.name, layer] = resident
            else:
                resident.release()
        self.here.clear()


@dataclasses.dataclass(slots=True)
class Place:
    run: Run
    stage: Stage
    device: Device
    layer: int | None = None
    microbatch: int | None = None
    doing: str = "the upload of its parameters"
    tensors: Sequence[torch.Tensor] | None = None

    def describe(self) -> str:
        spec, layers = self.run.spec, self.stage.layers
        span = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        where = [f"In stage {self.stage.index} ({self.stage.kind}, {span}) on {self.device.name}, {self.doing}"]
        if self.layer is not None:
            where.append(spec.contents[self.layer].title)
        if self.microbatch is not None:
            where.append(f"microbatch {self.microbatch} of {spec.num_microbatch}")
        if self.tensors is not None:
            where.append(f"tensors {shapes_of(self.tensors)}")
        return where[0] + (": " + ", ".join(where[1:]) if where[1:] else "")

    def memory_advice(self) -> str:
        size = sum(self.run.spec.contents[layer].nbytes() for layer in self.stage.layers)
        kept = self.run.kept.traffic.kept[self.device.name]
        stays = f" Parameters that stay on the device take {kept} bytes: keep_parameters sets how many." if kept else ""
        return (
            f"The parameters of this stage take {size} bytes, and its gradients the same.{stays} Give it fewer layers "
            "(ModelExecutePlan, model_memory_limit), cut the batch into more microbatches (num_microbatch), or "
            "recompute layer by layer (recompute_grain='layer')."
        )


CallKind = Literal["forward", "fused", "recompute"]

# Errors that a layer also raises when all of its parameters are present.
_NOT_OF_THE_LAYER = (RoundPipeError, torch.OutOfMemoryError, MemoryError)


def steady_draws(spec: RunSpec, generator: VisitGenerator) -> contextlib.AbstractContextManager[object]:
    """In a trial that compares a batch with parts of it, replace random numbers in the with block by constants."""
    return SteadyDraws(generator.of_device(), spec.types) if spec.trial == "parts" else _NOTHING


class LayerCall(CallState):
    # kind: `"forward"` (a backward stage will call the layer again), `"fused"` or `"recompute"`
    # data: data that the first forward saved, for a recomputation

    def __init__(
        self,
        run: Run,
        resident: LayerOnDevice,
        microbatch: int,
        values: Values,
        kind: CallKind,
        generator: VisitGenerator,
        data: tuple[Any, ...] | None,
    ) -> None:
        self.spec, self.resident, self.generator = run.spec, resident, generator
        self.draws = run.draws
        self.drawing: CallDraws | None = None
        self.microbatch, self.values, self.kind, self.given = microbatch, values, kind, data
        # a trial, which draws nothing, proves nothing about the layer in other runs
        self.contents, self.traits = resident.contents, LayerTraits() if run.spec.trial else resident.traits
        self.module = resident.contents.module
        self.training = self.module.training
        self.entries: list[torch.Tensor | None] = []  # get the gradients of the inputs; `None` without a gradient
        self.entered: list[torch.Tensor] = []
        self.output: Any = None
        # From before the first attempt: only an attempt that wrote nothing can be repeated with the same result.
        self.versions = self._versions()

    def run(self) -> None:
        # A layer that never wrote its inputs gets leaves, which is faster. torch refuses to write a leaf: the layer is
        # called again with writable tensors. By mode: a layer with in-place dropout writes inputs in training only.
        mutates_inputs = self.traits.mutates_inputs
        as_leaves = mutates_inputs.get(self.training) is False
        try:
            self.attempt_with_all(as_leaves=as_leaves)
        except RuntimeError as error:
            if not as_leaves or not is_refused_write(error):
                raise
            mutates_inputs[self.training] = True  # also for the next call of the pipeline, if this one fails
            self.check_repeatable("write its input in place")
            self.attempt_with_all(as_leaves=False)

    def _versions(self) -> list[int]:
        """Return the numbers of in-place writes to each input and buffer, which torch counts."""
        return [tensor._version for tensor in (*self.values.tensors, *self.resident.buffers)]

    def is_repeatable(self) -> bool:
        return self.versions == self._versions()

    def check_repeatable(self, what: str) -> None:
        if not self.is_repeatable():
            raise StageError(
                f"{self.contents.title} must be called again to {what}, but has already written an input or a buffer "
                "in place, so the second call would differ. Call the pipeline again, which then needs no second call, "
                "or write to copies in the layer."
            )

    def attempt_with_all(self, *, as_leaves: bool) -> None:
        """Call the layer; if the call fails, copy missing parameters to the device and call the layer again."""
        # non-Python code, such as kernels of extensions, may reject the placeholder of a parameter
        try:
            self.attempt(as_leaves=as_leaves)
        except _NOT_OF_THE_LAYER:
            raise
        except Exception as error:
            is_refused = as_leaves and is_refused_write(error)
            if is_refused or not self.is_repeatable() or not self.resident.partial.complete():
                raise
            self.attempt(as_leaves=as_leaves)

    def attempt(self, *, as_leaves: bool) -> None:
        # as_leaves: whether the layer gets leaves, which it cannot write in place
        self.entries, self.entered = enter(self.values, as_leaves=as_leaves)
        # Attempts with leaves show nothing new: torch refuses to write them.
        versions = None if as_leaves else [tensor._version for tensor in self.entered]
        before, self.data, CURRENT.call = CURRENT.call, self.given, self
        try:
            self.output = self.resident.call(self._seeded if self.spec.preserve_rng_state else self._watched)
        finally:
            # The layer may have been called by another layer of this thread, whose own call continues.
            CURRENT.call = before
            self.drawing = None  # a reference cycle would keep the tensors of this call on the device
        if versions is not None:
            self.traits.mutates_inputs[self.training] = versions != [tensor._version for tensor in self.entered]

    def _seeded(self) -> Any:
        seed = partial(self.spec.seed, self.contents.index, self.microbatch)
        return run_seeded(self._watched, self.module, seed, self.generator, self._again, self.traits, self._place)

    def _place(self) -> CallDraws:
        is_recomputed, title = self.kind == "recompute", self.contents.title
        microbatch = 0 if self.spec.trial == "others" else self.microbatch
        self.drawing = CallDraws(
            self.draws, self.contents.index, microbatch, is_recomputed, title, is_repeatable=self.is_repeatable
        )
        return self.drawing

    def restart_generators(self) -> None:
        if self.drawing is not None:
            self.drawing.restart()

    def _again(self) -> Any:
        self.check_repeatable("draw random numbers")
        self.data = self.given
        return self._watched()

    def _watched(self) -> Any:
        if self.training in self.traits.reenters:
            return self._invoke()
        return watch_forward(self._invoke, self.module, self.resident.device.torch_device)

    def _invoke(self) -> Any:
        compiled = self.spec.compiled
        standing = _NOTHING if compiled.is_empty else compiled.standing(self.contents.index)
        with steady_draws(self.spec, self.generator), standing:
            value = self.values.structure.rebuild(self.entered)
            if self.contents.index > 0:
                return self.module(value)
            args, kwargs = value  # the first layer gets the arguments of the model, the others the previous output
            return self.module(*args, **kwargs)


class MicrobatchLoss:
    """The loss of one microbatch: :meth:`compute` calls the loss function, and :meth:`back` runs its backward."""

    # device: device of the outputs of the last layer

    def __init__(self, run: Run, device: Device, microbatch: int, outputs: Values, generator: VisitGenerator) -> None:
        self._run, self._device, self._microbatch, self._generator = run, device, microbatch, generator
        self._entries, entered = enter(outputs, as_leaves=False)
        self._outputs = outputs.structure.rebuild(entered)
        self._terms: Sequence[BackwardTerm] = ()
        self._items: Sequence[float] = ()  # the counts that the means in the loss were divided by, if known

    def compute(self, labels: Any) -> None:
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
        check_reaches(self._terms, result, self._outputs)

    def _invoke(self, labels: Any) -> Any:
        loss_fn = self._run.spec.loss_fn
        if self._run.contract.reduction not in ("mean", "items"):  # counting waits for an accelerator
            return loss_fn(self._outputs, labels)
        with count_items() as items:
            result = loss_fn(self._outputs, labels)
        self._items = items.trained
        return result

    def back(self) -> list[torch.Tensor | None]:
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
        title = next(filter(None, (getattr(leaf, LAYER_TITLE, None) for leaf in outside)), None)
        if title is not None:
            raise StageError(
                f"The loss uses a tensor that {title} stored as an attribute. The gradient would be lost, because the "
                "backward of a layer begins at its outputs. Also return the tensor, and pass it to the loss:\n"
                "    return outputs, auxiliary_loss"
            )
        wanted = [entry for entry in self._entries if entry is not None]
        gradients = torch.autograd.grad(losses, [*wanted, *outside], seeds, allow_unused=True)
        found = cast(Sequence[torch.Tensor | None], gradients)
        for entry, gradient in zip(wanted, found, strict=False):
            entry.grad = gradient
        # gradients of the loss's own parameters are stored as those of a layer after the last
        pairs = zip(cast(list[nn.Parameter], outside), found[len(wanted) :], strict=True)
        collected = self._run.collected
        collected.loss_gradients[self._microbatch] = {leaf: one for leaf, one in pairs if one is not None}
        if all(stage.copies == 1 for stage in self._run.spec.stages):
            collected.add_loss_gradients(len(self._run.spec.contents))
