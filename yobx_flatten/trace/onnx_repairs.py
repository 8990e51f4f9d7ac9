"""Translate operators that torch's ONNX exporter does not translate, or translates wrongly at some values.

``make operators`` finds torch's wrong translations, and writes a page that lists them. The cost of ``cumprod``,
``cummax`` and ``logcumsumexp`` is quadratic in the length of the axis, since ONNX has no operators for them.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..registry.recipe.aliases import OnnxValue

_INT64, _BOOL, _FLOAT16 = 7, 9, 10
_DIRECT = 16
"""Longest vectors for which ``cdist`` computes all differences; for longer vectors it uses matrix products."""


class _Library:
    """A module of an optional library, or an object ``module:name``, that is imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and tools look up such names in every object
            raise AttributeError(name)
        return getattr(pkgutil.resolve_name(self._name), name)


op: Any = _Library("onnxscript:opset18")
_opset23: Any = _Library("onnxscript:opset23")
if TYPE_CHECKING:
    import onnx_ir
    import onnx_ir.passes.common

    ir, passes = onnx_ir, onnx_ir.passes.common
else:
    ir, passes = _Library("onnx_ir"), _Library("onnx_ir.passes.common:")


def _like(value: float, like: OnnxValue) -> OnnxValue:
    return op.CastLike(op.Constant(value_float=value), like)


def _axes(*axes: int) -> OnnxValue:
    return op.Constant(value_ints=list(axes))


def _is_float(x: OnnxValue) -> bool:
    return bool(x.dtype is not None and x.dtype.is_floating_point())


def _is_negative(x: OnnxValue) -> OnnxValue:
    zero = _like(0.0, x)
    below = op.Less(op.Div(_like(1.0, x), x), zero)  # only a division distinguishes -0.0 from 0.0
    return op.Or(op.Less(x, zero), op.And(op.Equal(x, zero), below))


# -- of numbers --------------------------------------------------------------------------------------------------------


def _atan2(y: OnnxValue, x: OnnxValue) -> OnnxValue:
    high, wide = op.Abs(y), op.Abs(x)
    # 0/0 is 0 and inf/inf is 1: the angle within the first quadrant
    slope = op.Where(op.Equal(high, wide), op.Sign(high), op.Div(high, wide))
    angle = op.Atan(slope)
    angle = op.Where(_is_negative(x), op.Sub(_like(math.pi, x), angle), angle)
    return op.Where(_is_negative(y), op.Neg(angle), angle)


def _log_sigmoid(x: OnnxValue) -> OnnxValue:
    return op.Sub(op.Min(x, _like(0.0, x)), op.Log(op.Add(op.Exp(op.Neg(op.Abs(x))), _like(1.0, x))))


def _copysign(x: OnnxValue, sign: OnnxValue | float) -> OnnxValue:
    size = op.Abs(x)
    if isinstance(sign, (int, float)):
        return op.Neg(size) if math.copysign(1.0, sign) < 0 else size
    return op.Where(_is_negative(sign), op.Neg(size), size)


def _hypot(x: OnnxValue, y: OnnxValue) -> OnnxValue:
    wide, high = op.Abs(x), op.Abs(y)
    longest = op.Max(wide, high)
    # squares of large numbers overflow and squares of small numbers underflow, so divide by the larger side first
    unit = op.Where(op.Or(op.Equal(longest, _like(0.0, x)), op.IsInf(longest)), _like(1.0, x), longest)
    squares = op.Add(*(op.Mul(part, part) for part in (op.Div(wide, unit), op.Div(high, unit))))
    return op.Where(op.Or(op.IsInf(wide), op.IsInf(high)), _like(math.inf, x), op.Mul(op.Sqrt(squares), unit))


def _logaddexp(x: OnnxValue, y: OnnxValue, *, base: float = math.e) -> OnnxValue:
    # relative to the larger number, since exponentials of large numbers are infinite
    apart = op.Where(op.Equal(x, y), _like(0.0, x), op.Neg(op.Abs(op.Sub(x, y))))
    rest = op.Log(op.Add(op.Exp(op.Mul(apart, _like(math.log(base), x))), _like(1.0, x)))
    return op.Add(op.Max(x, y), op.Div(rest, _like(math.log(base), x)))


def _number_of(x: OnnxValue, y: OnnxValue, *, largest: bool) -> OnnxValue:
    """Translate ``fmax`` (or ``fmin``) to ONNX: the larger of two numbers, or the other number if one is NaN."""
    found = op.Max(x, y) if largest else op.Min(x, y)
    if not _is_float(x):
        return found
    return op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, found))


def _remainder(x: OnnxValue, divisor: OnnxValue) -> OnnxValue:
    if not _is_float(x):
        return op.Mod(x, divisor)  # ONNX's result has the sign of the divisor, like torch's
    found = op.Mod(x, divisor, fmod=1)
    zero = _like(0.0, x)
    other = op.And(op.Not(op.Equal(found, zero)), op.Xor(op.Less(found, zero), op.Less(divisor, zero)))
    return op.Where(other, op.Add(found, divisor), found)


def _remainder_of_number(x: OnnxValue, divisor: float) -> OnnxValue:
    given = op.Constant(value_float=float(divisor)) if _is_float(x) else op.Constant(value_int=int(divisor))
    return _remainder(x, op.CastLike(given, x))


def _clamp(x: OnnxValue, least: float | None = None, most: float | None = None) -> OnnxValue:
    if not _is_float(x):
        # a limit may be a size, which is a value of the graph
        held = [op.Constant(value_int=int(end)) if isinstance(end, (int, float)) else end for end in (least, most)]
        return op.Clip(x, *[None if end is None else op.CastLike(end, x) for end in held])
    if least is not None and most is not None:
        return op.Clip(x, _like(least, x), _like(most, x))
    # with one limit only, onnxruntime also clips infinity to the largest number of the type
    found = x if least is None else op.Max(x, _like(least, x))
    return found if most is None else op.Min(found, _like(most, x))


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


# -- along an axis -----------------------------------------------------------------------------------------------------


def _extreme(x: OnnxValue, dims: Sequence[int] | None, keepdim: bool, *, largest: bool, is_float: bool) -> OnnxValue:
    """Translate ``max`` (or ``min``) along axes to ONNX; the result is NaN if the numbers contain NaN."""
    axes = _axes(*dims) if dims else None
    found = (op.ReduceMax if largest else op.ReduceMin)(x, axes, keepdims=int(keepdim))
    if not is_float:
        return found
    unknown = op.ReduceMax(op.Cast(op.IsNaN(x), to=_INT64), axes, keepdims=int(keepdim))
    return op.Where(op.Cast(unknown, to=_BOOL), _like(math.nan, x), found)


def _place_of_extreme(x: OnnxValue, dim: int, keepdim: bool, *, largest: bool, is_float: bool) -> OnnxValue:
    """Translate ``argmax`` (or ``argmin``) along an axis to ONNX; the result is the index of the first NaN, if any."""
    found = (op.ArgMax if largest else op.ArgMin)(x, axis=dim, keepdims=int(keepdim))
    if not is_float:
        return found
    unknown = op.Cast(op.IsNaN(x), to=_INT64)
    is_there = op.Cast(op.ReduceMax(unknown, _axes(dim), keepdims=int(keepdim)), to=_BOOL)
    return op.Where(is_there, op.ArgMax(unknown, axis=dim, keepdims=int(keepdim)), found)


def _extreme_with_place(x: OnnxValue, dim: int, keepdim: bool = False, *, largest: bool) -> tuple[OnnxValue, OnnxValue]:
    if len(x.shape) == 0:
        return op.Identity(x), op.Constant(value_int=0)
    how = {"largest": largest, "is_float": _is_float(x)}
    return _extreme(x, [dim], keepdim, **how), _place_of_extreme(x, dim, keepdim, **how)


def _extreme_along(x: OnnxValue, dim: Any = None, keepdim: bool = False, *, largest: bool) -> OnnxValue:
    if len(x.shape) == 0:
        return op.Identity(x)
    dims = [dim] if isinstance(dim, int) else dim
    return _extreme(x, dims, keepdim, largest=largest, is_float=_is_float(x))


def _place_along(x: OnnxValue, dim: int | None = None, keepdim: bool = False, *, largest: bool) -> OnnxValue:
    if dim is None or len(x.shape) == 0:
        flat = op.Reshape(x, _axes(-1))
        place = _place_of_extreme(flat, 0, False, largest=largest, is_float=_is_float(x))
        return op.Reshape(place, _axes(*[1] * len(x.shape))) if keepdim else place
    return _place_of_extreme(x, dim, keepdim, largest=largest, is_float=_is_float(x))


def _up_to_each(x: OnnxValue, dim: int, empty: float) -> tuple[OnnxValue, OnnxValue, list[int]]:
    """For each position of an axis, return the values up to this position, followed by ``empty``."""
    # returns: `x` with the prefixes as its last two axes; the positions; the permutation that moves the last axis back
    rank = len(x.shape)
    dim %= rank
    order = [axis for axis in range(rank) if axis != dim] + [dim]
    last = op.Transpose(x, perm=order)
    count = op.Gather(op.Shape(last), op.Constant(value_int=-1))
    places = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    is_before = op.LessOrEqual(op.Unsqueeze(places, _axes(0)), op.Unsqueeze(places, _axes(1)))
    rows = op.Where(is_before, op.Unsqueeze(last, _axes(-2)), _like(empty, x))
    return rows, places, [order.index(axis) for axis in range(rank)]


def _cumprod(x: OnnxValue, dim: int, dtype: int | None = None) -> OnnxValue:
    given = x if dtype is None or dtype == -1 else op.Cast(x, to=dtype)
    if len(x.shape) == 0:
        return op.Identity(given)
    rows, _, back = _up_to_each(given, dim, 1.0)
    return op.Transpose(op.ReduceProd(rows, _axes(-1), keepdims=0), perm=back)


def _logcumsumexp(x: OnnxValue, dim: int) -> OnnxValue:
    if len(x.shape) == 0:
        return op.Identity(x)
    rows, _, back = _up_to_each(x, dim, -math.inf)
    # relative to the largest so far: relative to the overall largest, small earlier numbers would underflow
    largest = op.ReduceMax(rows, _axes(-1), keepdims=1)
    finite = op.Where(op.IsInf(largest), _like(0.0, x), largest)
    total = op.ReduceSum(op.Exp(op.Sub(rows, finite)), _axes(-1), keepdims=1)
    found = op.Squeeze(op.Add(op.Log(total), finite), _axes(-1))
    return op.Transpose(found, perm=back)


def _cumulative_extreme(x: OnnxValue, dim: int, *, largest: bool) -> tuple[OnnxValue, OnnxValue]:
    if len(x.shape) == 0:
        return op.Identity(x), op.Constant(value_int=0)
    rows, places, back = _up_to_each(x, dim, -math.inf if largest else math.inf)
    found = _extreme(rows, [-1], True, largest=largest, is_float=_is_float(x))
    same = op.Equal(rows, found)
    if _is_float(x):
        same = op.Or(same, op.IsNaN(rows))
    is_before = op.LessOrEqual(op.Unsqueeze(places, _axes(0)), op.Unsqueeze(places, _axes(1)))
    # torch returns the last index of equal numbers
    place = op.ReduceMax(op.Where(op.And(same, is_before), places, op.Constant(value_int=-1)), _axes(-1), keepdims=0)
    return op.Transpose(op.Squeeze(found, _axes(-1)), perm=back), op.Transpose(place, perm=back)


def _kth(x: OnnxValue, k: OnnxValue, dim: int, keepdim: bool, *, is_float: bool) -> tuple[OnnxValue, OnnxValue]:
    """Translate ``kthvalue`` to ONNX: the k-th smallest number and its index; NaN counts as the largest number."""
    given = op.Where(op.IsNaN(x), _like(math.inf, x), x) if is_float else x
    _, places = op.TopK(given, k, axis=dim, largest=0, sorted=1)
    place = op.Gather(places, op.Sub(k, _axes(1)), axis=dim)
    found = op.GatherElements(x, place, axis=dim)
    return (found, place) if keepdim else (op.Squeeze(found, _axes(dim)), op.Squeeze(place, _axes(dim)))


def _middle(x: OnnxValue, dim: int, keepdim: bool, *, is_float: bool) -> tuple[OnnxValue, OnnxValue]:
    """Translate ``median`` to ONNX; the median of an even count of numbers is the lower of the two middle numbers."""
    count = op.Gather(op.Shape(x), _axes(dim))
    found, place = _kth(x, op.Div(op.Add(count, _axes(1)), _axes(2)), dim, keepdim, is_float=is_float)
    if not is_float:
        return found, place
    unknown = op.Cast(op.IsNaN(x), to=_INT64)
    is_there = op.Cast(op.ReduceMax(unknown, _axes(dim), keepdims=int(keepdim)), to=_BOOL)
    first = op.ArgMax(unknown, axis=dim, keepdims=int(keepdim))
    return op.Where(is_there, _like(math.nan, x), found), op.Where(is_there, first, place)


def _searchsorted(
    ordered: OnnxValue,
    values: OnnxValue,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: OnnxValue | None = None,
) -> OnnxValue:
    if sorter is not None:
        ordered = op.GatherElements(ordered, sorter, axis=-1)
    is_right = right or side == "right"
    row, each = op.Unsqueeze(ordered, _axes(-2)), op.Unsqueeze(values, _axes(-1))
    before = op.LessOrEqual(row, each) if is_right else op.Less(row, each)
    count = op.ReduceSum(op.Cast(before, to=_INT64), _axes(-1), keepdims=0)
    return op.Cast(count, to=6) if out_int32 else count


def _isin(elements: OnnxValue, of: OnnxValue, assume_unique: bool = False, invert: bool = False) -> OnnxValue:
    same = op.Equal(op.Unsqueeze(elements, _axes(-1)), op.Reshape(of, _axes(-1)))
    # padded with one value that is not equal, since the maximum of an empty axis is undefined
    padded = op.Pad(op.Cast(same, to=_INT64), _axes(*[0] * (2 * len(elements.shape) + 1), 1))
    found = op.ReduceMax(padded, _axes(-1), keepdims=0)
    return op.Not(op.Cast(found, to=_BOOL)) if invert else op.Cast(found, to=_BOOL)


def _split(x: OnnxValue, size: OnnxValue | int, dim: int = 0) -> OnnxValue:
    if isinstance(size, int):
        return op.SplitToSequence(x, op.Constant(value_int=size), axis=dim)
    # a dynamic size: ONNX splits by the list of the sizes of all parts
    total, each = op.Gather(op.Shape(x), _axes(dim)), op.Reshape(size, _axes(-1))
    before_last = op.Div(op.Sub(total, _axes(1)), each)
    rest = op.Sub(total, op.Mul(each, before_last))
    return op.SplitToSequence(x, op.Concat(op.Expand(each, before_last), rest, axis=0), axis=dim)


def _scatter_mean(
    x: OnnxValue, dim: int, index: OnnxValue, source: OnnxValue, reduce: str, include_self: bool = True
) -> OnnxValue:
    if reduce != "mean" or len(x.shape) == 0:
        from onnxscript.function_libs.torch_lib.ops.core import aten_scatter_reduce

        return aten_scatter_reduce(x, dim, index, source, reduce, include_self)
    ones, nothing = op.Expand(_like(1.0, x), op.Shape(x)), op.Expand(_like(0.0, x), op.Shape(x))
    of_source = op.Expand(_like(1.0, x), op.Shape(index))
    added = op.Slice(source, _axes(*[0] * len(x.shape)), op.Shape(index))  # it may be larger than the index
    count = op.ScatterElements(ones if include_self else nothing, index, of_source, axis=dim, reduction="add")
    start = x if include_self else op.Where(op.Greater(count, nothing), nothing, x)
    total = op.ScatterElements(start, index, added, axis=dim, reduction="add")
    count = op.Max(count, _like(1.0, x))
    return op.Div(total, count) if _is_float(x) else op.Floor(op.Div(total, count))


def _stable_sort(x: OnnxValue, stable: bool | None = None, dim: int = -1, descending: bool = False) -> OnnxValue:
    # ONNX orders equal values by index, so its sort is stable
    count = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    return op.TopK(x, count, axis=dim, largest=int(descending), sorted=1)


# -- of losses, distances and attention --------------------------------------------------------------------------------


def _cross_entropy(
    scores: OnnxValue,
    target: OnnxValue,
    weight: OnnxValue | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> OnnxValue:
    if label_smoothing == 0:
        from onnxscript.function_libs.torch_lib.ops.nn import aten_cross_entropy_loss

        return aten_cross_entropy_loss(scores, target, weight, reduction, ignore_index)
    axis = 0 if len(scores.shape) == 1 else 1
    logs = op.LogSoftmax(scores, axis=axis)
    counts = op.Cast(op.Not(op.Equal(target, op.CastLike(op.Constant(value_int=ignore_index), target))), to=_INT64)
    label = op.Mul(op.Cast(target, to=_INT64), counts)  # any valid label for the ignored ones
    counts = op.CastLike(counts, scores)
    shape = [1] * len(scores.shape)
    shape[axis] = -1
    ones = op.Expand(_like(1.0, scores), op.Gather(op.Shape(scores), _axes(axis)))
    weights = op.Reshape(ones if weight is None else weight, _axes(*shape))
    of_labels = op.GatherElements(op.Mul(logs, weights), op.Unsqueeze(label, _axes(axis)), axis=axis)
    chosen = op.Squeeze(of_labels, _axes(axis))
    spread = op.ReduceSum(op.Mul(logs, weights), _axes(axis), keepdims=0)
    classes = op.CastLike(op.Gather(op.Shape(scores), _axes(axis)), scores)
    smoothed = op.Div(op.Mul(spread, _like(label_smoothing, scores)), classes)
    losses = op.Neg(op.Mul(op.Add(op.Mul(chosen, _like(1.0 - label_smoothing, scores)), smoothed), counts))
    if reduction == 0:
        return losses
    total = op.ReduceSum(losses, keepdims=0)
    if reduction == 2:
        return total
    if weight is not None:
        counts = op.Mul(counts, op.Gather(weight, label))
    return op.Div(total, op.ReduceSum(counts, keepdims=0))


def _cdist(x: OnnxValue, y: OnnxValue, p: float, compute_mode: int | None = None) -> OnnxValue:
    width = x.shape[-1]
    if p == 2 and compute_mode != 2 and isinstance(width, int) and width > _DIRECT:
        # from products of the vectors, without the differences of all pairs
        rank = len(y.shape)
        centre = op.ReduceMean(y, _axes(-2), keepdims=1)  # subtracted, so that products are small
        x, y = op.Sub(x, centre), op.Sub(y, centre)
        order = [*range(rank - 2), rank - 1, rank - 2]
        squares = op.ReduceSum(op.Mul(x, x), _axes(-1), keepdims=1)
        others = op.Transpose(op.ReduceSum(op.Mul(y, y), _axes(-1), keepdims=1), perm=order)
        products = op.Mul(op.MatMul(x, op.Transpose(y, perm=order)), _like(2.0, x))
        return op.Sqrt(op.Max(op.Sub(op.Add(squares, others), products), _like(0.0, x)))
    apart = op.Abs(op.Sub(op.Unsqueeze(x, _axes(-2)), op.Unsqueeze(y, _axes(-3))))
    if p == math.inf:
        return op.ReduceMax(apart, _axes(-1), keepdims=0)
    if p == 0:
        return op.ReduceSum(op.CastLike(op.Greater(apart, _like(0.0, x)), x), _axes(-1), keepdims=0)
    if p == 1:
        return op.ReduceSum(apart, _axes(-1), keepdims=0)
    if p == 2:
        return op.Sqrt(op.ReduceSum(op.Mul(apart, apart), _axes(-1), keepdims=0))
    return op.Pow(op.ReduceSum(op.Pow(apart, _like(p, x)), _axes(-1), keepdims=0), _like(1.0 / p, x))


def _is_one_operator(query: OnnxValue, key: OnnxValue, value: OnnxValue, enable_gqa: bool) -> bool:
    """Return whether ONNX's ``Attention`` accepts the tensors: four axes, one batch size, matching numbers of heads."""
    shapes = [one.shape for one in (query, key, value)]
    if any(shape is None or len(shape) != 4 for shape in shapes):
        return False
    rows, heads = ([shape[axis] for shape in shapes] for axis in (0, 1))
    if rows[0] != rows[1] or rows[1] != rows[2] or not all(isinstance(count, int) for count in heads):
        return False
    one_for_each = heads[0] == heads[1] or heads[1] == 1  # a single head is broadcast, whatever enable_gqa is
    return heads[1] == heads[2] and heads[0] % heads[1] == 0 and (enable_gqa or one_for_each)


def attention(
    query: OnnxValue,
    key: OnnxValue,
    value: OnnxValue,
    attn_mask: OnnxValue | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    in_one: bool = False,
) -> OnnxValue:
    """Translate attention to ONNX's ``Attention`` if ``in_one`` is true and the shapes fit, else to basic operators."""
    if dropout_p != 0:
        from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

        return aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if in_one and _is_one_operator(query, key, value, enable_gqa):
        return _opset23.Attention(query, key, value, attn_mask, scale=scale, is_causal=int(is_causal))[0]
    rank, width = len(key.shape), query.shape[-1]
    if enable_gqa and not (isinstance(query.shape[-3], int) and query.shape[-3] == key.shape[-3]):
        key, value = _for_each_query(key, query, rank), _for_each_query(value, query, rank)
    if scale is None and not isinstance(width, int):
        query = op.Div(query, op.Sqrt(op.CastLike(op.Gather(op.Shape(query), op.Constant(value_int=-1)), query)))
    else:
        query = op.Mul(query, _like(1 / math.sqrt(width) if scale is None else scale, query))
    scores = op.MatMul(query, op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2]))
    mask, is_bool = attn_mask, attn_mask is not None and attn_mask.dtype == _BOOL
    if is_causal:
        first, step = op.Constant(value_int=0), op.Constant(value_int=1)
        counts = (op.Gather(op.Shape(scores), op.Constant(value_int=axis)) for axis in (-2, -1))
        rows, columns = (op.Range(first, count, step) for count in counts)
        mask, is_bool = op.LessOrEqual(op.Unsqueeze(columns, _axes(0)), op.Unsqueeze(rows, _axes(1))), True
    if mask is None:
        return op.MatMul(op.Softmax(scores, axis=-1), value)
    if is_bool:  # the lowest number instead of -inf, with which OpenVINO computes different values
        scores = op.Where(mask, scores, _like(-65504.0 if query.dtype == _FLOAT16 else -3.4028234e38, query))
        is_blind = op.Equal(op.ReduceMax(op.CastLike(mask, query), _axes(-1), keepdims=1), _like(0.0, query))
    else:
        scores = op.Add(scores, mask)
        is_blind = op.Equal(op.ReduceMax(scores, _axes(-1), keepdims=1), _like(-math.inf, query))
    return op.MatMul(op.Where(is_blind, _like(0.0, query), op.Softmax(scores, axis=-1)), value)


def _for_each_query(x: OnnxValue, query: OnnxValue, rank: int) -> OnnxValue:
    """Repeat each head of keys or values for the query heads that use it (grouped-query attention)."""
    shape, heads = op.Shape(x), op.Gather(op.Shape(query), _axes(rank - 3))
    times = op.Div(heads, op.Gather(shape, _axes(rank - 3)))
    rows, last = op.Slice(shape, _axes(0), _axes(rank - 2)), op.Slice(shape, _axes(rank - 2), _axes(rank))
    each = op.Expand(op.Unsqueeze(x, _axes(rank - 2)), op.Concat(rows, times, last, axis=0))
    before = [op.Slice(shape, _axes(0), _axes(rank - 3))] if rank > 3 else []
    return op.Reshape(each, op.Concat(*before, heads, last, axis=0))


_aten = torch.ops.aten
REPAIRS: dict[Any, Callable[..., Any]] = {
    _aten.atan2.default: _atan2,
    _aten.log_sigmoid.default: _log_sigmoid,
    _aten.log_sigmoid_forward.default: lambda x: (_log_sigmoid(x), op.Exp(op.Neg(op.Abs(x)))),
    _aten.signbit.default: lambda x: _is_negative(x) if _is_float(x) else op.Less(x, _like(0.0, x)),
    _aten.copysign.Tensor: _copysign,
    _aten.copysign.Scalar: _copysign,
    _aten.hypot.default: _hypot,
    _aten.logaddexp.default: _logaddexp,
    _aten.logaddexp2.default: partial(_logaddexp, base=2.0),
    _aten.remainder.Tensor: _remainder,
    _aten.remainder.Scalar: _remainder_of_number,
    _aten.clamp.default: _clamp,
    _aten.clamp_min.default: _clamp,
    _aten.clamp_max.default: lambda x, most: _clamp(x, None, most),
    _aten.cumprod.default: _cumprod,
    _aten.logcumsumexp.default: _logcumsumexp,
    _aten.kthvalue.default: lambda x, k, dim=-1, keepdim=False: _kth(x, _axes(k), dim, keepdim, is_float=_is_float(x)),
    _aten.median.dim: lambda x, dim, keepdim=False: _middle(x, dim, keepdim, is_float=_is_float(x)),
    _aten.median.default: lambda x: _middle(op.Reshape(x, _axes(-1)), 0, False, is_float=_is_float(x))[0],
    _aten.searchsorted.Tensor: _searchsorted,
    _aten.isin.Tensor_Tensor: _isin,
    _aten.aminmax.default: lambda x, dim=None, keepdim=False: tuple(
        _extreme_along(x, dim, keepdim, largest=largest) for largest in (False, True)
    ),
    _aten.scatter_reduce.two: _scatter_mean,
    _aten.split.Tensor: _split,
    _aten.cross_entropy_loss.default: _cross_entropy,
    _aten._cdist_forward.default: _cdist,
    # for ProphetNet
    _aten._is_all_true.default: lambda x: op.Cast(op.ReduceMin(op.Cast(x, to=_INT64), keepdims=0), to=_BOOL),
    _aten.sort.stable: _stable_sort,  # for the blocks that Qwen 4 chooses
    torch.ops.prims.erf_inv.default: _erf_inv,  # all attention calls are decomposed into this operator
} | {
    operator: partial(function, largest=name == "max")
    for name in ("max", "min")
    for operator, function in (
        (getattr(_aten, f"f{name}").default, _number_of),
        (getattr(_aten, name).default, _extreme_along),
        (getattr(_aten, name).dim, _extreme_with_place),
        (getattr(_aten, f"a{name}").default, _extreme_along),
        (getattr(_aten, f"arg{name}").default, _place_along),
        (getattr(_aten, f"cum{name}").default, _cumulative_extreme),
    )
}
"""By torch operator: the function that translates the operator to ONNX operators correctly."""
