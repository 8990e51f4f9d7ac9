"""Upload the layers of a stage before they run; download their gradients and release them afterwards."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Sequence

import torch

from ...device.protocol import Device, HasRoom
from ...device.transfer import shapes_of
from ...errors import DeviceMemoryError
from ...schedule.round_robin import Stage
from ..parameters.on_device import LayerOnDevice
from ..run import Run

_NOTHING = contextlib.nullcontext()
_DOWNLOAD = "the download of its gradients"


class StageLayers:
    """The copies of a stage's layers on its device, and of those of the following stage as far as there is room."""

    def __init__(self, run: Run, stage: Stage, device: Device, following: Stage | None, place: Place) -> None:
        self.run, self.stage, self.device, self._following, self._place = run, stage, device, following, place
        self.here: dict[int, LayerOnDevice] = {}
        self.is_measured = True
        # Layers of the following stage that are not on the device yet.
        self.ahead = collections.deque(() if following is None else following.layers)
        self._nbytes_ahead = 0 if following is None else run.spec.stage_nbytes(following)
        # Reports whether the device has room for so many bytes of another stage; `None`: nothing is uploaded ahead.
        self.has_room: HasRoom | None = None

    def measure(self, kind: str, microbatch: int = -1, layer: int = -1) -> contextlib.AbstractContextManager[None]:
        """Measure the work in the block, if this stage is measured."""
        if not self.is_measured:
            return _NOTHING
        return self.run.timer.measure(kind, self.stage.index, self.device, microbatch, layer)

    # -- up ----------------------------------------------------------------------------------------------------------

    def resident(self, layer: int) -> LayerOnDevice:
        """Return a layer on the device; upload it first if it is not there."""
        if self.ahead:
            self._upload_ahead()
        if layer not in self.here:
            self._upload(layer)
            self.upload_ready()
        return self.here[layer]

    def upload_ready(self) -> None:
        """Upload the layers that can be read now; those after them follow when the first microbatch gets there."""
        for layer in self.stage.layers[len(self.here) :]:
            # A layer whose update is still under way would hold up those that are ready; it is waited for when it is
            # needed.
            if not self.run.table.can_read(layer, self.run.version):
                break
            self._upload(layer)

    def _upload(self, layer: int) -> None:
        there = self.run.residents.pop((self.device.name, layer), None)
        self.here[layer] = self._copy(layer, self.stage) if there is None else there
        if self.stage.copies > 1:  # their gradients are added in the order of microbatches, and not as they come
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

    def _upload_ahead(self) -> None:
        """Upload what can be read of the following stage, if there is room for it now.

        A host that is never held comes to that stage before the device has ended this one. A layer that asks for a
        number of the device holds it, and the upload would begin when this stage has ended.
        """
        following = self._following
        if following is None or self.has_room is None or not self.has_room(self._nbytes_ahead):
            return
        self._place.doing = "the upload of the following stage"
        while self.ahead and self.run.table.can_read(self.ahead[0], self.run.version):
            layer = self.ahead.popleft()
            if layer in self.here or (self.device.name, layer) in self.run.residents:
                continue
            try:
                self.run.residents[self.device.name, layer] = self._copy(layer, following)
            except DeviceMemoryError:  # activations of this stage take the room
                self.ahead.clear()

    # -- down --------------------------------------------------------------------------------------------------------

    def download(self) -> None:
        """Copy gradients that are not on the host yet, and buffers that the stage wrote."""
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
        """Copy the gradients of a layer while the layers before it go backward."""
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
        if self.stage.kind == "fused":  # before a step writes what it compares with
            self._check_parameters(resident)
        run.wait_cleared()
        gradients = resident.download_gradients(run.gradient_scale(), run.gradient_memory, run.store.landing_dtype)
        if run.gradient_scale() != 0.0:  # zeros for all parameters are added when the run is committed
            gradients = run.store.land(index, gradients)
        run.collected.gradients[index] = gradients
        if run.spec.gradients_landed is not None:
            run.spec.gradients_landed(index, gradients)

    def leave(self) -> None:
        """Release the memory of the device, unless the backward of a layer can use it here and there is room."""
        for layer, resident in self.here.items():
            # A layer with buffers is copied anew: these copies hold what its forward wrote.
            if self.run.spec.stays and self.stage.kind == "forward" and not resident.contents.buffers:
                self.run.residents[self.device.name, layer] = resident
            else:
                resident.release()
        self.here.clear()


# Describe where a stage was when an error occurred.


@dataclasses.dataclass(slots=True)
class Place:
    """The current step of a stage, for error messages."""

    run: Run
    stage: Stage
    device: Device
    layer: int | None = None
    microbatch: int | None = None
    doing: str = "the upload of its parameters"
    tensors: Sequence[torch.Tensor] | None = None

    def describe(self) -> str:
        """Describe where the stage is, for the note of an error."""
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
        """Describe the size of the stage and what to change, for an out-of-memory error."""
        size = sum(self.run.spec.contents[layer].nbytes() for layer in self.stage.layers)
        kept = self.run.kept.traffic.kept[self.device.name]
        stays = f" Parameters that stay there take {kept} bytes: keep_parameters sets how many." if kept else ""
        return (
            f"The parameters of this stage take {size} bytes, its gradients as much again.{stays} Give it fewer layers "
            "(ModelExecutePlan, model_memory_limit), cut the batch into more microbatches (num_microbatch), or "
            "recompute layer by layer (recompute_grain='layer')."
        )
