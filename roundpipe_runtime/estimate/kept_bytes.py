"""Choose the bytes of each layer that stay on a device between steps (``keep_parameters``).

::

    room for 500 bytes     layer 0  100 frozen    layer 1  300 frozen    layer 2  200 frozen, 50 that train
    what stays                      100                    300                    100

The runtime chooses whole parameters, in the same order: those that do not train first, then the others, layer by layer.
Here the last one that has room may be a part of a parameter. A parameter of two layers counts in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..engine.planner import FOR_PARAMETERS, bytes_to_keep
from ..schedule.round_robin import Stage
from .layer_footprint import LayerFootprint


class KeptBytes(NamedTuple):
    """Bytes of a layer that stay on each device."""

    frozen: int  # bytes of parameters that do not train. They are on the device before the step begins.
    trained: int  # bytes of parameters that train. They stay from the first stage of a step that needs them to its end.

    def of(self, *, was_here: bool) -> int:
        """Return the bytes that are on a device when a stage comes to it."""
        return self.frozen + (self.trained if was_here else 0)


def kept_bytes(layers: Sequence[LayerFootprint], room: float) -> list[KeptBytes]:
    """Return what stays of each layer.

    >>> layer = LayerFootprint("", 300, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, frozen_bytes=250, trained_bytes=50)
    >>> [tuple(kept) for kept in kept_bytes([layer, layer], 520)]
    [(250, 20), (250, 0)]
    """
    frozen, room = _filled([layer.frozen_bytes for layer in layers], room)
    trained, _ = _filled([layer.trained_bytes for layer in layers], room)
    return [KeptBytes(*sizes) for sizes in zip(frozen, trained, strict=True)]


def room_to_keep(
    wanted: float | Literal["auto"],
    stages: Sequence[Stage],
    layers: Sequence[LayerFootprint],
    memory: int | None,
    *,
    fits: bool,
) -> float:
    """Return the bytes of each device for parameters that stay, as the runtime has them."""
    # wanted: `keep_parameters` of `RoundPipeRunConfig`
    # memory: bytes of a device, `None` where they are not known
    # fits: whether there is room for all parameters and gradients at once
    if wanted != "auto":
        return wanted * 1e9
    largest = max((_stage_bytes(stage, layers) for stage in stages), default=0)
    return bytes_to_keep(None if memory is None else FOR_PARAMETERS * memory, largest, fits=fits)


def _stage_bytes(stage: Stage, layers: Sequence[LayerFootprint]) -> int:
    sets = 0 if stage.kind == "forward" else stage.gradient_sets
    return sum(layers[i].param_bytes + sets * layers[i].trained_bytes for i in stage.layers)


def _filled(sizes: Sequence[int], room: float) -> tuple[list[int], float]:
    """How much of each size there is room for, one after the other, and what is left."""
    found = []
    for size in sizes:
        here = size if size <= room else int(room)
        found.append(here)
        room -= here
    return found, room
