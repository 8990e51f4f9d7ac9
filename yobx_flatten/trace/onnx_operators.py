"""Translate operators to ONNX for which torch's exporter has no translation."""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..core.private_names.of_torch import operator_names, operators_with_kernel
from ..registry.patches import LOCK
from ..registry.recipe.aliases import OnnxValue
from .onnx_repairs import REPAIRS, attention, op


class Translation(NamedTuple):
    operator: Any  # an operator of PyTorch
    function: Callable[..., Any]  # builds it from ONNX operators
    is_complex: bool = False  # for complex numbers, which are an additional axis of size two in ONNX
    opset: int = 18  # the first version of ONNX's operators for which it is used


# M. Giles, "Approximating the erfinv function", GPU Computing Gems Jade Edition (2011), single precision: two
# polynomials, in w - 2.5 for w = -log(1 - x^2) below 5, and in sqrt(w) - 3 above
ERFINV_CENTRE = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503),
    *(-0.00417768164, 0.246640727, 1.50140941),
)
ERFINV_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613),
    *(0.00943887047, 1.00167406, 2.83297682),
)


def _stable_sort(x: OnnxValue, stable: bool | None = None, dim: int = -1, descending: bool = False) -> OnnxValue:
    # ONNX orders equal values by index, so its sort is stable
    count = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    return op.TopK(x, count, axis=dim, largest=int(descending), sorted=1)


def _erf_inv(x: OnnxValue) -> OnnxValue:
    """Translate ``erf_inv`` (``Normal.icdf``, Gemma 3n's sparse activations), exact to the last digits of float32."""

    def polynomial(at: OnnxValue, coefficients: tuple[float, ...]) -> OnnxValue:
        value = op.Constant(value_float=coefficients[0])
        for coefficient in coefficients[1:]:
            value = op.Add(op.Mul(value, at), op.Constant(value_float=coefficient))
        return value

    given = op.Cast(x, to=1)  # float32
    one, infinity = op.Constant(value_float=1.0), op.Constant(value_float=math.inf)
    w = op.Neg(op.Log(op.Mul(op.Sub(one, given), op.Add(one, given))))
    centre = polynomial(op.Sub(w, op.Constant(value_float=2.5)), ERFINV_CENTRE)
    tail = polynomial(op.Sub(op.Sqrt(w), op.Constant(value_float=3.0)), ERFINV_TAIL)
    found = op.Mul(op.Where(op.Less(w, op.Constant(value_float=5.0)), centre, tail), given)
    # at 1 the polynomial of the infinite w is NaN
    return op.CastLike(op.Where(op.Equal(op.Abs(given), one), op.Mul(given, infinity), found), x)


_aten = torch.ops.aten
TRANSLATIONS = (
    *(Translation(operator, function) for operator, function in REPAIRS.items()),
    # torch's exporter refuses one key head without `enable_gqa` (Falcon) and tensors without four axes, and translates
    # fully masked queries wrongly
    Translation(_aten.scaled_dot_product_attention.default, attention),
    Translation(_aten.scaled_dot_product_attention.default, functools.partial(attention, in_one=True), opset=23),
    Translation(
        _aten.unsqueeze.default,
        # the last axis holds real and imaginary part, so an axis counted from the end moves by one (rotary embeddings
        # of Llama 4 and DeepSeek V2)
        lambda x, dim: op.Unsqueeze(x, op.Constant(value_ints=[dim if dim >= 0 else dim - 1])),
        is_complex=True,
    ),
    # for ProphetNet; 7 is int64, and 9 is bool
    Translation(_aten._is_all_true.default, lambda x: op.Cast(op.ReduceMin(op.Cast(x, to=7), keepdims=0), to=9)),
    Translation(_aten.sort.stable, _stable_sort),  # for the blocks that Qwen 4 chooses
    Translation(torch.ops.prims.erf_inv.default, _erf_inv),  # all attention calls are decomposed into this operator
)


# The ONNX exporter's tables, read once per process instead of at each conversion: request -> (sources, table).
_TABLES: dict[Any, tuple[Any, Any]] = {}


def _remembered(request: Any, sources: Callable[[], Any], read: Callable[[], Any]) -> Any:
    """Return a cached table of torch's ONNX exporter; read it again if the values that it depends on have changed."""
    with LOCK:
        read_from, table = _TABLES.get(request, (None, None))
    if read_from != sources():
        table = read()
        with LOCK:
            _TABLES[request] = sources(), table  # reading a table imports more sources
    return table


def filled_registry(read: classmethod[Any, Any, Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a copy of torch's ``ONNXRegistry`` with all of its translations, to which the caller may add more."""
    # read: the original classmethod `from_torchlib`

    def sources() -> tuple[Any, ...]:
        registration = sys.modules.get("onnxscript.function_libs.torch_lib.registration")
        functions = getattr(registration, "default_registry", {}).items()
        return operator_names(), [(name, *entry.overloads, *entry.complex) for name, entry in functions]

    request = read, cls, args, tuple(sorted(kwargs.items()))
    table = _remembered(request, sources, functools.partial(read.__get__(None, cls), *args, **kwargs))
    own = copy.copy(table)
    own.functions = {operator: list(entries) for operator, entries in table.functions.items()}
    return own


def remembering_decompositions(original: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    """Wrap ``create_onnx_friendly_decomposition_table``, so that a table is cached for each set of operators."""

    @functools.wraps(original)
    def create(onnx_registered_ops: Iterable[Any]) -> dict[Any, Any]:
        from ..core.private_names.of_torch import decompositions

        def sources() -> tuple[Any, ...]:
            return operator_names(), operators_with_kernel("CompositeImplicitAutograd"), list(decompositions.items())

        request = original, frozenset(onnx_registered_ops)
        return dict(_remembered(request, sources, functools.partial(original, onnx_registered_ops)))

    return create
