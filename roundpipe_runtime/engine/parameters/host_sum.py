"""Sum gradients of parts of a table on the host, in the order in which they were given."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

import torch

from ...device.protocol import Event


class HostSum:
    """The sum of gradients of parts of one parameter; :meth:`result` waits for it."""

    # form: shape and dtype of the sum
    # memory: function that returns memory of the host for it. Default: new memory.

    def __init__(
        self, form: torch.Tensor, memory: Callable[[torch.Tensor], torch.Tensor | None] = lambda form: None
    ) -> None:
        self._form, self._memory = form, memory
        self._total: torch.Tensor | None = None
        # Parts on their way to the host: of which rows, and when they are there.
        self._coming: collections.deque[tuple[torch.Tensor | slice, torch.Tensor, Event]] = collections.deque()
        self._scale = 1.0
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self._total is None

    @property
    def total(self) -> torch.Tensor:
        """The memory of the sum, which is complete after :meth:`result`."""
        if self._total is None:
            found = self._memory(self._form)
            self._total = torch.zeros_like(self._form, device="cpu") if found is None else found.zero_()
        return self._total

    def add(self, place: torch.Tensor | slice, gradient: torch.Tensor, arrived: Event, *, waiting: int) -> None:
        """Add a part in order; a limited number of parts may still be on their way."""
        # place: slice, or numbers of rows, each once
        assert self.total is not None
        with self._lock:
            self._coming.append((place, gradient, arrived))
            self._land(waiting)

    def scale(self, factor: float) -> None:
        """Multiply the sum when it is complete."""
        self._scale *= factor

    def done(self) -> bool:
        """Report whether the sum is complete."""
        return not self._coming and self._scale == 1.0

    def result(self) -> None:
        """Wait for all parts, and complete the sum."""
        with self._lock:
            self._land(0)
            factor, self._scale = self._scale, 1.0
            if factor != 1.0:
                self.total.mul_(factor)

    @torch.no_grad()
    def _land(self, waiting: int) -> None:
        while len(self._coming) > waiting:
            place, gradient, arrived = self._coming.popleft()
            arrived.result()
            if isinstance(place, slice):
                self.total[place].add_(gradient)
            else:
                self.total.index_add_(0, place, gradient.to(self.total.dtype))
