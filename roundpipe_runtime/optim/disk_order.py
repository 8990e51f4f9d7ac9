"""Keep the layers that are used now in memory, in the order in which a run or a step comes to them.

::

    # order of a run    layer 0    layer 1    layer 2 ... layer 2    layer 1
    #                   used       fetched
    #                   left       used       fetched
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import torch

from ..device.disk import DiskMemory


class LayersAtHand:
    """Reads the layer after the one that is used ahead, and leaves each one after its use."""

    # order: indices of the layers in the order of their use
    # tensors_of: function that returns the tensors of a layer
    # written: whether they may be changed while they are used

    def __init__(
        self,
        memory: DiskMemory,
        order: Sequence[int],
        tensors_of: Callable[[int], list[torch.Tensor]],
        *,
        written: bool,
    ) -> None:
        self._memory, self._order, self._tensors_of, self._written = memory, order, tensors_of, written
        self._places: dict[int, collections.deque[int]] = {}
        for place, layer in enumerate(order):
            self._places.setdefault(layer, collections.deque()).append(place)
        self._next = 0  # first place that was not fetched
        self._ahead: dict[int, Future[None]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, layer: int) -> Iterator[None]:
        """Have the tensors of a layer in memory for the block. Devices may come to layers next to each other."""
        self._arrive(layer)
        try:
            yield
        finally:
            self._memory.leave(self._tensors_of(layer), written=self._written)

    def _arrive(self, layer: int) -> None:
        with self._lock:
            left = self._places.get(layer)
            place = left.popleft() if left else None
            here = None if place is None else self._ahead.pop(place, None)
            if place is not None:
                self._fetch_after(place)
        if here is None or here.cancel():  # one that has not begun would read behind others
            self._memory.read(self._tensors_of(layer))
        else:
            here.result()

    def _fetch_after(self, place: int) -> None:
        self._next = max(self._next, place + 1)
        while self._next < len(self._order):
            number, self._next = self._next, self._next + 1
            tensors = self._tensors_of(self._order[number])
            if tensors:
                self._ahead[number] = self._memory.fetch(tensors)
                return
