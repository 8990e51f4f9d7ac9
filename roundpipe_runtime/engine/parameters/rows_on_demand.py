"""Stand for a parameter with one matrix per expert, and copy the matrices that an operation reads before it runs.

Which experts a layer needs is known when its router has run, in the middle of the layer. So a layer does not see the
parameter but a tensor that stands for it. Each operation on it comes here first:

::

    weight[expert]                          an index, a slice, a mask or a tensor of indices: those rows
    torch.nn.functional.grouped_mm(...)     rows of groups that are not empty
    weight.shape, weight.transpose(1, 2)    none; a view stands for the parameter as before
    anything else                           all rows

Then the operation runs on the parameter itself, whose memory is complete where it reads. Nothing else changes: neither
the numbers nor the graph that autograd records.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import grouped_products, pytree

from ...device.protocol import Device
from ...optim.parameters import LayerContents, ParameterSlot
from .partial_table import PartialPlan, Runs, TableReader, reserve_table, runs_of, table_of

# Properties and methods that read no number.
_FACTS = {
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "names", "grad", "grad_fn", "_version"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes"),
    *("size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_pinned", "has_names", "__len__", "__hash__"),
}
# Those that may return a view in which rows are rows.
_VIEWS = {"transpose", "swapaxes", "swapdims", "permute", "mT", "data", "detach"}

_PRODUCTS = grouped_products()
# transformers' own product, for devices and dtypes for which torch has none: it skips groups that are empty.
_PRODUCTS_OF_OTHERS = {"transformers::grouped_mm_fallback"}

Arguments: TypeAlias = Sequence[Any]

# As many indices are read by the host as they are; of more, the device first finds which are different.
_FEW = 64


class KnownRows:
    """The rows of the last tensor of indices, which two parameters of one module are usually read by."""

    def __init__(self) -> None:
        self._of: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._rows: list[int] = []

    def of_indices(self, indices: torch.Tensor, rows: int) -> list[int]:
        """Return the rows that a tensor of integers, or a mask, names; the host waits for the device."""
        return [row % rows for row in self._remembered(indices, lambda: _distinct(indices))]

    def of_ends(self, ends: torch.Tensor) -> list[int]:
        """Return the groups that are not empty, by where each one ends; the host waits for the device."""
        return self._remembered(ends, lambda: _not_empty(ends.tolist()))

    def _remembered(self, of: torch.Tensor, find: Callable[[], list[int]]) -> list[int]:
        known = None if self._of is None else self._of()
        if known is of and self._version == of._version:
            return self._rows
        with torch.no_grad():
            rows = find()
        if not of.is_inference():  # such a tensor has no version
            self._of, self._version, self._rows = weakref.ref(of), of._version, rows
        return rows


class RowsOnDemand(torch.Tensor):
    """A placeholder without memory for a parameter on a device."""

    # what `isinstance(tensor, torch.nn.Parameter)` asks for
    _is_param = True
    _stands_for: tuple[torch.Tensor, TableReader, KnownRows, bool]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Arguments = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def stand_for(tensor: torch.Tensor, table: TableReader, known: KnownRows, *, is_proved: bool) -> RowsOnDemand:
    """Return the placeholder of a parameter on a device, or of a view of it."""
    # is_proved: whether products of groups are compared with and without the other rows
    with torch.no_grad():
        found = torch.empty_like(tensor, device="meta").as_subclass(RowsOnDemand)
    vars(found).update(vars(tensor))
    found._stands_for = tensor, table, known, is_proved
    return found


def _run(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Copy what an operation reads, and call it with the parameters themselves."""
    name = _name_of(func)
    call, arguments = pytree.tree_map_only(RowsOnDemand, _real, (tuple(args), dict(kwargs)))
    if name in _FACTS:
        return func(*call, **arguments)
    first = args[0] if args and isinstance(args[0], RowsOnDemand) else None
    if name in _VIEWS and first is not None:
        return _view(first, func(*call, **arguments))
    is_product = func in _PRODUCTS or getattr(func, "_qualified_op_name", None) in _PRODUCTS_OF_OTHERS
    for stand in (one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, RowsOnDemand)):
        tensor, table, known, is_proved = stand._stands_for
        rows = None
        if stand is first:
            rows = _rows_by_index(name, args, kwargs, table.rows, known)
        elif is_product and len(args) > 1 and stand is args[1]:
            rows = _rows_of_product(args, kwargs, tensor, known)
        if rows is None:
            table.fetch_all()
        else:
            table.fetch(rows)
            is_open = is_product and is_proved and not table.is_complete
            if is_open and not _is_equal_without(func, call, arguments, table):
                table.is_read_as_whole = True
    return func(*call, **arguments)


def _real(stand: RowsOnDemand) -> torch.Tensor:
    return stand._stands_for[0]


def _name_of(func: Any) -> str:
    """The name of a function or method, or of the property that is read; of one that is set, nothing."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return "" if name == "__set__" else name


def _view(stand: RowsOnDemand, view: Any) -> Any:
    """The stand-in for a view whose rows are those of the parameter; otherwise the view itself, of all rows."""
    tensor, table, known, is_proved = stand._stands_for
    if view is tensor:
        return stand
    has_rows = view.dim() > 1 and view.shape[0] == table.rows and view.stride(0) == tensor.stride(0)
    if has_rows and view.storage_offset() == tensor.storage_offset():
        return stand_for(view, table, known, is_proved=is_proved)
    table.fetch_all()
    return view


# -- which rows are read -----------------------------------------------------------------------------------------------


def _rows_by_index(
    name: str, args: Arguments, kwargs: Mapping[str, Any], rows: int, known: KnownRows
) -> Sequence[int] | None:
    """The rows that an index names; ``None`` if this is none, or not one that is known."""
    if kwargs:
        return None
    if name == "__getitem__" and len(args) == 2:
        return _named(args[1][0] if isinstance(args[1], tuple) and args[1] else args[1], rows, known)
    if name in ("select", "index_select") and len(args) == 3 and args[1] == 0:
        return _named(args[2], rows, known)
    return None


def _named(index: Any, rows: int, known: KnownRows) -> Sequence[int] | None:
    if isinstance(index, torch.Tensor):
        is_mask = index.dtype == torch.bool
        if index.is_floating_point() or index.dtype == torch.uint8 or (is_mask and index.shape != (rows,)):
            return None
        return known.of_indices(index, rows)
    if isinstance(index, slice):
        return range(*index.indices(rows))
    if isinstance(index, int) and not isinstance(index, bool):
        return [index % rows]  # one that is out of range is the error of the operation
    return None


def _distinct(indices: torch.Tensor) -> list[int]:
    found = indices.nonzero() if indices.dtype == torch.bool else indices
    numbers = found.reshape(-1) if found.numel() < _FEW else found.unique()
    return sorted({int(number) for number in numbers.tolist()})


def _rows_of_product(
    args: Arguments, kwargs: Mapping[str, Any], tensor: torch.Tensor, known: KnownRows
) -> Sequence[int] | None:
    """The groups with rows, of a product of groups of rows with a matrix each; ``None`` for other products."""
    ends = kwargs.get("offs", args[2] if len(args) > 2 else None)
    is_by_rows = isinstance(args[0], torch.Tensor) and args[0].dim() == 2 and tensor.dim() == 3
    return known.of_ends(ends) if is_by_rows and isinstance(ends, torch.Tensor) else None


def _not_empty(ends: Sequence[int]) -> list[int]:
    return [group for group, end in enumerate(ends) if end > (ends[group - 1] if group else 0)]


# -- a proof -----------------------------------------------------------------------------------------------------------


def _is_equal_without(func: Any, args: Arguments, kwargs: Mapping[str, Any], table: TableReader) -> bool:
    """Whether a product and its backward are the same bits with NaN in all other rows, which are there afterwards."""
    table.table.poison()
    without = _product_alone(func, args, kwargs)
    table.complete()
    return all(torch.equal(one, other) for one, other in zip(without, _product_alone(func, args, kwargs), strict=True))


def _product_alone(func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """A product of detached tensors, and the gradient that it hands to the rows."""
    given = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
    if not (torch.is_grad_enabled() and given[0].is_floating_point()):
        return [func(*given, **kwargs)]
    given[0].requires_grad_()
    found = func(*given, **kwargs)
    return [found.detach(), *torch.autograd.grad(found, given[0], torch.ones_like(found))]


# The parameters of a layer on a device that are copied when they are read, and what stands in the module for them.


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
        """Track a parameter if only a part of it was copied, or if its reads decide later copies."""
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
        """Return pairs of parts: those of the copy that came from the host, and those of the host's tensor."""
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
        """Copy the rows of a placeholder; return whether there were any."""
        stood_for = [table for table, _ in self._tables.values() if table.by_rows and not table.is_read]
        for table in stood_for:
            table.fetch_all()
        return bool(stood_for)

    def release(self, skip: Callable[[int], None]) -> None:
        """Record the rows that the visit has read, for later runs, and the rows that were not copied."""
        self._plan.note({key: table for key, (table, _) in self._tables.items()})
        for table, _ in self._tables.values():
            skip(table.bytes_missing)
        self._tables.clear()
        self._stands.clear()


# Copy a parameter of a module to the device when it is read: an expert that is not called is not copied.


class ParametersOnDemand(dict[str, nn.Parameter | None]):
    """The parameters of a module, some of which are copied to the device when they are read.

    >>> found = ParametersOnDemand({"weight": None, "bias": None}, {"weight": lambda: print("copied")})
    >>> found["bias"], "weight" in found
    (None, True)
    >>> found["weight"]
    copied
    """

    # It stands in `module._parameters`, where everything that reads a parameter looks it up: `module.weight`,
    # `module.parameters()`, functions that call a module with other parameters.

    def __init__(self, parameters: Mapping[str, Any], fetch: Mapping[str, Callable[[], None]]) -> None:
        # fetch: functions that copy a parameter, by its name
        super().__init__(parameters)
        self._fetch = dict(fetch)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        fetch = self._fetch.get(name)
        if fetch is not None:
            fetch()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter, if there is one of this name."""
        if name not in self:
            return default
        return self[name]

    def items(self) -> Any:
        """Return names and parameters."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """Return the parameters."""
        return [self[name] for name in self]

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a parameter, and return it."""
        if name in self:
            self[name]
        return super().pop(name, *default)

    def copy(self) -> dict[str, nn.Parameter | None]:
        """Return the parameters as a plain dictionary."""
        return dict(self.items())

    def __iter__(self) -> Iterator[str]:
        # one of its own: a copy of a dictionary reads what `__getitem__` returns where it has another iterator
        return super().__iter__()

    def added_to(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters that another dictionary does not have."""
        return {name: super(ParametersOnDemand, self).__getitem__(name) for name in self if name not in parameters}
