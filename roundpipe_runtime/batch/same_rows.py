"""Compare the results for some rows at once with the results for parts of these rows.

::

    rows 0 to 2        hidden (3, 7, 8)    similarity (3, 3)    loss ()      scale (8,)
    rows 0 and 1              (2, 7, 8)               (2, 2)         ()            (8,)
    row 2                     (1, 7, 8)               (1, 1)         ()            (8,)
    is it the same     joined, yes         no: pairs        a mean, a sum    equal, or a mean

Which axis has the rows is the one whose sizes add up. A tensor for which none does is left out: nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from yobx_flatten.core.compare import tolerance

# Integers are chosen by numbers that rounding changes, so that some may be others.
_CHOSEN = 0.02


def mixes_rows(
    whole: Sequence[object], parts: Sequence[Sequence[object]], rows: Sequence[int], coarsest: torch.dtype | None = None
) -> bool:
    """Report whether rows give different results together than in parts, by more than rounding.

    >>> x = torch.arange(6.0).reshape(3, 2)
    >>> mixes_rows([x], [[x[:2]], [x[2:]]], [2, 1]), mixes_rows([x.roll(1, 0)], [[x[:2].roll(1, 0)], [x[2:]]], [2, 1])
    (False, True)
    """
    # parts: leaves of what was computed for each part
    # coarsest: dtype in which something was computed. Default: the dtypes of the leaves.
    if any(len(part) != len(whole) for part in parts):
        return False
    columns = list(zip(whole, *parts, strict=True))
    tensors = [c for c in columns if all(isinstance(one, torch.Tensor) and not one.is_nested for one in c)]
    return any(_mixes([t.detach().cpu() for t in c if isinstance(t, torch.Tensor)], rows, coarsest) for c in tensors)


def changes_with_others(
    whole: Sequence[object],
    other: Sequence[object],
    part: Sequence[object],
    kept: Sequence[int],
    count: int,
    coarsest: torch.dtype | None = None,
) -> bool:
    """Report whether rows give different results next to other rows, with the same random numbers."""
    # part: leaves of what was computed for fewer rows, which shows where the rows are
    # coarsest: dtype in which something was computed. Default: the dtypes of the leaves.
    if not len(whole) == len(other) == len(part):
        return False
    for one, changed, few in zip(whole, other, part, strict=True):
        axis = rows_of(one, few, count)
        if axis is None or not isinstance(changed, torch.Tensor) or not isinstance(one, torch.Tensor):
            continue
        found, expected = (taken(t.detach().cpu(), axis, kept) for t in (changed, one))
        if found.shape == expected.shape and not _is_close(found, expected, coarsest):
            return True
    return False


def rows_of(whole: object, part: object, count: int) -> int | None:
    """Return the axis of a tensor that has the rows, read off one of fewer rows; ``None`` if there is none."""
    if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor) or whole.dim() != part.dim():
        return None
    axes = [axis for axis, (one, other) in enumerate(zip(whole.shape, part.shape, strict=True)) if one != other]
    return axes[0] if len(axes) == 1 and whole.shape[axes[0]] == count else None


def taken(value: object, axis: int | None, order: Sequence[int]) -> Any:
    """Return selected rows of a tensor, in order and with repeats; values without rows are returned unchanged."""
    if axis is None or not isinstance(value, torch.Tensor):
        return value
    return value.index_select(axis, torch.tensor(list(order), device=value.device))


def _mixes(column: Sequence[torch.Tensor], rows: Sequence[int], coarsest: torch.dtype | None) -> bool:
    whole, *parts = column
    if any(one.dim() != whole.dim() or one.dtype != whole.dtype for one in parts) or whole.numel() == 0:
        return False
    axes = [axis for axis, size in enumerate(whole.shape) if any(one.shape[axis] != size for one in parts)]
    if not axes:
        return not _is_of_all_rows(whole, parts, rows, coarsest)
    if len(axes) == 1:
        (axis,) = axes
        is_joined = sum(one.shape[axis] for one in parts) == whole.shape[axis]
        return is_joined and not _is_close(torch.cat(parts, axis), whole, coarsest)
    # pairs of rows: each is compared with those of its own part only
    return all([one.shape[axis] for one in column] == [sum(rows), *rows] for axis in axes)


def _is_of_all_rows(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], rows: Sequence[int], coarsest: torch.dtype | None
) -> bool:
    """Whether a tensor without an axis of rows is the same for all parts, their mean or their sum."""
    if not whole.is_floating_point():
        return True  # a number of rows or tokens, or a position
    stacked = torch.stack([one.double() for one in parts])
    shares = torch.tensor(rows, dtype=torch.float64).reshape(-1, *[1] * whole.dim())
    mean, total = (stacked * (shares / sum(rows))).sum(0), stacked.sum(0)
    return any(_is_close(one.to(whole.dtype), whole, coarsest) for one in (*parts, mean, total))


def _is_close(found: torch.Tensor, expected: torch.Tensor, coarsest: torch.dtype | None) -> bool:
    if not expected.is_floating_point() and not expected.is_complex():
        return float((found != expected).double().mean()) <= _CHOSEN
    limit = tolerance("rows", *(dtype for dtype in (expected.dtype, coarsest) if dtype is not None))
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = (torch.where(t.isfinite(), t.to(wide), 0.0) for t in (found, expected))
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return False
    apart = (one - other).abs()
    # not more than rounding for the largest number, and not for most of them: few may be much larger than all others
    return bool(apart.max() <= limit * other.abs().max()) and bool(
        apart.square().mean() <= limit**2 * other.abs().square().mean()
    )


def shared_by_rows(leaves: Sequence[object], of_batch: Sequence[object]) -> list[bool]:
    """Report for each leaf of some rows whether it is for all rows: weights of classes, as many as rows by chance."""
    # of_batch: the same leaves of the batch; where none is longer, it is not known
    same = [getattr(a, "shape", None) == getattr(b, "shape", 0) for a, b in zip(leaves, of_batch, strict=False)]
    is_known = any(hasattr(one, "shape") and not kept for one, kept in zip(leaves, same, strict=False))
    return same if is_known and len(leaves) == len(of_batch) else [False] * len(leaves)
