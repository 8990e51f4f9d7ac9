"""Run one of several copies of the last stage, each on its own device, for its share of the microbatches.

A copy computes the gradients of one microbatch at a time, and the last copy adds them up in the order of the
microbatches, just as autograd does where one device runs the stage: the bits are the same for any number of copies.

::

    # device 1   m0 ──┐      m2 ──┐      m4 ──┐         ──  the gradients of one microbatch, over the host
    # device 2   m1   └▶ +0  m3   └▶ +1 +2    └▶ +3 +4      are added while the next microbatch is computed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...device.protocol import Event
from ...errors import StageError
from ..layer_graph import LayerGraph, Values
from ..parameters.on_device import LayerOnDevice
from .layer_call import CallKind
from .visit import Visit


class CopyVisit(Visit):
    """A copy of the fused stage on its device. The last one waits for the others, which are dispatched before it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._completes = None  # the sums are, and not what this device computes
        # Gradients of this device's own microbatches that are not in the sums yet.
        self._own: dict[tuple[int, int], list[list[torch.Tensor]]] = {}
        self._next = 0

    def _fused(self, microbatch: int) -> None:
        super()._fused(microbatch)
        # Not before the next stage has what it waits for.
        if not self.stage.is_last_copy:
            self._send_shares()
        else:  # one's own last ones only now: those of the other devices had the time of a microbatch to come
            self._add_until(microbatch - self.stage.copies + 1)

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

    # -- gradients of one microbatch ---------------------------------------------------------------------------------

    def _send_shares(self) -> None:
        """Send what was computed here to the last copy, over the host."""
        self.place.doing = "the download of the gradients of one microbatch"
        while self._own:
            (layer, microbatch), gradients = self._own.popitem()
            self.place.layer = layer
            with self.layers.measure("download", layer=layer):
                share = [[self.device.copy_out(one, last=True, parameter=True) for one in found] for found in gradients]
            self.run.mailbox.put(("share", layer, microbatch), share)

    def _add_until(self, stop: int) -> None:
        """Add the gradients of the microbatches before this one to the sums, in their order."""
        for microbatch in range(self._next, stop):
            for layer, resident in self.layers.here.items():
                self.place.doing = "the sum of gradients"
                self.place.layer = layer
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

    # -- the end of the visit ----------------------------------------------------------------------------------------

    def _download(self) -> None:
        self.place.doing = "the check of its buffers"
        for layer, resident in self.layers.here.items():
            self.place.layer = layer
            written = resident.download_buffers()
            if written:
                names = [resident.contents.buffers[number].name for number in sorted(written)]
                raise StageError(
                    f"{resident.title} wrote its buffer {names[0]!r}, and {self.stage.copies} devices run it without "
                    "seeing each other's writes. Run it on one device:\n    RoundPipeRunConfig(last_stage_copies=1)"
                )
        if self.stage.is_last_copy:
            self._add_until(self.spec.num_microbatch)
            self.collected.add_loss_gradients(len(self.spec.contents))
            super()._download()
