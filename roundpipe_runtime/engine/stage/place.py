"""Describe where a stage was when an error occurred."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...device.protocol import Device
from ...device.transfer import shapes_of
from ...schedule.round_robin import Stage
from ..run import Run


@dataclasses.dataclass(slots=True)
class Place:
    """What a stage is doing now; set again at each step, as an error may come from any of them."""

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
