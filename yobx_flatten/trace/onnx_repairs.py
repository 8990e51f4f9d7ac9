"""Translate operators that torch's ONNX exporter does not translate, or translates wrongly at some values.

``make operators`` finds torch's wrong translations, and writes a page that lists them. The cost of ``cumprod``,
``cummax`` and ``logcumsumexp`` is quadratic in the length of the axis, since ONNX has no operators for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..recipe.aliases import OnnxValue

_INT64, _BOOL, _FLOAT16 = 7, 9, 10
_DIRECT = 16
"""Longest vectors for which ``cdist`` computes all differences; for longer vectors it uses matrix products."""


def _operators() -> Any:
    from onnxscript import opset18

    return opset18


def _like(value: float, like: OnnxValue) -> OnnxValue:
    op = _operators()
    return op.CastLike(op.Constant(value_float=value), like)


def _axes(*axes: int) -> OnnxValue:
    return _operators().Constant(value_ints=list(axes))


def _is_float(x: OnnxValue) -> bool:
    return bool(x.dtype is not None and x.dtype.is_floating_point())


def _is_negative(x: OnnxValue) -> OnnxValue:
    op = _operators()
    zero = _like(0.0, x)
    below = op.Less(op.Div(_like(1.0, x), x), zero)  # only a division distinguishes -0.0 from 0.0
    return op.Or(op.Less(x, zero), op.And(op.Equal(x, zero), below))


# -- of numbers --------------------------------------------------------------------------------------------------------


def _atan2(y: OnnxValue, x: OnnxValue) -> OnnxValue:
    op = _operators()
    high, wide = op.Abs(y), op.Abs(x)
    # 0/0 is 0 and inf/inf is 1: the angle within the first quadrant
    slope = op.Where(op.Equal(high, wide), op.Sign(high), op.Div(high, wide))
    angle = op.Atan(slope)
    angle = op.Where(_is_negative(x), op.Sub(_like(math.pi, x), angle), angle)
    return op.Where(_is_negative(y), op.Neg(angle), angle)


def _log_sigmoid(x: OnnxValue) -> OnnxValue:
    op = _operators()
    return op.Sub(op.Min(x, _like(0.0, x)), op.Log(op.Add(op.Exp(op.Neg(op.Abs(x))), _like(1.0, x))))


def _log_sigmoid_forward(x: OnnxValue) -> tuple[OnnxValue, OnnxValue]:
    op = _operators()
    return _log_sigmoid(x), op.Exp(op.Neg(op.Abs(x)))


def _signbit(x: OnnxValue) -> OnnxValue:
    op = _operators()
    return _is_negative(x) if _is_float(x) else op.Less(x, _like(0.0, x))


def _copysign(x: OnnxValue, sign: OnnxValue | float) -> OnnxValue:
    op = _operators()
    size = op.Abs(x)
    if isinstance(sign, (int, float)):
        return op.Neg(size) if math.copysign(1.0, sign) < 0 else size
    return op.Where(_is_negative(sign), op.Neg(size), size)


def _hypot(x: OnnxValue, y: OnnxValue) -> OnnxValue:
    op = _operators()
    wide, high = op.Abs(x), op.Abs(y)
    longest = op.Max(wide, high)
    # squares of large numbers overflow and squares of small numbers underflow, so divide by the larger side first
    unit = op.Where(op.Or(op.Equal(longest, _like(0.0, x)), op.IsInf(longest)), _like(1.0, x), longest)
    squares = op.Add(*(op.Mul(part, part) for part in (op.Div(wide, unit), op.Div(high, unit))))
    return op.Where(op.Or(op.IsInf(wide), op.IsInf(high)), _like(math.inf, x), op.Mul(op.Sqrt(squares), unit))


def _logaddexp(x: OnnxValue, y: OnnxValue, *, base: float = math.e) -> OnnxValue:
    op = _operators()
    # relative to the larger number, since exponentials of large numbers are infinite
    apart = op.Where(op.Equal(x, y), _like(0.0, x), op.Neg(op.Abs(op.Sub(x, y))))
    rest = op.Log(op.Add(op.Exp(op.Mul(apart, _like(math.log(base), x))), _like(1.0, x)))
    return op.Add(op.Max(x, y), op.Div(rest, _like(math.log(base), x)))


def _number_of(x: OnnxValue, y: OnnxValue, *, largest: bool) -> OnnxValue:
    """Translate ``fmax`` (or ``fmin``) to ONNX: the larger of two numbers, or the other number if one is NaN."""
    op = _operators()
    found = op.Max(x, y) if largest else op.Min(x, y)
    if not _is_float(x):
        return found
    return op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, found))


def _remainder(x: OnnxValue, divisor: OnnxValue) -> OnnxValue:
    op = _operators()
    if not _is_float(x):
        return op.Mod(x, divisor)  # ONNX's result has the sign of the divisor, like torch's
    found = op.Mod(x, divisor, fmod=1)
    zero = _like(0.0, x)
    other = op.And(op.Not(op.Equal(found, zero)), op.Xor(op.Less(found, zero), op.Less(divisor, zero)))
    return op.Where(other, op.Add(found, divisor), found)


def _remainder_of_number(x: OnnxValue, divisor: float) -> OnnxValue:
    op = _operators()
    given = op.Constant(value_float=float(divisor)) if _is_float(x) else op.Constant(value_int=int(divisor))
    return _remainder(x, op.CastLike(given, x))


def _clamp(x: OnnxValue, least: float | None = None, most: float | None = None) -> OnnxValue:
    op = _operators()
    if not _is_float(x):
        # a limit may be a size, which is a value of the graph
        held = [op.Constant(value_int=int(end)) if isinstance(end, (int, float)) else end for end in (least, most)]
        return op.Clip(x, *[None if end is None else op.CastLike(end, x) for end in held])
    if least is not None and most is not None:
        return op.Clip(x, _like(least, x), _like(most, x))
    # with one limit only, onnxruntime also clips infinity to the largest number of the type
    found = x if least is None else op.Max(x, _like(least, x))
    return found if most is None else op.Min(found, _like(most, x))


# -- along an axis -----------------------------------------------------------------------------------------------------


def _extreme(x: OnnxValue, dims: Sequence[int] | None, keepdim: bool, *, largest: bool, is_float: bool) -> OnnxValue:
    """Translate ``max`` (or ``min``) along axes to ONNX; the result is NaN if the numbers contain NaN."""
    op = _operators()
    axes = _axes(*dims) if dims else None
    reduce = op.ReduceMax if largest else op.ReduceMin
    found = reduce(x, axes, keepdims=int(keepdim))
    if not is_float:
        return found
    unknown = op.ReduceMax(op.Cast(op.IsNaN(x), to=_INT64), axes, keepdims=int(keepdim))
    return op.Where(op.Cast(unknown, to=_BOOL), _like(math.nan, x), found)


def _place_of_extreme(x: OnnxValue, dim: int, keepdim: bool, *, largest: bool, is_float: bool) -> OnnxValue:
    """Translate ``argmax`` (or ``argmin``) along an axis to ONNX; the result is the index of the first NaN, if any."""
    op = _operators()
    find = op.ArgMax if largest else op.ArgMin
    found = find(x, axis=dim, keepdims=int(keepdim))
    if not is_float:
        return found
    unknown = op.Cast(op.IsNaN(x), to=_INT64)
    is_there = op.Cast(op.ReduceMax(unknown, _axes(dim), keepdims=int(keepdim)), to=_BOOL)
    return op.Where(is_there, op.ArgMax(unknown, axis=dim, keepdims=int(keepdim)), found)


def _extreme_with_place(x: OnnxValue, dim: int, keepdim: bool = False, *, largest: bool) -> tuple[OnnxValue, OnnxValue]:
    op = _operators()
    if len(x.shape) == 0:
        return op.Identity(x), op.Constant(value_int=0)
    how = {"largest": largest, "is_float": _is_float(x)}
    return _extreme(x, [dim], keepdim, **how), _place_of_extreme(x, dim, keepdim, **how)


def _extreme_along(x: OnnxValue, dim: Sequence[int] = (), keepdim: bool = False, *, largest: bool) -> OnnxValue:
    dims = [dim] if isinstance(dim, int) else list(dim)
    if len(x.shape) == 0:
        return _operators().Identity(x)
    return _extreme(x, dims, keepdim, largest=largest, is_float=_is_float(x))


def _place_along(x: OnnxValue, dim: int | None = None, keepdim: bool = False, *, largest: bool) -> OnnxValue:
    op = _operators()
    if dim is None or len(x.shape) == 0:
        flat = op.Reshape(x, _axes(-1))
        place = _place_of_extreme(flat, 0, False, largest=largest, is_float=_is_float(x))
        return op.Reshape(place, _axes(*[1] * len(x.shape))) if keepdim else place
    return _place_of_extreme(x, dim, keepdim, largest=largest, is_float=_is_float(x))


def _aminmax(x: OnnxValue, dim: int | None = None, keepdim: bool = False) -> tuple[OnnxValue, OnnxValue]:
    dims = [] if dim is None else [dim]
    least, most = (_extreme_along(x, dims, keepdim, largest=largest) for largest in (False, True))
    return least, most


def _up_to_each(x: OnnxValue, dim: int, empty: float) -> tuple[OnnxValue, OnnxValue, list[int]]:
    """Repeat an axis of n values n times: copy ``i`` has the values up to position ``i``, and then ``empty``."""
    # returns: `x` with the copies as its last two axes; the positions; the permutation that moves the last axis back
    op = _operators()
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
    op = _operators()
    given = x if dtype is None or dtype == -1 else op.Cast(x, to=dtype)
    if len(x.shape) == 0:
        return op.Identity(given)
    rows, _, back = _up_to_each(given, dim, 1.0)
    return op.Transpose(op.ReduceProd(rows, _axes(-1), keepdims=0), perm=back)


def _logcumsumexp(x: OnnxValue, dim: int) -> OnnxValue:
    op = _operators()
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
    op = _operators()
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
    op = _operators()
    given = op.Where(op.IsNaN(x), _like(math.inf, x), x) if is_float else x
    _, places = op.TopK(given, k, axis=dim, largest=0, sorted=1)
    place = op.Gather(places, op.Sub(k, _axes(1)), axis=dim)
    found = op.GatherElements(x, place, axis=dim)
    return (found, place) if keepdim else (op.Squeeze(found, _axes(dim)), op.Squeeze(place, _axes(dim)))


def _kthvalue(x: OnnxValue, k: int, dim: int = -1, keepdim: bool = False) -> tuple[OnnxValue, OnnxValue]:
    return _kth(x, _axes(k), dim, keepdim, is_float=_is_float(x))


def _median(x: OnnxValue, dim: int, keepdim: bool = False) -> tuple[OnnxValue, OnnxValue]:
    return _middle(x, dim, keepdim, is_float=_is_float(x))


def _middle(x: OnnxValue, dim: int, keepdim: bool, *, is_float: bool) -> tuple[OnnxValue, OnnxValue]:
    """Translate ``median`` to ONNX: the lower of two middle numbers, or NaN if there is a NaN, and its index."""
    op = _operators()
    count = op.Gather(op.Shape(x), _axes(dim))
    found, place = _kth(x, op.Div(op.Add(count, _axes(1)), _axes(2)), dim, keepdim, is_float=is_float)
    if not is_float:
        return found, place
    unknown = op.Cast(op.IsNaN(x), to=_INT64)
    is_there = op.Cast(op.ReduceMax(unknown, _axes(dim), keepdims=int(keepdim)), to=_BOOL)
    first = op.ArgMax(unknown, axis=dim, keepdims=int(keepdim))
    return op.Where(is_there, _like(math.nan, x), found), op.Where(is_there, first, place)


def _median_of_all(x: OnnxValue) -> OnnxValue:
    return _middle(_operators().Reshape(x, _axes(-1)), 0, False, is_float=_is_float(x))[0]


def _searchsorted(
    ordered: OnnxValue,
    values: OnnxValue,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: OnnxValue | None = None,
) -> OnnxValue:
    op = _operators()
    if sorter is not None:
        ordered = op.GatherElements(ordered, sorter, axis=-1)
    is_right = right or side == "right"
    row, each = op.Unsqueeze(ordered, _axes(-2)), op.Unsqueeze(values, _axes(-1))
    before = op.LessOrEqual(row, each) if is_right else op.Less(row, each)
    count = op.ReduceSum(op.Cast(before, to=_INT64), _axes(-1), keepdims=0)
    return op.Cast(count, to=6) if out_int32 else count


def _isin(elements: OnnxValue, of: OnnxValue, assume_unique: bool = False, invert: bool = False) -> OnnxValue:
    op = _operators()
    same = op.Equal(op.Unsqueeze(elements, _axes(-1)), op.Reshape(of, _axes(-1)))
    # padded with one value that is not equal, since the maximum of an empty axis is undefined
    found = op.ReduceMax(
        op.Pad(op.Cast(same, to=_INT64), _axes(*[0] * (2 * len(elements.shape) + 1), 1)), _axes(-1), keepdims=0
    )
    return op.Not(op.Cast(found, to=_BOOL)) if invert else op.Cast(found, to=_BOOL)


def _split(x: OnnxValue, size: OnnxValue | int, dim: int = 0) -> OnnxValue:
    op = _operators()
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
    op = _operators()
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


# -- of losses, distances and attention --------------------------------------------------------------------------------


def _cross_entropy(
    scores: OnnxValue,
    target: OnnxValue,
    weight: OnnxValue | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> OnnxValue:
    op = _operators()
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
    chosen = op.Squeeze(
        op.GatherElements(op.Mul(logs, weights), op.Unsqueeze(label, _axes(axis)), axis=axis), _axes(axis)
    )
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
    op = _operators()
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
    last = {"keepdims": 0}
    if p == math.inf:
        return op.ReduceMax(apart, _axes(-1), **last)
    if p == 0:
        return op.ReduceSum(op.CastLike(op.Greater(apart, _like(0.0, x)), x), _axes(-1), **last)
    if p == 1:
        return op.ReduceSum(apart, _axes(-1), **last)
    if p == 2:
        return op.Sqrt(op.ReduceSum(op.Mul(apart, apart), _axes(-1), **last))
    powers = op.ReduceSum(op.Pow(apart, _like(p, x)), _axes(-1), **last)
    return op.Pow(powers, _like(1.0 / p, x))


def plain_attention(
    query: OnnxValue,
    key: OnnxValue,
    value: OnnxValue,
    mask: OnnxValue | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> OnnxValue:
    """Translate attention to basic ONNX operators, for tensors of any rank; it returns 0 for fully masked queries."""
    op = _operators()
    rank, width = len(key.shape), query.shape[-1]
    if enable_gqa and not (isinstance(query.shape[-3], int) and query.shape[-3] == key.shape[-3]):
        key, value = _for_each_query(key, query, rank), _for_each_query(value, query, rank)
    if scale is None and not isinstance(width, int):
        query = op.Div(query, op.Sqrt(op.CastLike(op.Gather(op.Shape(query), op.Constant(value_int=-1)), query)))
    else:
        query = op.Mul(query, _like(1 / math.sqrt(width) if scale is None else scale, query))
    scores = op.MatMul(query, op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2]))
    nothing, is_bool = _like(-math.inf, query), mask is not None and mask.dtype == _BOOL
    if is_causal:
        first, step = op.Constant(value_int=0), op.Constant(value_int=1)
        rows, columns = (
            op.Range(first, op.Gather(op.Shape(scores), op.Constant(value_int=axis)), step) for axis in (-2, -1)
        )
        mask, is_bool = op.LessOrEqual(op.Unsqueeze(columns, _axes(0)), op.Unsqueeze(rows, _axes(1))), True
    if mask is None:
        return op.MatMul(op.Softmax(scores, axis=-1), value)
    if is_bool:  # the lowest number instead of -inf, with which OpenVINO computes different values
        scores = op.Where(mask, scores, _like(-65504.0 if query.dtype == _FLOAT16 else -3.4028234e38, query))
        is_blind = op.Equal(op.ReduceMax(op.CastLike(mask, query), _axes(-1), keepdims=1), _like(0.0, query))
    else:
        scores = op.Add(scores, mask)
        is_blind = op.Equal(op.ReduceMax(scores, _axes(-1), keepdims=1), nothing)
    return op.MatMul(op.Where(is_blind, _like(0.0, query), op.Softmax(scores, axis=-1)), value)


def _for_each_query(x: OnnxValue, query: OnnxValue, rank: int) -> OnnxValue:
    """Repeat each head of keys or values for the query heads that use it (grouped-query attention)."""
    op = _operators()
    shape, heads = op.Shape(x), op.Gather(op.Shape(query), _axes(rank - 3))
    times = op.Div(heads, op.Gather(shape, _axes(rank - 3)))
    rows, last = op.Slice(shape, _axes(0), _axes(rank - 2)), op.Slice(shape, _axes(rank - 2), _axes(rank))
    each = op.Expand(op.Unsqueeze(x, _axes(rank - 2)), op.Concat(rows, times, last, axis=0))
    before = [op.Slice(shape, _axes(0), _axes(rank - 3))] if rank > 3 else []
    return op.Reshape(each, op.Concat(*before, heads, last, axis=0))


def _repairs() -> dict[Any, Callable[..., Any]]:
    aten, both = torch.ops.aten, ((True, "max"), (False, "min"))
    found: dict[Any, Callable[..., Any]] = {
        aten.atan2.default: _atan2,
        aten.log_sigmoid.default: _log_sigmoid,
        aten.log_sigmoid_forward.default: _log_sigmoid_forward,
        aten.signbit.default: _signbit,
        aten.copysign.Tensor: _copysign,
        aten.copysign.Scalar: _copysign,
        aten.hypot.default: _hypot,
        aten.logaddexp.default: _logaddexp,
        aten.logaddexp2.default: functools.partial(_logaddexp, base=2.0),
        aten.remainder.Tensor: _remainder,
        aten.remainder.Scalar: _remainder_of_number,
        aten.clamp.default: _clamp,
        aten.clamp_min.default: _clamp,
        aten.clamp_max.default: lambda x, most: _clamp(x, None, most),
        aten.cumprod.default: _cumprod,
        aten.logcumsumexp.default: _logcumsumexp,
        aten.kthvalue.default: _kthvalue,
        aten.median.dim: _median,
        aten.median.default: _median_of_all,
        aten.searchsorted.Tensor: _searchsorted,
        aten.isin.Tensor_Tensor: _isin,
        aten.aminmax.default: _aminmax,
        aten.scatter_reduce.two: _scatter_mean,
        aten.split.Tensor: _split,
        aten.cross_entropy_loss.default: _cross_entropy,
        aten._cdist_forward.default: _cdist,
    }
    for largest, name in both:
        packets = {"number": getattr(aten, f"f{name}"), "all": getattr(aten, name), "along": getattr(aten, f"a{name}")}
        found[packets["number"].default] = functools.partial(_number_of, largest=largest)
        found[packets["all"].default] = functools.partial(_extreme_along, largest=largest)
        found[packets["all"].dim] = functools.partial(_extreme_with_place, largest=largest)
        found[packets["along"].default] = functools.partial(_extreme_along, largest=largest)
        found[getattr(aten, f"arg{name}").default] = functools.partial(_place_along, largest=largest)
        found[getattr(aten, f"cum{name}").default] = functools.partial(_cumulative_extreme, largest=largest)
    return found


REPAIRS = _repairs()
"""By torch operator: the function that translates the operator to ONNX operators correctly."""
