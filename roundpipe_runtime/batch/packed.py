"""Packed outputs: one entry per microbatch, not joined, which another pipeline can consume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["RoundPipePackedData", "counted_rows", "known_rows"]


class RoundPipePackedData(list[Any]):
    """One leaf of the outputs with one entry per microbatch; ``merge_output=False`` returns these.

    Given to another pipeline as input, microbatch i of that pipeline gets entry i. Nothing is joined, cut again or
    waited for in between.

    Args:
        values: one entry per microbatch.
        rows: number of rows of each microbatch, as far as it is known.
        wait: called once by :meth:`synchronize`; returns when all entries can be read on the host.

    >>> import torch
    >>> from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
    >>> model = RoundPipe(torch.nn.Linear(3, 2), devices="virtual:2")
    >>> config = RoundPipeRunConfig(num_microbatch=2, merge_output=False)
    >>> outputs = model(torch.ones(4, 3), roundpipe_run_config=config)
    >>> [entry.shape for entry in outputs.synchronize()]
    [torch.Size([2, 2]), torch.Size([2, 2])]
    >>> model.close()
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


def known_rows(packed: RoundPipePackedData) -> tuple[int, ...] | None:
    """Return the rows of each microbatch as the pipeline that made the data knew them; ``None`` if it did not.

    The rows are not known of a list that was made longer or shorter since then.

    >>> known_rows(RoundPipePackedData(["a", "b"], rows=[2, 1])), known_rows(RoundPipePackedData(["a", "b"]))
    ((2, 1), None)
    """
    rows = tuple(count for count in packed.rows if count is not None)
    return rows if len(rows) == len(packed.rows) == len(packed) else None


def counted_rows(packed: RoundPipePackedData, axis: int = 0) -> tuple[int, ...] | None:
    """Count the rows of each microbatch along an axis; ``None`` where an entry is not a tensor with that axis.

    >>> import torch
    >>> counted_rows(RoundPipePackedData([torch.zeros(2, 3), torch.zeros(1, 3)]))
    (2, 1)
    """
    tensors = [value for value in packed if isinstance(value, torch.Tensor) and -value.dim() <= axis < value.dim()]
    return tuple(tensor.shape[axis] for tensor in tensors) if len(tensors) == len(packed) else None
