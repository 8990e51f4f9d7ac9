"""The parameters of a layer on a device that are copied when they are read, and what stands in the module for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ...device.protocol import Device
from ...optim.parameters import LayerContents, ParameterSlot
from .partial_table import Runs, TableReader, reserve_table, runs_of, table_of
from .read_on_demand import ParametersOnDemand
from .routed import PartialPlan
from .rows_on_demand import KnownRows, RowsOnDemand, stand_for


class PartialLayer:
    """The parameters of one layer on a device that are copied when they are read."""

    def __init__(self, contents: LayerContents, device: Device, plan: PartialPlan) -> None:
        self._contents, self._device, self._plan = contents, device, plan
        self._tables: dict[int, tuple[TableReader, nn.Parameter]] = {}
        self._known = KnownRows()
        self._stands: dict[int, RowsOnDemand] = {}

    def reserve(
        self, parameter: nn.Parameter, count: Callable[[int], None]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the function that reserves memory for a parameter; ``None`` where all of it is copied at once."""
        by_rows = self._plan.by_rows.get(id(parameter))
        if by_rows is None:
            return None
        return partial(reserve_table, device=self._device, by_rows=by_rows, count=count)

    def has(self, parameter: nn.Parameter) -> bool:
        """Report whether a parameter is copied when it is read."""
        return id(parameter) in self._tables

    def add(self, parameter: nn.Parameter, copy: nn.Parameter, uploaded: torch.Tensor, source: torch.Tensor) -> None:
        """Take a parameter into account, if not all of it was copied, or what is read of it decides what follows."""
        # copy: what layers compute with, which has the memory of `uploaded`
        found = table_of(uploaded)
        if found is None:
            return
        table = TableReader(found, source)
        if id(parameter) not in self._plan.by_rows:  # it was partly copied by an earlier run, and stayed
            table.complete()
        elif not table.is_complete or parameter.requires_grad:
            self._tables[id(parameter)] = table, copy

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """A block in which the module reads parameters on demand; held with the layer's lock, after its copies."""
        swapped: list[tuple[nn.Module, dict[str, Any], ParametersOnDemand]] = []
        unread = {key: found for key, found in self._tables.items() if not found[0].is_read}
        whole: dict[int, list[ParameterSlot]] = {}
        for slot in self._contents.slots if unread else ():
            table, copy = unread.get(id(slot.parameter), (None, None))
            if table is None or copy is None:
                continue
            if table.by_rows:
                stand = self._stands.get(id(copy))
                if stand is None:
                    stand = self._stands[id(copy)] = stand_for(copy, table, self._known, is_proved=self._plan.is_look)
                slot.owner._parameters[slot.name] = stand  # type: ignore[assignment] # isinstance() takes it for one
            else:
                whole.setdefault(id(slot.owner), []).append(slot)
        for slots in whole.values():
            owner = slots[0].owner
            fetch = {slot.name: unread[id(slot.parameter)][0].fetch_all for slot in slots}
            before = owner._parameters
            standing = ParametersOnDemand(before, fetch)
            owner.__dict__["_parameters"] = standing
            swapped.append((owner, before, standing))
        try:
            yield
        finally:
            for owner, before, standing in swapped:
                before.update(standing.added_to(before))
                owner.__dict__["_parameters"] = before

    def present_parts(
        self, parameter: nn.Parameter, copy: torch.Tensor, source: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parts of a copy that came from the host, next to these parts of the host's tensor."""
        return self._tables[id(parameter)][0].present_parts(copy, source)

    def gradient_runs(self, parameter: nn.Parameter, gradient: torch.Tensor) -> Runs | None:
        """Return the rows whose gradient is to be copied to the host; the others are zero. ``None`` for all."""
        table, _ = self._tables.get(id(parameter), (None, None))
        if table is None or not table.by_rows or table.is_read or gradient.layout != torch.strided:
            return None
        if self._plan.is_look:
            others = runs_of(set(range(table.rows)) - table.read)
            if any(bool((gradient[start:stop] != 0).any()) for start, stop in others):
                table.is_read_as_whole = True
                return None
        return runs_of(table.read)

    def complete(self) -> bool:
        """Copy what something stands for; return whether there was any."""
        stood_for = [table for table, _ in self._tables.values() if table.by_rows and not table.is_read]
        for table in stood_for:
            table.fetch_all()
        return bool(stood_for)

    def release(self, skip: Callable[[int], None]) -> None:
        """Note what the visit has read, for later runs, and what was not copied."""
        self._plan.note({key: table for key, (table, _) in self._tables.items()})
        for table, _ in self._tables.values():
            skip(table.bytes_missing)
        self._tables.clear()
        self._stands.clear()
