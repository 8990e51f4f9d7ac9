"""Translate operators to ONNX for which torch's exporter has no translation."""

# - `unsqueeze` of complex numbers (rotary embeddings of Llama 4 and DeepSeek V2)
# - `_is_all_true` (the checks of ProphetNet)
# - `sort(stable=True)` (the blocks that Qwen 4 chooses)
# - `scaled_dot_product_attention`, one operator in opset 23 and newer. torch's exporter refuses one key head without
#   `enable_gqa` (Falcon) and tensors without four axes, and is wrong for fully masked queries.
# - `erf_inv` (`Normal.icdf`, Gemma 3n's sparse activations): a polynomial, exact to the last digits of float32
# - operators that the exporter lacks, or translates wrongly at some values: `.onnx_repairs`

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..private_names.of_torch import operator_names, operators_with_kernel
from ..recipe.aliases import OnnxValue
from ..registry.patches import LOCK
from .onnx_repairs import REPAIRS, plain_attention


class Translation(NamedTuple):
    operator: Any  # an operator of PyTorch
    function: Callable[..., Any]  # builds it from ONNX operators, called with the values of its arguments
    is_complex: bool = False  # for complex numbers, which are an additional axis of size two in ONNX
    opset: int = 18  # the first version of ONNX's operators for which it is used; 18 by default


def add_translation(registry: Any, module: ModuleType, translation: Translation) -> None:
    """Add a translation to a registry of torch's ONNX exporter; it is used before others of the same operator."""
    if registry.opset_version < translation.opset:
        return
    # `register_op` would print on the terminal that a plain function has no ONNX signature
    entry = module.OnnxDecompMeta(
        onnx_function=translation.function,
        fx_target=translation.operator,
        signature=None,
        is_custom=True,
        is_complex=translation.is_complex,
        skip_signature_inference=True,
    )
    registry._register(translation.operator, entry)


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


def _unsqueeze(x: OnnxValue, dim: int) -> OnnxValue:
    from onnxscript import opset18 as op

    # the last axis holds real and imaginary part, so an axis counted from the end moves by one
    return op.Unsqueeze(x, op.Constant(value_ints=[dim if dim >= 0 else dim - 1]))


def _stable_sort(x: OnnxValue, stable: bool | None = None, dim: int = -1, descending: bool = False) -> OnnxValue:
    from onnxscript import opset18 as op

    # ONNX orders equal values by index, so its sort is stable
    count = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    return op.TopK(x, count, axis=dim, largest=int(descending), sorted=1)


def _is_all_true(x: OnnxValue) -> OnnxValue:
    from onnxscript import opset18 as op

    return op.Cast(op.ReduceMin(op.Cast(x, to=7), keepdims=0), to=9)  # int64, bool


def _erf_inv(x: OnnxValue) -> OnnxValue:
    from onnxscript import opset18 as op

    def polynomial(at: OnnxValue, coefficients: tuple[float, ...]) -> OnnxValue:
        value = op.Constant(value_float=coefficients[0])
        for coefficient in coefficients[1:]:
            value = op.Add(op.Mul(value, at), op.Constant(value_float=coefficient))
        return value

    def number(value: float) -> OnnxValue:
        return op.Constant(value_float=value)

    given = op.Cast(x, to=1)  # float32
    w = op.Neg(op.Log(op.Mul(op.Sub(number(1.0), given), op.Add(number(1.0), given))))
    centre = polynomial(op.Sub(w, number(2.5)), ERFINV_CENTRE)
    tail = polynomial(op.Sub(op.Sqrt(w), number(3.0)), ERFINV_TAIL)
    found = op.Mul(op.Where(op.Less(w, number(5.0)), centre, tail), given)
    # at 1 the polynomial of the infinite w is NaN
    return op.CastLike(op.Where(op.Equal(op.Abs(given), number(1.0)), op.Mul(given, number(float("inf"))), found), x)


def _attention(
    query: OnnxValue,
    key: OnnxValue,
    value: OnnxValue,
    attn_mask: OnnxValue | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> OnnxValue:
    from onnxscript import opset23 as op

    if dropout_p == 0 and _is_one_operator(query, key, value, enable_gqa):
        return op.Attention(query, key, value, attn_mask, scale=scale, is_causal=int(is_causal))[0]
    return _attention_spelt_out(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _attention_spelt_out(
    query: OnnxValue,
    key: OnnxValue,
    value: OnnxValue,
    attn_mask: OnnxValue | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> OnnxValue:
    if dropout_p == 0:
        return plain_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

    return aten_scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _is_one_operator(query: OnnxValue, key: OnnxValue, value: OnnxValue, enable_gqa: bool) -> bool:
    """Return whether ONNX's ``Attention`` accepts the tensors: four axes, one batch size, matching numbers of heads."""
    shapes = [one.shape for one in (query, key, value)]
    if any(shape is None or len(shape) != 4 for shape in shapes):
        return False
    rows, heads = ([shape[axis] for shape in shapes] for axis in (0, 1))
    if rows[0] != rows[1] or rows[1] != rows[2]:
        return False
    if not all(isinstance(count, int) for count in heads):
        return False
    one_for_each = heads[0] == heads[1] or heads[1] == 1  # a single head is broadcast, whatever enable_gqa is
    return heads[1] == heads[2] and heads[0] % heads[1] == 0 and (enable_gqa or one_for_each)


TRANSLATIONS = (
    *(Translation(operator, function) for operator, function in REPAIRS.items()),
    Translation(torch.ops.aten.scaled_dot_product_attention.default, _attention_spelt_out),
    Translation(torch.ops.aten.scaled_dot_product_attention.default, _attention, opset=23),
    Translation(torch.ops.aten.unsqueeze.default, _unsqueeze, is_complex=True),
    Translation(torch.ops.aten._is_all_true.default, _is_all_true),
    Translation(torch.ops.aten.sort.stable, _stable_sort),
    Translation(torch.ops.prims.erf_inv.default, _erf_inv),  # all attention calls are decomposed into this operator
)


# Read the ONNX exporter's tables once per process instead of at each conversion.


# request -> (sources of the table, table)
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
    request = read, cls, args, tuple(sorted(kwargs.items()))
    table = _remembered(request, _known, functools.partial(read.__get__(None, cls), *args, **kwargs))
    own = copy.copy(table)
    own.functions = {operator: list(entries) for operator, entries in table.functions.items()}
    return own


def remembering_decompositions(original: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    """Wrap ``create_onnx_friendly_decomposition_table``, so that a table is cached for each set of operators."""

    @functools.wraps(original)
    def create(onnx_registered_ops: Iterable[Any]) -> dict[Any, Any]:
        request = original, frozenset(onnx_registered_ops)
        return dict(_remembered(request, _decomposed, functools.partial(original, onnx_registered_ops)))

    return create


def _decomposed() -> tuple[Any, ...]:
    """Return the values that a cached decomposition table depends on: all operators, and torch's decompositions."""
    from ..private_names.of_torch import decompositions

    return (operator_names(), operators_with_kernel("CompositeImplicitAutograd"), list(decompositions.items()))


def _known() -> tuple[Any, ...]:
    """Return the values that a cached ``ONNXRegistry`` depends on: all operators, and onnxscript's functions."""
    registration = sys.modules.get("onnxscript.function_libs.torch_lib.registration")
    functions = getattr(registration, "default_registry", {}).items()
    return (operator_names(), [(name, *entry.overloads, *entry.complex) for name, entry in functions])
