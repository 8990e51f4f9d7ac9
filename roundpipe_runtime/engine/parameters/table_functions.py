"""Look up rows of a table, and multiply with it slice by slice."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .host_table import HostTable, TableAccess


def rows_of_table(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look up rows, of which only those that occur travel. The numbers are those of the whole table."""
    if not isinstance(weight, HostTable) or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented  # these write the table, count in it, or make another kind of gradient
    return _Rows.apply(weight, input, padding_idx, weight.access)  # type: ignore[no-untyped-call] # torch's


class _Rows(torch.autograd.Function):
    """Rows of a table by their numbers."""

    @staticmethod
    def forward(
        ctx: Any, table: HostTable, numbers: torch.Tensor, padding_idx: int | None, access: TableAccess
    ) -> torch.Tensor:
        found, places = _distinct(access, numbers)
        rows = access.rows(found)
        ctx.access, ctx.found, ctx.padding = access, found, -1
        if padding_idx is not None and not found.is_meta:
            padding = padding_idx % access.size
            at = int(torch.searchsorted(found, padding))
            ctx.padding = at if at < len(found) and int(found[at]) == padding else -1
        ctx.save_for_backward(places)
        result = functional.embedding(places, rows)
        access.device.release([rows])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        of_rows = torch.ops.aten.embedding_dense_backward(gradient, places, len(ctx.found), ctx.padding, False)
        ctx.access.add(ctx.found, of_rows)
        return None, None, None, None


def _distinct(access: TableAccess, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct numbers, ascending, on the host, and on the device the place of each number among them."""
    if numbers.is_meta:  # as many as there can be
        return numbers.new_empty(min(numbers.numel(), access.size)), torch.empty_like(numbers)
    found, places = torch.unique(access.down(numbers), return_inverse=True)
    if len(found) and not (int(found[0]) >= 0 and int(found[-1]) < access.size):
        raise IndexError(f"index out of range: {int(found[0])} to {int(found[-1])}, of a table of {access.size} rows")
    return found, access.up(places.to(numbers.dtype))


def linear_of_table(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Multiply with all slices of a table and concatenate the products, if products with it are computed so."""
    if not isinstance(weight, HostTable) or weight.access.table.slice_rows is None:
        return NotImplemented
    return _Product.apply(  # type: ignore[no-untyped-call] # torch does not annotate it
        input, weight, bias, weight.access, weight.access.table.slice_rows
    )


class _Product(torch.autograd.Function):
    """The product of rows with a table, with the bias of each column."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        table: HostTable,
        bias: torch.Tensor | None,
        access: TableAccess,
        rows: int,
    ) -> torch.Tensor:
        ctx.access, ctx.rows = access, rows
        ctx.save_for_backward(hidden, bias)
        if not hidden.numel():  # the form alone; under autocast, the dtype is another than that of the table
            probe = functional.linear(hidden, hidden.new_empty(1, hidden.shape[-1], dtype=access.source.dtype))
            return probe.new_empty(*hidden.shape[:-1], access.size)
        found: torch.Tensor | None = None
        for place, part in access.slices(rows):
            product = functional.linear(hidden, part, None if bias is None else bias[place])
            found = product.new_empty(*product.shape[:-1], access.size) if found is None else found
            found[..., place] = product
        assert found is not None
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        hidden, bias = ctx.saved_tensors
        access: TableAccess = ctx.access
        slope, flat = gradient.reshape(-1, gradient.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
        of_hidden = torch.zeros_like(flat, dtype=wide(flat.dtype)) if ctx.needs_input_grad[0] else None
        needs_part = of_hidden is not None
        for place, part in access.slices(ctx.rows) if needs_part or ctx.needs_input_grad[1] else ():
            columns = slope[:, place]
            if of_hidden is not None:
                of_hidden += columns @ part.to(columns.dtype)
            if ctx.needs_input_grad[1]:
                access.add(place, (columns.T @ flat.to(columns.dtype)).to(access.source.dtype))
        of_bias = slope.sum(0).to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        result = None if of_hidden is None else of_hidden.to(hidden.dtype).reshape(hidden.shape)
        return result, None, of_bias, None, None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over slices are taken: 32 bits at least."""
    return torch.promote_types(dtype, torch.float32)
