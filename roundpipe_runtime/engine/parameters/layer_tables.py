"""Hold the tables of a layer on a device, of which parts travel while the layer computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import nn
from torch.nn import functional

from ...device.events import NOW, Event
from ...device.protocol import Device
from ...optim.parameters import LayerContents
from .gradient_memory import GradientMemory
from .host_sum import HostSum
from .host_table import HostTable, TableAccess, on_tables
from .table_functions import linear_of_table, rows_of_table

on_tables(functional.embedding)(rows_of_table)
on_tables(functional.linear)(linear_of_table)

_Sums: TypeAlias = dict[nn.Parameter, tuple[torch.Tensor, Event]]


class LayerTables:
    """The tables of one layer on one device."""

    # memory: memory of the host for sums of gradients; `None`: new memory for each
    # count: function that is given the bytes of each part that goes up

    def __init__(
        self, contents: LayerContents, device: Device, memory: GradientMemory | None, count: Callable[[int], None]
    ) -> None:
        self._contents, self._device, self._memory, self._count = contents, device, memory, count
        self._tables: dict[nn.Parameter, TableAccess] = {}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._contents.tables

    def stand_in(self, parameter: nn.Parameter, source: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
        """Return what stands for a parameter while the layer runs."""
        # source: numbers on the host
        # dtype: dtype in which gradients are summed
        index, memory = self._contents.index, self._memory
        form = torch.empty(source.shape, dtype=dtype, device="meta")
        self._tables[parameter] = access = TableAccess(
            self._device,
            source,
            self._contents.tables[id(parameter)],
            requires_grad=parameter.requires_grad,
            new_sum=lambda: HostSum(form, lambda form: None if memory is None else memory.take(index, parameter, form)),
            count=self._count,
        )
        return cast(nn.Parameter, HostTable(access, requires_grad=parameter.requires_grad))

    @property
    def leaves(self) -> list[nn.Parameter]:
        """Tables that code of the layer needed whole: gradients end in these."""
        return [leaf for table in self._tables.values() for leaf in table.leaves]

    def whole_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the copy of a whole table, ``None`` if no code needed it."""
        return next(iter(self._tables[parameter].leaves), None)

    def hand_over(self, take: Callable[[nn.Parameter, torch.Tensor], bool]) -> None:
        """Offer the sum of each gradient to a function; what it takes is forgotten."""
        for parameter, table in self._tables.items():
            found = table.pop_sum()
            if found is not None:
                found.result()
                if not take(parameter, found.total):
                    table.sum = found

    def pop_gradients(self, scale: float, dtype: Callable[[nn.Parameter], torch.dtype] | None) -> _Sums:
        """Return the sums, and what completes them; they are gone from here."""
        # dtype: function that returns the dtype in which the host keeps one. Default: that of the sum.
        gone: _Sums = {}
        for parameter, table in self._tables.items():
            found = table.pop_sum()
            if found is None:
                continue
            if scale not in (0.0, 1.0):
                found.scale(scale)
            if dtype is None or found.total.dtype == dtype(parameter):
                gone[parameter] = found.total, found
            else:
                found.result()
                gone[parameter] = found.total.to(dtype(parameter)), NOW
        return gone

    def release(self) -> None:
        """Release what is on the device."""
        for table in self._tables.values():
            table.release()
        self._tables.clear()
