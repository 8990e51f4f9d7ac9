"""Run one pipeline stage on one device: copy parameters, run all microbatches through layers, copy gradients back.

Every layer has a separate autograd graph, whichever stage contains the layer. Gradients are summed in the same order
for any split of layers into stages, so the result is bitwise identical.
"""

# forward stage     get the activations of a microbatch, call the layers, pass the outputs to the next stage
# fused stage       get activations, call the layers, compute the loss, run the backward; no recomputation
# backward stage    get the saved inputs and the output gradients, recompute the layers, run their backward

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from yobx_flatten.core.effects import Snapshot

from ...device.protocol import NOW, Device, Event, HasRoom
from ...device.transfer import HostCopies, HostValue, TreeStructure, fetch, flatten_value, send
from ...device.worker import StoppedRun, add_note_once
from ...errors import StageError
from ...schedule.round_robin import Stage
from ..digests import check_repeated, digest_outputs, is_digested
from ..layer_graph import LayerGraph, Values, check_leaves, plain, run_backward, watch_escaped
from ..parameters.on_device import LayerOnDevice
from ..recomputed import VisitGenerator
from ..run import Run, check_writes, shared_views
from .layers import CallKind, LayerCall, MicrobatchLoss, Place, StageLayers, steady_draws

_NO_MODES = contextlib.nullcontext()


def run_stage(run: Run, stage: Stage, device: Device, following: Stage | None, kind: type[Visit]) -> None:
    """Run a pipeline stage with all microbatches, and store its results or its error in ``run``."""
    # following: stage that the device runs next, which is uploaded as soon as there is room
    # kind: class that runs the stage
    visit = kind(run, stage, device, following)
    try:
        with device.visit(run.spec.stage_nbytes(stage)) as has_room:
            visit.run_all(has_room)
    except StoppedRun:
        pass
    except BaseException as error:  # the caller's thread raises the error
        add_note_once(error, visit.place.describe())
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            add_note_once(error, visit.place.memory_advice())
        run.mailbox.fail(error)
    finally:
        visit.place.tensors = None
        visit.layers.leave()


class Visit:
    def __init__(self, run: Run, stage: Stage, device: Device, following: Stage | None) -> None:
        self.run, self.spec, self.collected = run, run.spec, run.collected
        self.stage = stage
        self.device = device
        self.generator = VisitGenerator(device.torch_device, run.draws if run.spec.preserve_rng_state else None)
        self.place = Place(run, stage, device)
        self.layers = StageLayers(run, stage, device, following, self.place)
        # Whether calls need no context: even an empty context takes time on the host.
        self._is_bare = False
        # The microbatch after which each layer's gradients are complete, so that they can be downloaded.
        self._completes: int | None = self.spec.num_microbatch - 1

    def run_all(self, has_room: HasRoom | None) -> None:
        self.layers.has_room, place = has_room, self.place
        self.layers.is_measured = self.run.timer.measures(self.device)
        self._is_bare = not (self.layers.is_measured or self.spec.caller)
        try:
            with torch.set_grad_enabled(self.spec.requires_grad):
                self.run.mailbox.check()
                self.layers.upload_ready()
                work = {"forward": self._forward, "fused": self._fused, "backward": self._backward}[self.stage.kind]
                for microbatch in self.stage.microbatches(self.spec.num_microbatch):
                    self.run.mailbox.check()
                    place.layer, place.microbatch, place.tensors = None, microbatch, None
                    work(microbatch)
                # A later error does not belong to the last microbatch.
                place.layer = place.microbatch = place.tensors = None
                self._download()
        finally:
            self.generator.restore()

    def _download(self) -> None:
        self.layers.download()

    def _forward(self, microbatch: int) -> None:
        on_host = self._take_input(microbatch)
        values = self._open(on_host)
        copies = HostCopies()
        # Inputs are kept as they are, except the caller's own tensors: they may change before backward.
        if self.stage.layers[0] != self.spec.span.start or self.spec.kind != "train":
            for known in zip(values.tensors, on_host.tensors, on_host.ready, strict=True):
                copies.add(*known)
        for layer in self.stage.layers:
            if layer in self.spec.restarts:
                self.collected.saved[layer, microbatch] = self._send(values, copies=copies)
            values, graph = self._call(layer, microbatch, values, "forward")
            self._drop_graph(graph)  # at once
        stop = layer + 1
        if stop == self.spec.span.stop:  # without the known copies: the caller may write an output
            self.collected.outputs[microbatch] = self._send(values, last=True)
        else:
            self.run.mailbox.put(("activation", stop, microbatch), self._send(values, last=True, copies=copies))

    def _fused(self, microbatch: int) -> None:
        values, graphs = self._through(self.stage.layers, microbatch, self._open(self._take_input(microbatch)), "fused")
        if self.spec.keep_outputs:
            self.collected.outputs[microbatch] = self._send(values)
        gradients = self._loss(microbatch, values)
        self._hand_back(microbatch, self._go_back(microbatch, graphs, gradients))

    def _backward(self, microbatch: int) -> None:
        # Wait for the gradients before the recomputation, whose activations would take memory meanwhile.
        self.place.doing = "the upload of gradients"
        self.generator.cpu_state = None
        layers, saved = self.stage.layers, self.collected.saved
        key = "gradient", layers[-1] + 1, microbatch
        gradients = [None if pair is None else self.device.copy_in(*pair) for pair in self.run.mailbox.take(key)]
        for span in [[layer] for layer in reversed(layers)] if self.spec.recompute_grain == "layer" else [layers]:
            _, graphs = self._through(span, microbatch, self._open(saved.pop((span[0], microbatch))), "recompute")
            gradients = self._go_back(microbatch, graphs, gradients)
        self._hand_back(microbatch, gradients)

    def _through(
        self, layers: Sequence[int], microbatch: int, values: Values, kind: CallKind
    ) -> tuple[Values, list[LayerGraph]]:
        graphs = []
        for layer in layers:
            values, graph = self._call(layer, microbatch, values, kind)
            graphs.append(graph)
        return values, graphs

    def _go_back(
        self, microbatch: int, graphs: list[LayerGraph], gradients: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        while graphs:  # popped, so that the graph of a layer is freed right after its use
            gradients = self._back_through(microbatch, graphs.pop(), gradients)
        return gradients

    def _back_through(
        self, microbatch: int, graph: LayerGraph, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        place = self.place
        place.layer, place.doing, place.tensors = graph.layer, "backward", graph.exits
        self.generator.cpu_state = None
        resident = self.layers.here[graph.layer]
        module = resident.contents.module

        def alone(call: Callable[[], None]) -> None:

            def steadily() -> None:  # within the lock: a draw of another thread would look like one of the layer
                with steady_draws(self.spec, self.generator):
                    call()

            run_backward(steadily, module, self.device.torch_device)

        may_reenter = resident.traits.reenters.get(module.training) is not False
        measured = self.layers.measure("backward", microbatch, graph.layer)
        with self.device.computing(resident.ready), measured, self._modes():
            # with the copies in place, because checkpoints inside the layer call parts of the layer again
            results = resident.call(partial(graph.backward, gradients, alone if may_reenter else operator.call))
            resident.take_gradients()
            if self.spec.take_gradient is not None:
                resident.hand_over(self.spec.take_gradient)
        place.tensors = None
        self._drop_graph(graph)
        # Gradients are downloaded during the backward of earlier layers. Those of the first layer come last: the
        # next stage waits for the gradients of this stage's inputs, which must not queue after them.
        if microbatch == self._completes and graph.layer != self.stage.layers[0]:
            self.layers.download_early(graph.layer)
        return results

    def _drop_graph(self, graph: LayerGraph) -> None:
        """Release the autograd graph of a layer call, so that a second backward raises an error."""
        graph.exits.clear()
        if any(entry is not None for entry in graph.entries):
            watch_escaped(graph.entries, self.layers.here[graph.layer].title)

    def _loss(self, microbatch: int, values: Values) -> list[torch.Tensor | None]:
        place = self.place
        place.layer, place.doing, place.tensors = None, "loss", values.tensors
        on_host = self.spec.labels[microbatch]
        labels = on_host.structure.rebuild(fetch(self.device, on_host))
        with self.device.computing(), self.layers.measure("loss", microbatch), self._modes():
            loss = MicrobatchLoss(self.run, self.device, microbatch, values, self.generator)
            loss.compute(labels)
        self.generator.cpu_state = None
        with self.device.computing(), self.layers.measure("backward", microbatch), self._modes():
            return loss.back()

    def _call(self, layer: int, microbatch: int, values: Values, kind: CallKind) -> tuple[Values, LayerGraph]:
        resident, place = self.layers.resident(layer), self.place
        place.layer, place.doing, place.tensors = layer, kind, values.tensors
        data = None
        if kind == "recompute":
            if resident.contents.buffers:
                for number, (value, ready) in self.collected.buffers.before(layer, microbatch).items():
                    resident.buffers[number] = self.device.copy_in(value, ready)
            saved = self.collected.kept.pop((layer, microbatch), None)
            data = None if saved is None else saved.structure.rebuild(fetch(self.device, saved))
            del saved  # the copy on the host is not needed while the layer runs
        changes = resident.traits.changes_attributes.get(resident.contents.module.training)
        is_followed = not self.spec.trial and (self.spec.looks or changes)
        attributes = self._attributes(resident, (layer, microbatch), kind) if is_followed else _NO_MODES
        with self.device.computing(resident.ready), attributes:
            if self._is_bare:
                result, structure, exits, results = self._call_here(resident, microbatch, values, kind, data)
            else:
                measured = self.layers.measure("recompute" if kind == "recompute" else "forward", microbatch, layer)
                with measured, self._modes():
                    result, structure, exits, results = self._call_here(resident, microbatch, values, kind, data)
        if kind == "forward" and result.data is not None:  # a fused stage runs the backward of this very call
            structure_kept, tensors = flatten_value(result.data, what=f"save_for_recompute in {resident.title}")
            self.collected.kept[layer, microbatch] = send(self.device, structure_kept, tensors, [False] * len(tensors))
        if kind == "forward" and self.spec.kind != "infer" and resident.contents.buffers:
            self.collected.buffers.follow(layer, resident.changed_buffers())
        looks = self.spec.looks and self.spec.kind != "infer"
        # of the last layer in each run: auxiliary loss terms depend on the batch
        if kind != "forward" and (looks or (microbatch == 0 and layer + 1 == self.spec.span.stop)):
            check_leaves(resident.contents, exits, result.entries, resident.parameters(), self.spec.contents)
        if looks and kind != "fused" and self.spec.preserve_rng_state:
            self._look(resident, microbatch, kind, exits)
        flags = [tensor.requires_grad for tensor in exits]
        return Values(structure, results, flags), LayerGraph(layer, result.entries, exits)

    @contextlib.contextmanager
    def _attributes(self, resident: LayerOnDevice, key: tuple[int, int], kind: CallKind) -> Iterator[None]:
        """In the with block of a recomputation, give a layer the attributes that it had before its forward."""
        module, known = resident.contents.module, resident.traits.changes_attributes
        with resident.contents.lock:
            before = Snapshot.of_attributes(module)
            if kind == "recompute":
                saved = self.collected.attributes.pop(key, None)
                if saved is not None:
                    saved.restore()
                try:
                    yield
                finally:
                    before.restore()
                return
            yield
            if before.changes():
                known[module.training] = True
                if kind == "forward" and self.spec.kind != "infer":
                    self.collected.attributes[key] = before

    def _look(self, resident: LayerOnDevice, microbatch: int, kind: CallKind, exits: Sequence[torch.Tensor]) -> None:
        """Check that recomputed outputs are unchanged."""
        key = resident.contents.index, microbatch
        with self.device.computing(resident.ready):
            found = [  # copies are not urgent: they are only read when the layer is recomputed
                (one, NOW) if one.device.type == "cpu" else self.device.copy_out(one, last=True, parameter=True)
                for one in digest_outputs(exits)
            ]
        if kind == "forward":
            self.collected.digests[key] = found
        elif key in self.collected.digests:
            before = self.collected.digests.pop(key)
            for _, complete in (*before, *found):
                complete.result()
            dtypes = [tensor.dtype for tensor in exits if is_digested(tensor)]
            check_repeated(resident.title, [copy for copy, _ in before], [copy for copy, _ in found], dtypes)

    def _call_here(
        self, resident: LayerOnDevice, microbatch: int, values: Values, kind: CallKind, data: tuple[Any, ...] | None
    ) -> tuple[LayerCall, TreeStructure, list[torch.Tensor], list[torch.Tensor]]:
        self.device.use(values.tensors)
        index = resident.contents.index
        shared = None if kind == "recompute" else self.collected.shared.pop((index - 1, microbatch), None)
        versions = {} if not shared else {number: values.tensors[number]._version for number in shared}
        result = LayerCall(self.run, resident, microbatch, values, kind, self.generator, data)
        result.run()
        structure, exits = flatten_value(result.output, what=f"the output of {resident.title}")
        # An input that the layer returns unchanged stays the same tensor: the host has it, or gets it once.
        same = [id(tensor) for tensor in values.tensors]
        results = [plain(t) if t.requires_grad or id(t) not in same else t for t in exits]
        if shared:
            written = [number for number, before in versions.items() if values.tensors[number]._version != before]
            check_writes(shared, written, resident.title)
        if len(exits) > 1 and kind != "recompute":
            numbers = {id(tensor): number for number, tensor in enumerate(result.entered)}
            passed_on = [(place, numbers.get(id(tensor))) for place, tensor in enumerate(exits)]
            found = {place: shared[number] for place, number in passed_on if shared and number in shared}
            found |= shared_views(exits, resident.title)
            if found:
                self.collected.shared[index, microbatch] = found
        return result, structure, exits, results

    def _modes(self) -> contextlib.AbstractContextManager[Any]:
        return self.spec.caller.entered() if self.spec.caller else _NO_MODES

    def _take_input(self, microbatch: int) -> HostValue:
        self.place.doing = "the upload of its input"
        self.generator.cpu_state = None
        on_host: HostValue = self.run.mailbox.take(("activation", self.stage.layers[0], microbatch))
        return on_host

    def _open(self, on_host: HostValue) -> Values:
        return Values(on_host.structure, fetch(self.device, on_host), on_host.needs_grad)

    def _send(self, values: Values, *, last: bool = False, copies: HostCopies | None = None) -> HostValue:
        return send(self.device, values.structure, values.tensors, values.needs_grad, last=last, copies=copies)

    def _hand_back(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        self.place.doing = "the download of gradients"
        copies = [None if gradient is None else self.device.copy_out(gradient, last=True) for gradient in gradients]
        first = self.stage.layers[0]
        if first == self.spec.span.start:
            self.collected.input_gradients[microbatch] = copies
        else:
            self.run.mailbox.put(("gradient", first, microbatch), copies)


# Run one of several copies of the last stage, each on its own device, for its share of the microbatches.
#
# A copy computes the gradients of one microbatch at a time, and the last copy adds them up in the order of the
# microbatches, just as autograd does where one device runs the stage: the bits are the same for any number of copies.
#
#     device 1   m0 ──┐      m2 ──┐      m4 ──┐         ──  the gradients of one microbatch, through the host
#     device 2   m1   └▶ +0  m3   └▶ +1 +2    └▶ +3 +4      are added while the next microbatch is computed


class CopyVisit(Visit):
    """Runs the last pipeline stage on one of several devices, which divide the microbatches among them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._completes = None  # the sums decide when gradients are complete
        # Gradients of this device's own microbatches that are not in the sums yet.
        self._own: dict[tuple[int, int], list[list[torch.Tensor]]] = {}
        self._next = 0

    def _fused(self, microbatch: int) -> None:
        super()._fused(microbatch)
        # Gradients are sent only after the next stage has its inputs.
        if self.stage.is_last_copy:  # gradients of other devices had the time of a microbatch to arrive
            self._add_until(microbatch - self.stage.copies + 1)
            return
        self.place.doing = "the download of the gradients of one microbatch"
        while self._own:
            (layer, microbatch), gradients = self._own.popitem()
            self.place.layer = layer
            with self.layers.measure("download", layer=layer):
                share = [[self.device.copy_out(one, last=True, parameter=True) for one in found] for found in gradients]
            self.run.mailbox.put(("share", layer, microbatch), share)

    def _call(self, layer: int, microbatch: int, values: Values, kind: CallKind) -> tuple[Values, LayerGraph]:
        if layer not in self.layers.here:
            return super()._call(layer, microbatch, values, kind)
        with self.layers.here[layer].contents.lock:  # before time is measured: copies wait for each other
            return super()._call(layer, microbatch, values, kind)

    def _back_through(
        self, microbatch: int, graph: LayerGraph, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        with self.layers.here[graph.layer].contents.lock:
            results = super()._back_through(microbatch, graph, gradients)
        self._own[graph.layer, microbatch] = self.layers.here[graph.layer].pop_gradients()
        return results

    def _add_until(self, stop: int) -> None:
        for microbatch in range(self._next, stop):
            for layer, resident in self.layers.here.items():
                self.place.doing, self.place.layer = "the sum of gradients", layer
                self._add(resident, layer, microbatch)
        self._next = max(self._next, stop)

    def _add(self, resident: LayerOnDevice, layer: int, microbatch: int) -> None:
        gradients, arrived = self._own.pop((layer, microbatch), None), resident.ready
        if gradients is None:
            share: list[list[tuple[torch.Tensor, Event]]] = self.run.mailbox.take(("share", layer, microbatch))
            with self.layers.measure("upload", layer=layer):
                gradients = [[self.device.copy_in(*one, parameter=True) for one in found] for found in share]
            arrived = self.device.arrival()
        with self.device.computing(arrived):
            resident.add_gradients(gradients)

    def _download(self) -> None:
        self.place.doing = "the check of its buffers"
        for layer, resident in self.layers.here.items():
            self.place.layer = layer
            written = resident.download_buffers()
            if written:
                names = [resident.contents.buffers[number].name for number in sorted(written)]
                raise StageError(
                    f"{resident.title} wrote its buffer {names[0]!r}, but {self.stage.copies} devices run copies of "
                    "the layer, so the buffers would differ. Use one copy:\n    RoundPipeRunConfig(last_stage_copies=1)"
                )
        if self.stage.is_last_copy:
            self._add_until(self.spec.num_microbatch)
            self.collected.add_loss_gradients(len(self.spec.contents))
            super()._download()
