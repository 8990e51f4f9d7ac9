"""Rewrite operators that ExecuTorch has no kernel for into operators that it has."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from ...trace.onnx_operators import ERFINV_CENTRE, ERFINV_TAIL
from ..program.decompositions import decompose_untranslated

_ATEN = torch.ops.aten


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows that are sorted by expert, each with the weights of its own expert.

    Every expert multiplies all rows, and the product of its own rows is kept: how many rows an expert has depends on
    the values, and memory is planned before.

    >>> rows = torch.tensor([[1.0], [2.0], [3.0]])
    >>> grouped_product(rows, torch.tensor([[[10.0]], [[100.0]]]), torch.tensor([1, 3])).tolist()
    [[10.0], [200.0], [300.0]]
    """
    # weight: weights of shape (experts, inputs, outputs)
    # ends: for every expert the number of the row after its last one, of shape (experts,)
    places = torch.arange(rows.shape[0], device=rows.device)[:, None]
    found = rows.new_zeros(rows.shape[0], weight.shape[2])
    for expert in range(weight.shape[0] - 1, -1, -1):
        found = torch.where(places < ends[expert], rows @ weight[expert], found)
    return found


def _grouped_mm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if offs is None or weight.dim() != 3 or rows.dim() != 2 or bias is not None or out_dtype is not None:
        return NotImplemented
    return grouped_product(rows, weight, offs)


def _sort(values: torch.Tensor, dim: int = -1, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.topk(values, values.shape[dim], dim, descending, True)


def _stable_sort(
    values: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    # experts need their own rows together, in whichever order
    return _sort(values, dim, descending)


def _argsort(values: torch.Tensor, dim: int = -1, descending: bool = False) -> torch.Tensor:
    return _sort(values, dim, descending)[1]


def _stable_argsort(
    values: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> torch.Tensor:
    return _sort(values, dim, descending)[1]


def _histc(values: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    if (min, max) != (0, bins - 1):
        return NotImplemented
    return (values.reshape(-1, 1) == torch.arange(bins, device=values.device)).sum(0).to(values.dtype)


def _empty_like(like: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.zeros_like(like, dtype=options.get("dtype"))


def _erfinv(x: torch.Tensor) -> torch.Tensor:
    w = -torch.log((1 - x) * (1 + x))
    centre, tail = _polynomial(w - 2.5, ERFINV_CENTRE), _polynomial(torch.sqrt(w) - 3, ERFINV_TAIL)
    # at 1 the polynomial of the infinite w is NaN
    return torch.where(x.abs() == 1, x * torch.inf, torch.where(w < 5, centre, tail) * x)


def _polynomial(at: Any, coefficients: tuple[float, ...]) -> Any:
    return functools.reduce(lambda value, coefficient: value * at + coefficient, coefficients)


def _empty(size: Sequence[int], **options: Any) -> torch.Tensor:
    return torch.zeros(size, dtype=options.get("dtype"))


def _new_empty(like: torch.Tensor, size: Sequence[int], **options: Any) -> torch.Tensor:
    return torch.zeros(size, dtype=options.get("dtype") or like.dtype)


# ExecuTorch 1.5 writes memory without values as `dim_order_ops::_empty_dim_order`, whose sizes are ints: each symbol of
# a size becomes the number of the example, also where it is the size of an input
_ALWAYS: Mapping[Any, Callable[..., Any]] = {
    _ATEN.erfinv.default: _erfinv,
    _ATEN.empty.memory_format: _empty,
    _ATEN.new_empty.default: _new_empty,
}
_OF_EXPERTS: Mapping[Any, Callable[..., Any]] = {
    _ATEN._grouped_mm.default: _grouped_mm,
    _ATEN.histc.default: _histc,
    _ATEN.argsort.default: _argsort,
    _ATEN.argsort.stable: _stable_argsort,
    _ATEN.sort.default: _sort,
    _ATEN.sort.stable: _stable_sort,
    _ATEN.empty_like.default: _empty_like,
}


def written_out(program: ExportedProgram) -> ExportedProgram:
    """Return a program without products by expert, `erfinv` and memory without values; the same one without them."""
    fallback = getattr(getattr(torch.ops, "transformers", None), "grouped_mm_fallback", None)
    products: dict[Any, Callable[..., Any]] = {_ATEN._grouped_mm.default: _grouped_mm}
    if fallback is not None:
        products[fallback.default] = grouped_product
    found = {node.target for node in program.graph.nodes}
    table = {operator: function for operator, function in _ALWAYS.items() if operator in found}
    if found & products.keys():
        table |= {**_OF_EXPERTS, **products}
    if not table:
        return program
    return decompose_untranslated(program, table) or program.run_decompositions(table)


def missing_kernels(operators: Iterable[Any]) -> list[str]:
    """Return the operators of a file that the installed ExecuTorch has no kernel for."""
    # operators: those of an execution plan, which have a `name` and an `overload`
    runtime: Any = importlib.import_module("executorch.runtime")
    known = set(runtime.Runtime.get().operator_registry.operator_names)
    names = (f"{operator.name}.{operator.overload}" if operator.overload else operator.name for operator in operators)
    return [name for name in names if name not in known]
