"""A parameter on a device; only the rows that a layer reads are copied there.

The memory is that of the whole parameter. So every operation computes with the tensor that it would have otherwise, and
the gradient has the shape that it would have otherwise. What was not copied is never read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch

from ...device.protocol import Device

# Rows that follow each other, as (start, stop).
Runs: TypeAlias = Sequence[tuple[int, int]]

# Attribute of the tensor on the device, which may stay there from run to run.
_TABLE = "_roundpipe_table"


def runs_of(rows: Iterable[int]) -> Runs:
    """Return rows as runs of rows that follow each other.

    >>> runs_of([5, 1, 2, 7, 6])
    [(1, 3), (5, 8)]
    """
    runs: list[tuple[int, int]] = []
    for row in sorted(set(rows)):
        if runs and runs[-1][1] == row:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return runs


class PartialTable:
    """The rows of a parameter that are on a device. It may stay there from run to run."""

    # tensor: memory of the device
    # by_rows: whether rows are read one by one; otherwise the parameter is one row, which is read or not at all
    # count: function that is given the bytes of each copy

    def __init__(self, tensor: torch.Tensor, device: Device, *, by_rows: bool, count: Callable[[int], None]) -> None:
        self._device, self.by_rows, self._count = device, by_rows, count
        # The same memory with its own version: what is written was never read. The tensor itself refers to this
        # object, and the other way would keep its memory until a collection.
        self._memory = self.as_rows(tensor.data)
        self._is_poisoned = False
        self._lock = threading.Lock()
        self.rows = len(self._memory)
        self.row_nbytes = tensor.nbytes // max(self.rows, 1)
        self.present: set[int] = set()

    def as_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape of the parameter as rows that are copied one by one."""
        return tensor.detach() if self.by_rows else tensor.detach().unsqueeze(0)

    def copy(self, rows: set[int], source: torch.Tensor) -> None:
        """Copy the missing rows from the host; later computations wait for them."""
        with self._lock:  # another thread may walk over the parameters of the model meanwhile
            missing = rows - self.present
            if missing:
                self._device.copy_rows_in(self._memory, source, runs_of(missing), after_compute=self._is_poisoned)
                self.present |= missing
                self._count(len(missing) * self.row_nbytes)

    def poison(self) -> None:
        """Write NaN into all rows that are not there, for a proof that they are not read."""
        with torch.no_grad():
            for start, stop in runs_of(set(range(self.rows)) - self.present):
                self._memory[start:stop].fill_(float("nan"))
        self._is_poisoned = True


class TableReader:
    """The rows that one visit of a layer reads of a table, and the host tensor that they are copied from."""

    # Two layers may share a parameter, and so a table that stays: each knows what it has read itself.

    def __init__(self, table: PartialTable, source: torch.Tensor) -> None:
        self.table = table
        self.by_rows, self.rows = table.by_rows, table.rows
        self._source = table.as_rows(source)
        self.read: set[int] = set()
        # Whether an operation read all of it that is not known to read rows.
        self.is_read_as_whole = False

    @property
    def is_read(self) -> bool:
        """Whether the visit has read every row."""
        return len(self.read) == self.rows

    @property
    def is_complete(self) -> bool:
        """Whether all rows are on the device."""
        return len(self.table.present) == self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.table.row_nbytes

    @property
    def bytes_missing(self) -> int:
        """Bytes that are not on the device."""
        return (self.rows - len(self.table.present)) * self.table.row_nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes that the visit has read."""
        return len(self.read) * self.table.row_nbytes

    def fetch(self, rows: Iterable[int]) -> None:
        """Copy the missing ones of the rows that will be read."""
        rows = {row for row in rows if 0 <= row < self.rows}
        self.read |= rows
        self.table.copy(rows, self._source)

    def fetch_all(self) -> None:
        """Copy all rows, for an operation that may read any of them."""
        self.is_read_as_whole = True
        self.fetch(range(self.rows))

    def complete(self) -> None:
        """Copy all rows, without counting them as read."""
        self.table.copy(set(range(self.rows)), self._source)

    def present_parts(self, tensor: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the rows that are on the device of two tensors with the shape of the parameter."""
        if not self.by_rows:
            return [(tensor, source)] if self.table.present else []
        return [(tensor[start:stop], source[start:stop]) for start, stop in runs_of(self.table.present)]


def reserve_table(source: torch.Tensor, device: Device, *, by_rows: bool, count: Callable[[int], None]) -> torch.Tensor:
    """Return memory of a device for a parameter, of which no row is there yet."""
    tensor = device.reserve(source)
    setattr(tensor, _TABLE, PartialTable(tensor, device, by_rows=by_rows, count=count))
    return tensor


def table_of(tensor: torch.Tensor) -> PartialTable | None:
    """Return the table in the memory of a tensor; ``None`` if the tensor was copied at once."""
    found: PartialTable | None = getattr(tensor, _TABLE, None)
    return found


def bytes_present(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy that are on the device."""
    table = table_of(tensor)
    return tensor.nbytes if table is None else len(table.present) * table.row_nbytes
