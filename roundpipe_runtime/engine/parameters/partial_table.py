"""Copy only those rows of a parameter to a device that a layer reads, such as the weights of experts that get tokens.

The tensor on the device and its gradient have memory for all rows, so every operation gets the usual shapes.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from ...device.protocol import Device
from ...optim.layer_contents import LayerContents

Runs: TypeAlias = Sequence[tuple[int, int]]  # consecutive rows, as (start, stop)
_TABLE = "_roundpipe_table"  # attribute of the tensor on the device, which may stay there from run to run


def runs_of(rows: Iterable[int]) -> Runs:
    """Group row indices into ranges of consecutive rows.

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
    """Device memory for a parameter whose rows are copied when a layer reads them; later calls may reuse the rows."""

    # tensor: memory of the device
    # by_rows: whether rows are copied one by one; otherwise all of the parameter is copied or none of it
    # count: function that gets the bytes of each copy

    def __init__(self, tensor: torch.Tensor, device: Device, *, by_rows: bool, count: Callable[[int], None]) -> None:
        self._device, self.by_rows, self._count = device, by_rows, count
        # A view with its own version counter, since only unread rows are written. The tensor itself refers to this
        # object; otherwise its memory would stay until a garbage collection.
        self._memory = self.as_rows(tensor.data)
        self._is_poisoned = False
        self._lock = threading.Lock()
        self.rows = len(self._memory)
        self.row_nbytes = tensor.nbytes // max(self.rows, 1)
        self.present: set[int] = set()

    def as_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a tensor whose first axis enumerates what is copied at once: a row, or the whole tensor."""
        return tensor.detach() if self.by_rows else tensor.detach().unsqueeze(0)

    def copy(self, rows: set[int], source: torch.Tensor) -> None:
        with self._lock:  # another thread may iterate over the model's parameters meanwhile
            missing = rows - self.present
            if missing:
                self._device.copy_rows_in(self._memory, source, runs_of(missing), after_compute=self._is_poisoned)
                self.present |= missing
                self._count(len(missing) * self.row_nbytes)

    def poison(self) -> None:
        """Write NaN into all rows that were not copied to the device, to check that no computation reads them."""
        with torch.no_grad():
            for start, stop in runs_of(set(range(self.rows)) - self.present):
                self._memory[start:stop].fill_(float("nan"))
        self._is_poisoned = True


class TableReader:
    """Copies the rows of a parameter that a layer reads during one stage, and records which rows were read."""

    # Two layers may share a parameter, and so a table that stays: each records its own reads.

    def __init__(self, table: PartialTable, source: torch.Tensor) -> None:
        self.table = table
        self.by_rows, self.rows = table.by_rows, table.rows
        self._source = table.as_rows(source)
        self.read: set[int] = set()
        self.is_read_as_whole = False  # whether an operation that is not known to read single rows read all of them

    @property
    def is_read(self) -> bool:
        return len(self.read) == self.rows

    @property
    def is_complete(self) -> bool:
        return len(self.table.present) == self.rows

    def fetch(self, rows: Iterable[int]) -> None:
        """Copy the given rows of the parameter to the device, if needed, and record that the layer read them."""
        rows = {row for row in rows if 0 <= row < self.rows}
        self.read |= rows
        self.table.copy(rows, self._source)

    def fetch_all(self) -> None:
        """Copy all missing rows, for an operation that may read any row, and record all rows as read."""
        self.is_read_as_whole = True
        self.fetch(range(self.rows))

    def complete(self) -> None:
        """Copy all missing rows of the parameter to the device, without recording the rows as read."""
        self.table.copy(set(range(self.rows)), self._source)


def reserve_table(source: torch.Tensor, device: Device, *, by_rows: bool, count: Callable[[int], None]) -> torch.Tensor:
    tensor = device.reserve(source)
    setattr(tensor, _TABLE, PartialTable(tensor, device, by_rows=by_rows, count=count))
    return tensor


def table_of(tensor: torch.Tensor) -> PartialTable | None:
    found: PartialTable | None = getattr(tensor, _TABLE, None)
    return found


def bytes_present(tensor: torch.Tensor) -> int:
    table = table_of(tensor)
    return tensor.nbytes if table is None else len(table.present) * table.row_nbytes


# Groups of at least this many bytes are copied on demand: for smaller ones, finding the rows costs more than it saves.
LEAST_BYTES = 1024**2
MOST_READ = 0.75  # groups of which runs read at most this share are copied on demand
Group: TypeAlias = tuple[int, str, bool]  # a group's layer, its name, and whether its rows are read one by one
Members: TypeAlias = list[nn.Parameter]

# Decide which parameters of a run are copied on demand: experts.
#
# Two kinds of parameters may be read in part; the engine observes what each layer reads:
#
#     experts.down_proj [8, 64, 32]          one matrix per expert in one parameter: rows are copied
#     experts.*.down_proj.weight             the same parameter in each module of a list: used modules are copied
#
# A group of parameters is copied on demand if the last run of its size read less than most of it; otherwise it is
# copied ahead, while the device computes. Runs 1, 2, 4, 8... observe again.


@dataclasses.dataclass(frozen=True)
class PartialPlan:
    """The parameters, such as experts, that a pipeline call copies to devices only when a layer reads them."""

    # by parameter identity: whether its rows are read one by one, or all of it or nothing
    by_rows: Mapping[int, bool]
    is_look: bool  # whether grouped products are compared with and without the unused rows
    note: Callable[[Mapping[int, TableReader]], None]  # function that gets the rows that a visit has read


NOTHING_PARTIAL = PartialPlan({}, False, lambda tables: None)


class RoutedParameters:
    """Records the share of expert weights that runs have read, to decide which weights later runs copy on demand."""

    def __init__(self) -> None:
        self._shares: dict[tuple[Group, Hashable], float] = {}
        self._refused: set[Group] = set()
        self._found: dict[int, tuple[Hashable, dict[str, Members]]] = {}
        self._lock = threading.Lock()

    def plan(
        self,
        contents: Sequence[LayerContents],
        size: Hashable,
        source: Callable[[nn.Parameter], torch.Tensor],
        *,
        is_look: bool,
    ) -> PartialPlan:
        # size: kind of the run and size of its inputs, since reads differ between these
        # source: function that returns the tensor that a parameter is copied from
        by_rows: dict[int, bool] = {}
        groups: dict[int, Group] = {}
        for layer in contents:
            for name, members in self._groups(layer).items():
                is_stacked = members[0].dim() == 3 and (layer.index, name, True) not in self._refused
                if not is_stacked and len(members) == 1:
                    continue  # only copied whole
                group: Group = layer.index, name, is_stacked
                if self._shares.get((group, size), 0.0) > MOST_READ and not is_look:
                    continue
                if all(_is_plain(parameter, source(parameter)) for parameter in members):
                    for parameter in members:
                        by_rows[id(parameter)] = is_stacked
                        groups[id(parameter)] = group
        if not by_rows:
            return NOTHING_PARTIAL
        return PartialPlan(by_rows, is_look, lambda tables: self._note(tables, groups, size))

    def _groups(self, layer: LayerContents) -> dict[str, Members]:
        """Return the parameter groups of a layer, which are cached until the layer's parameters change."""
        held = tuple((id(slot.owner), id(slot.parameter)) for slot in layer.slots)
        known = self._found.get(layer.index)
        if known is None or known[0] != held:
            known = self._found[layer.index] = held, find_groups(layer)
        return known[1]

    def _note(self, tables: Mapping[int, TableReader], groups: Mapping[int, Group], size: Hashable) -> None:
        read: collections.Counter[Group] = collections.Counter()
        held: collections.Counter[Group] = collections.Counter()
        with self._lock:
            for key, table in tables.items():
                read[groups[key]] += len(table.read) * table.table.row_nbytes
                held[groups[key]] += table.rows * table.table.row_nbytes
                if table.by_rows and table.is_read_as_whole:
                    self._refused.add(groups[key])
            for group, nbytes in held.items():
                self._shares[group, size] = read[group] / nbytes


def find_groups(layer: LayerContents) -> dict[str, Members]:
    """Return the parameters of a layer that may be read in part, by name: stacked experts, or lists of expert modules.

    Names have ``*`` instead of an index in a list. If an expert itself is a ``ModuleDict``, the names contain its keys.
    """
    names = dict(_names(layer.module, ""))
    times = collections.Counter(id(slot.parameter) for slot in layer.slots)
    alike: dict[tuple[Hashable, ...], Members] = {}
    for slot in layer.slots:
        parameter = slot.parameter
        if times[id(parameter)] == 1:  # a parameter of two modules is read by both
            place = "*" if isinstance(slot.owner, (nn.ParameterList, nn.ParameterDict)) else slot.name
            key = f"{names.get(id(slot.owner), '')}{place}", parameter.shape, parameter.dtype
            alike.setdefault(key, []).append(parameter)
    count = collections.Counter(key[0] for key in alike)
    return {
        str(name): members
        for (name, *_), members in alike.items()
        if count[name] == 1  # in a list of different modules, each index has its own name
        and (len(members) > 1 or (members[0].dim() == 3 and len(members[0]) > 1))
        and sum(parameter.nbytes for parameter in members) >= LEAST_BYTES
    }


def _names(module: nn.Module, prefix: str) -> Iterator[tuple[int, str]]:
    """Yield id and name prefix of each module: ``*`` stands for list indices and for keys of a dict of experts."""
    yield id(module), prefix
    is_list = isinstance(module, nn.ModuleList) or (isinstance(module, nn.ModuleDict) and not prefix.endswith("*."))
    for name, child in module._modules.items():
        if child is not None:
            yield from _names(child, f"{prefix}{'*' if is_list else name}.")


def _is_plain(parameter: nn.Parameter, source: torch.Tensor) -> bool:
    """Return whether single rows of a parameter can be copied: ``source`` is a plain contiguous tensor on the host."""
    is_known = type(parameter) is nn.Parameter and type(source) in (nn.Parameter, torch.Tensor)
    is_strided = source.layout == torch.strided and source.is_contiguous() and source.device.type == "cpu"
    return is_known and is_strided and source.is_floating_point() and not source.is_inference() and source.numel() > 0
