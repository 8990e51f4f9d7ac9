"""Pinned memory for the gradients that come down from accelerators, the same in every run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import nn

from ...device.pinning import PinnedMemory
from ...optim.parameters import LayerContents


class GradientMemory:
    """Pinned memory with a place for the gradient of each parameter of each layer.

    A gradient becomes that of the parameter, so its place is taken until the gradient is cleared. Where gradients are
    accumulated over several runs, the next run gets a second set of places.
    """

    def __init__(self) -> None:
        self._sizes: dict[Hashable, int] = {}
        self._sets: list[PinnedMemory] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all sets."""
        return sum(places.nbytes for places in self._sets)

    def prepare(self, contents: Sequence[LayerContents], dtype: Callable[[nn.Parameter], torch.dtype]) -> None:
        """Plan the places of a run."""
        sizes: dict[Hashable, int] = {
            (layer.index, id(parameter)): parameter.numel() * dtype(parameter).itemsize
            for layer in contents
            for parameter in layer.parameters()
            if parameter.requires_grad
        }
        if sizes != self._sizes:
            self._sizes, self._sets = sizes, []
        else:
            self._sets = [places for number, places in enumerate(self._sets) if number == 0 or places.is_held]

    def take(self, layer: int, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return memory for a gradient; ``None`` if it has no place, because it is sparse for example."""
        key = layer, id(parameter)
        if gradient.layout != torch.strided or self._sizes.get(key) != gradient.nbytes:
            return None
        with self._lock:
            for places in self._sets:
                found = places.empty_like(key, gradient)
                if found is not None:
                    return found
            self._sets.append(PinnedMemory(self._sizes))
            return self._sets[-1].empty_like(key, gradient)
