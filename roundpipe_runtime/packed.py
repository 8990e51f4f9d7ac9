"""Outputs that were not joined: one entry per microbatch, for the next pipeline to consume as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["RoundPipePackedData"]


class RoundPipePackedData(list[Any]):
    """One leaf of the outputs, microbatch by microbatch; what ``merge_output=False`` returns in place of tensors.

    Given to another pipeline as input, microbatch i of that pipeline gets entry i. Nothing is joined, cut again or
    waited for in between.

    Args:
        values: one entry per microbatch.
        rows: the number of rows of each, as far as it is known.
        wait: called once by :meth:`synchronize`; returns when all entries can be read on the host.
    """

    def __init__(
        self, values: Iterable[Any], *, rows: Sequence[int | None] = (), wait: Callable[[], None] | None = None
    ) -> None:
        super().__init__(values)
        self.rows = tuple(rows) or (None,) * len(self)
        self._wait = wait

    def synchronize(self) -> RoundPipePackedData:
        """Wait until all entries can be read, and return the list itself."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        return self
