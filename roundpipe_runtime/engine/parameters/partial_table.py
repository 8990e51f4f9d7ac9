"""Copy only those rows of a parameter to a device that a layer reads, such as the weights of experts that get tokens.

On the device, the parameter and its gradient have memory for all rows, so operations get tensors of the usual shapes. A
placeholder for a parameter with one matrix per expert copies the matrices that an operation reads. After the rows are
copied, the operation gives the same values and autograd graph as with the whole parameter.
"""

# weight[expert]                          copies the indexed rows: of an index, slice, mask or tensor of indices
# torch.nn.functional.grouped_mm(...)     copies the rows of groups that are not empty
# weight.shape, weight.transpose(1, 2)    copies no rows; a view is a placeholder too
# any other operation                     copies all rows

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from yobx_flatten.core.private_names.of_torch import grouped_products, pytree

from ...device.protocol import Device
from ...optim.layer_contents import LayerContents
from .host_table import ParametersOnDemand

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
    """Device memory of a parameter whose rows are copied to the device when a layer reads the rows."""

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
        # axis 0 enumerates what is copied at once: a row, or the whole tensor
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
        rows = {row for row in rows if 0 <= row < self.rows}
        self.read |= rows
        self.table.copy(rows, self._source)

    def fetch_all(self) -> None:
        """Copy all missing rows of the parameter to the device, and record that an operation may read every row."""
        self.is_read_as_whole = True
        self.fetch(range(self.rows))

    def complete(self) -> None:
        """Copy all missing rows of the parameter to the device, without recording the rows as read."""
        self.table.copy(set(range(self.rows)), self._source)


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
    """Records which share of expert weights pipeline calls read, to decide which weights later calls copy on demand."""

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
        groups: dict[int, Group] = {}
        for layer in contents:
            # groups are found again when the layer's parameters change
            held = tuple((id(slot.owner), id(slot.parameter)) for slot in layer.slots)
            known = self._found.get(layer.index)
            if known is None or known[0] != held:
                known = self._found[layer.index] = held, find_groups(layer)
            for name, members in known[1].items():
                is_stacked = members[0].dim() == 3 and (layer.index, name, True) not in self._refused
                if not is_stacked and len(members) == 1:
                    continue  # only copied whole
                group: Group = layer.index, name, is_stacked
                if self._shares.get((group, size), 0.0) > MOST_READ and not is_look:
                    continue
                if all(_is_plain(parameter, source(parameter)) for parameter in members):
                    groups |= dict.fromkeys(map(id, members), group)
        if not groups:
            return NOTHING_PARTIAL
        by_rows = {key: is_stacked for key, (_, _, is_stacked) in groups.items()}
        return PartialPlan(by_rows, is_look, lambda tables: self._note(tables, groups, size))

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
    """Return the expert weights of a layer: for each name of a weight, the parameters of all experts."""
    # Names have `*` instead of an index in a list. If an expert itself is a `ModuleDict`, the names contain its keys.
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
    yield id(module), prefix
    is_list = isinstance(module, nn.ModuleList) or (isinstance(module, nn.ModuleDict) and not prefix.endswith("*."))
    for name, child in module._modules.items():
        if child is not None:
            yield from _names(child, f"{prefix}{'*' if is_list else name}.")


def _is_plain(parameter: nn.Parameter, source: torch.Tensor) -> bool:
    """Return whether single rows of a parameter can be copied from ``source``, its tensor on the host."""
    is_known = type(parameter) is nn.Parameter and type(source) in (nn.Parameter, torch.Tensor)
    is_strided = source.layout == torch.strided and source.is_contiguous() and source.device.type == "cpu"
    return is_known and is_strided and source.is_floating_point() and not source.is_inference() and source.numel() > 0


# Properties and methods that read no values.
_FACTS = {
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "names", "grad", "grad_fn", "_version"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes"),
    *("size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_pinned", "has_names", "__len__", "__hash__"),
}
# Properties and methods that may return a view whose first axis is still the rows.
_VIEWS = {"transpose", "swapaxes", "swapdims", "permute", "mT", "data", "detach"}

# transformers' own grouped product, for devices and dtypes without torch's: it skips empty groups.
_PRODUCTS_OF_OTHERS = {"transformers::grouped_mm_fallback"}

_FEW = 64  # indices that are copied to the host directly; the device reduces more indices to distinct indices first
Arguments: TypeAlias = Sequence[Any]


class KnownRows:
    """Caches the rows that the last index tensor selected, because two parameters of a module often share an index."""

    def __init__(self) -> None:
        self._of: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._rows: list[int] = []

    def find(self, of: torch.Tensor, find: Callable[[torch.Tensor], list[int]]) -> list[int]:
        """Return the rows that an index tensor selects, and cache them until a call with another or changed tensor."""
        known = None if self._of is None else self._of()
        if known is of and self._version == of._version:
            return self._rows
        with torch.no_grad():
            rows = find(of)
        if not of.is_inference():  # such a tensor has no version
            self._of, self._version, self._rows = weakref.ref(of), of._version, rows
        return rows


class RowsOnDemand(torch.Tensor):
    """A placeholder for a parameter on a device; each operation first copies the rows that the operation reads."""

    # `isinstance(tensor, torch.nn.Parameter)` reads this
    _is_param = True
    _stands_for: tuple[torch.Tensor, TableReader, KnownRows, bool]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Arguments = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":
            name = str(getattr(getattr(func, "__self__", None), "__name__", ""))
        elif name == "__set__":
            name = ""
        call, arguments = pytree.tree_map_only(
            RowsOnDemand, lambda stand: stand._stands_for[0], (tuple(args), dict(kwargs))
        )
        if name in _FACTS:
            return func(*call, **arguments)
        first = args[0] if args and isinstance(args[0], RowsOnDemand) else None
        if name in _VIEWS and first is not None:
            view, (tensor, table, known, is_proved) = func(*call, **arguments), first._stands_for
            if view is tensor:
                return first
            has_rows = view.dim() > 1 and view.shape[0] == table.rows and view.stride(0) == tensor.stride(0)
            if has_rows and view.storage_offset() == tensor.storage_offset():
                return stand_for(view, table, known, is_proved=is_proved)
            table.fetch_all()
            return view
        is_product = func in grouped_products or getattr(func, "_qualified_op_name", None) in _PRODUCTS_OF_OTHERS
        for stand in (one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, RowsOnDemand)):
            tensor, table, known, is_proved = stand._stands_for
            rows: Sequence[int] | None = None  # `None` for an operation that may read any row
            if stand is first:
                if not kwargs and name == "__getitem__" and len(args) == 2:
                    index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
                    rows = _named(index, table.rows, known)
                elif not kwargs and name in ("select", "index_select") and len(args) == 3 and args[1] == 0:
                    rows = _named(args[2], table.rows, known)
            elif is_product and len(args) > 1 and stand is args[1]:
                ends = kwargs.get("offs", args[2] if len(args) > 2 else None)
                is_by_rows = isinstance(args[0], torch.Tensor) and args[0].dim() == 2 and tensor.dim() == 3
                rows = known.find(ends, _nonempty) if is_by_rows and isinstance(ends, torch.Tensor) else None
            if rows is None:
                table.fetch_all()
            else:
                table.fetch(rows)
                if is_product and is_proved and not table.is_complete:
                    # whether NaN in unused rows leaves the results of the product and its backward bitwise unchanged
                    table.table.poison()
                    without = _product_alone(func, call, arguments)
                    table.complete()
                    if not all(map(torch.equal, without, _product_alone(func, call, arguments))):
                        table.is_read_as_whole = True
        return func(*call, **arguments)


def stand_for(tensor: torch.Tensor, table: TableReader, known: KnownRows, *, is_proved: bool) -> RowsOnDemand:
    # is_proved: whether grouped products are compared with and without the unused rows
    with torch.no_grad():
        found = torch.empty_like(tensor, device="meta").as_subclass(RowsOnDemand)
    vars(found).update(vars(tensor))
    found._stands_for = tensor, table, known, is_proved
    return found


def _named(index: Any, rows: int, known: KnownRows) -> Sequence[int] | None:
    if isinstance(index, torch.Tensor):
        is_mask = index.dtype == torch.bool
        if index.is_floating_point() or index.dtype == torch.uint8 or (is_mask and index.shape != (rows,)):
            return None
        return [row % rows for row in known.find(index, _distinct)]
    if isinstance(index, slice):
        return range(*index.indices(rows))
    if isinstance(index, int) and not isinstance(index, bool):
        return [index % rows]  # the operation itself raises the error of an invalid index
    return None


def _nonempty(ends: torch.Tensor) -> list[int]:
    return [group for group, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])) if end > start]


def _distinct(indices: torch.Tensor) -> list[int]:
    found = indices.nonzero() if indices.dtype == torch.bool else indices
    numbers = found.reshape(-1) if found.numel() < _FEW else found.unique()
    return sorted({int(number) for number in numbers.tolist()})


def _product_alone(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Run the forward and, if gradients are enabled, the backward of a grouped matrix product."""
    given = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
    if not (torch.is_grad_enabled() and given[0].is_floating_point()):
        return [func(*given, **kwargs)]
    given[0].requires_grad_()
    found = func(*given, **kwargs)
    return [found.detach(), *torch.autograd.grad(found, given[0], torch.ones_like(found))]


class PartialLayer:
    def __init__(self, contents: LayerContents, device: Device, plan: PartialPlan) -> None:
        self._contents, self._device, self._plan = contents, device, plan
        self._tables: dict[int, tuple[TableReader, nn.Parameter]] = {}
        self._known = KnownRows()
        self._stands: dict[int, RowsOnDemand] = {}

    def reserve(
        self, parameter: nn.Parameter, count: Callable[[int], None]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        by_rows = self._plan.by_rows.get(id(parameter))
        if by_rows is None:
            return None

        def reserved(source: torch.Tensor) -> torch.Tensor:
            tensor = self._device.reserve(source)
            setattr(tensor, _TABLE, PartialTable(tensor, self._device, by_rows=by_rows, count=count))
            return tensor

        return reserved

    def add(self, parameter: nn.Parameter, copy: nn.Parameter, uploaded: torch.Tensor, source: torch.Tensor) -> None:
        """Register a parameter whose rows are copied to the device when a layer reads the rows."""
        # copy: the tensor that layers compute with, which shares the memory of `uploaded`
        found = table_of(uploaded)
        if found is None:
            return
        table = TableReader(found, source)
        if id(parameter) not in self._plan.by_rows:  # an earlier run copied a part, which stayed
            table.complete()
        elif not table.is_complete or parameter.requires_grad:
            self._tables[id(parameter)] = table, copy

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:  # the caller holds the layer's lock
        """In the with block, copy each parameter to the device as soon as an operation reads it."""
        swapped: list[tuple[nn.Module, dict[str, Any], ParametersOnDemand]] = []
        unread = {key: found for key, found in self._tables.items() if not found[0].is_read}
        whole: dict[int, tuple[nn.Module, dict[str, Callable[[], None]]]] = {}
        for slot in self._contents.slots if unread else ():
            table, copy = unread.get(id(slot.parameter), (None, None))
            if table is None or copy is None:
                continue
            if table.by_rows:
                stand = self._stands.get(id(copy))
                if stand is None:
                    stand = self._stands[id(copy)] = stand_for(copy, table, self._known, is_proved=self._plan.is_look)
                slot.owner._parameters[slot.name] = stand  # type: ignore[assignment] # isinstance() treats it as one
            else:
                whole.setdefault(id(slot.owner), (slot.owner, {}))[1][slot.name] = table.fetch_all
        for owner, fetch in whole.values():
            standing = ParametersOnDemand(owner._parameters, fetch)
            swapped.append((owner, owner._parameters, standing))
            owner.__dict__["_parameters"] = standing
        try:
            yield
        finally:
            for owner, before, standing in swapped:
                # `dict.items` copies no parameter to the device
                before.update({name: one for name, one in dict.items(standing) if name not in before})
                owner.__dict__["_parameters"] = before

    def present_parts(
        self, parameter: nn.Parameter, copy: torch.Tensor, source: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        table, _ = self._tables.get(id(parameter), (None, None))
        if table is None or not table.by_rows:
            return None if table is None else [(copy, source)] if table.table.present else []
        return [(copy[start:stop], source[start:stop]) for start, stop in runs_of(table.table.present)]

    def gradient_runs(self, parameter: nn.Parameter, gradient: torch.Tensor) -> Runs | None:
        """Return the ranges of rows whose gradients may be nonzero, or ``None`` for all rows."""
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
        stood_for = [table for table, _ in self._tables.values() if table.by_rows and not table.is_read]
        for table in stood_for:
            table.fetch_all()
        return bool(stood_for)

    def release(self, skip: Callable[[int], None]) -> None:
        self._plan.note({key: table for key, (table, _) in self._tables.items()})
        for table, _ in self._tables.values():
            skip((table.rows - len(table.table.present)) * table.table.row_nbytes)
        self._tables.clear()
        self._stands.clear()
