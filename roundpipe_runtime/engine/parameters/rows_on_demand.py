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

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from yobx_flatten.private_names.of_torch import grouped_products, pytree

from .partial_table import TableReader

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
    """A tensor without memory that stands for a parameter on a device."""

    # what `isinstance(tensor, torch.nn.Parameter)` asks for
    _is_param = True
    _stands_for: tuple[torch.Tensor, TableReader, KnownRows, bool]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Arguments = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def stand_for(tensor: torch.Tensor, table: TableReader, known: KnownRows, *, is_proved: bool) -> RowsOnDemand:
    """Return what stands for a parameter on a device, or for a view of it."""
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
    is_product = _is_product(func)
    for stand in _stands_in((args, kwargs)):
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


def _stands_in(nested: Any) -> Iterable[RowsOnDemand]:
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, RowsOnDemand)]


def _name_of(func: Any) -> str:
    """The name of a function or method, or of the property that is read; of one that is set, nothing."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return "" if name == "__set__" else name


def _view(stand: RowsOnDemand, view: Any) -> Any:
    """What stands for a view, where its rows are those of the parameter; else the view itself, of all rows."""
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


def _is_product(func: Any) -> bool:
    return func in _PRODUCTS or getattr(func, "_qualified_op_name", None) in _PRODUCTS_OF_OTHERS


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
