"""Compare outputs and gradients of layers: of all rows with those of parts, and repeated ones with earlier ones.

A digest of a gradient or an output has all values, or random projections of a large tensor.

A projection is a weighted sum of a gradient's values with random factors, equal for all gradients of one size. The mean
square of the differences between projections of two gradients estimates the squared norm of the gradients' difference
(Alon, Matias and Szegedy, *The space complexity of approximating the frequency moments*, 1996). With sixteen
projections, the estimated norm is rarely wrong by 50 %. The factors are uniform numbers, not signs (1 or -1) as in the
article, so that errors in two elements cannot cancel exactly. Projections can be added, because they are linear.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from yobx_flatten.core.compare import tolerance
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.registry.recipe.aliases import PyTree

from ..errors import StageError

_SUMS = 16
_COLUMNS = 4096
_ROWS = 128  # elements per piece: 2 MB of float32, which stay in a cache


@dataclasses.dataclass(frozen=True, slots=True)
class Digest:
    shape: torch.Size  # shape of the gradient
    values: torch.Tensor  # values, or projections; non-finite values of the gradient count as 0
    is_whole: bool  # whether `values` are the values of the gradient
    norm: float  # norm of the gradient; an estimate if `values` are projections
    # digest of marks: 1 for NaN, 2 and 3 for the infinities, 0 for finite values; `None` if all values are finite
    odd: Digest | None = None

    def divided(self, factor: float) -> Digest:
        return dataclasses.replace(self, values=self.values / factor, norm=self.norm / factor)

    def __add__(self, other: Digest) -> Digest:
        values, odd = self.values + other.values, other.odd if self.odd is None else self.odd
        if self.odd is not None and other.odd is not None and not self.odd.is_whole:
            # the marks of a sum are not the sum of the marks, so the projections are not known
            odd = dataclasses.replace(self.odd, values=torch.full_like(self.odd.values, torch.nan))
        elif self.odd is not None and other.odd is not None:
            a, b = self.odd.values, other.odd.values
            marks = torch.where(a == 0, b, torch.where((b == 0) | (a == b), a, 1.0))  # inf - inf is NaN
            odd = dataclasses.replace(self.odd, values=marks, norm=_norm(marks))
        if odd is not None and self.is_whole:
            values = torch.where(odd.values == 0, values, 0.0)
        scale = 1.0 if self.is_whole else _SUMS**-0.5
        return Digest(self.shape, values, self.is_whole, _norm(values) * scale, odd)


def digest(gradient: torch.Tensor, *, whole: int | None = None) -> Digest:
    """Return all values of a gradient, or random projections if the gradient has more than ``whole`` elements.

    >>> found = digest(torch.tensor([3.0, 4.0, torch.inf]))
    >>> found.norm, found.values.tolist(), found.odd.values.tolist()
    (5.0, [3.0, 4.0, 0.0], [0.0, 0.0, 2.0])
    """
    # whole: largest number of elements of a gradient whose values are all kept; `None`: no limit
    gradient = gradient.detach()
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    is_whole = whole is None or gradient.numel() <= whole
    values, norm = (gradient.clone(), _norm(gradient)) if is_whole else _summed(gradient)
    if math.isfinite(norm):
        return Digest(gradient.shape, values, is_whole, norm)
    finite = gradient.isfinite()
    rest = torch.where(finite, gradient, 0.0).double()  # squares of finite values may overflow their dtype
    odd = None
    if not finite.all():
        infinite = torch.where(gradient > 0, 2.0, 3.0)
        odd = digest(torch.where(finite, 0.0, torch.where(gradient.isnan(), 1.0, infinite)), whole=whole)
    values, norm = (rest, _norm(rest)) if is_whole else _summed(rest)
    return Digest(gradient.shape, values, is_whole, norm, odd)


def distance(one: Digest | None, other: Digest | None, least: float = 0.0) -> float:
    """Return the distance between two gradients, relative to the norm of the second.

    ``None`` counts as a gradient of zeros.

    >>> distance(digest(torch.tensor([3.0, 4.5])), digest(torch.tensor([3.0, 4.0])))
    0.1
    """
    if one is None or other is None:
        present = other if one is None else one
        return 0.0 if present is None or (present.norm == 0.0 and present.odd is None) else math.inf
    a, b = one.odd, other.odd
    if one.shape != other.shape or (a is None) != (b is None):
        return math.inf
    # added projections of marks are NaN: both gradients have non-finite values, but the places are not known
    is_known = a is not None and b is not None and not (a.values.isnan().any() or b.values.isnan().any())
    if a is not None and b is not None and is_known and not torch.equal(a.values, b.values):
        return math.inf
    scale = 1.0 if one.is_whole else _SUMS**-0.5
    difference = _norm(one.values.double() - other.values.double()) * scale
    found = difference / max(other.norm, least * math.prod(other.shape) ** 0.5, 1e-30) if difference else 0.0
    return math.inf if math.isnan(found) else found


def typical(found: Digest) -> float:
    return found.norm / float(max(math.prod(found.shape), 1) ** 0.5)


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) if values.numel() else 0.0


def _summed(gradient: torch.Tensor) -> tuple[torch.Tensor, float]:
    # The gradient is cut into rows of 4096 values. The factor of a value is the product of a row factor and a column
    # factor, so a projection is two matrix products, and few factors are drawn.
    flat = gradient.reshape(-1)
    dtype = torch.float32 if gradient.element_size() < 4 else torch.float64
    columns = _factors(_COLUMNS).to(dtype)
    rows = _factors(-(-flat.numel() // _COLUMNS), 1)
    sums, squares = torch.zeros(_SUMS, dtype=torch.float64), 0.0
    for row in range(0, len(rows), _ROWS):
        part = flat[row * _COLUMNS : (row + _ROWS) * _COLUMNS].to(dtype)
        squares += float(part.dot(part))
        full = len(part) // _COLUMNS
        if full:
            made = part[: full * _COLUMNS].view(full, _COLUMNS) @ columns
            sums += (made * rows[row : row + full]).sum(0)
        rest = part[full * _COLUMNS :]
        if len(rest):
            sums += (rest @ columns[: len(rest)]) * rows[row + full]
    return sums, math.sqrt(squares) if squares >= 0 else math.nan


@functools.lru_cache(maxsize=4)
def _factors(count: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers with mean 0 and variance 1, always the same for the same arguments."""
    made = torch.rand((count, _SUMS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.sub_(0.5).mul_(12**0.5)


_OUTPUT_SUMS = 4  # sums of an output, which are compared with those of its recomputation
# Tensors are multiplied by these factors before they are summed: a mask is filled with the minimum of its dtype, and
# the sum of two minima overflows.
_FACTORS = {torch.float16: 2.0**-10}
_USUAL_FACTOR = 2.0**-40


def digest_outputs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return random projections and norms of outputs that require a gradient, to compare a recomputation with them."""
    # the digests stay on the device of the outputs, because a copy to the host would wait for the device
    found = []
    with torch.no_grad():
        for tensor in filter(is_digested, tensors):
            rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
            factor = _FACTORS.get(rows.dtype, _USUAL_FACTOR)
            within = rows @ (_signs(rows.shape[1], _OUTPUT_SUMS, rows) * factor)
            sums = (within * _signs(rows.shape[0], _OUTPUT_SUMS, rows)).sum(0, dtype=torch.float64) / factor
            norm = torch.linalg.vector_norm(rows, dtype=torch.float64).reshape(1)
            found.append(torch.cat([sums, norm]))
    return found


def is_digested(tensor: torch.Tensor) -> bool:
    has_numbers = tensor.is_floating_point() and tensor.layout == torch.strided and tensor.numel() > 0
    return tensor.requires_grad and has_numbers


def _signs(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Return pseudo-random signs (1 or -1) that depend only on ``rows`` and ``columns``."""
    numbers = torch.arange(rows * columns, device=like.device).reshape(rows, columns)
    mixed = (numbers * 2654435761 + 40503) % 4294967296
    mixed = ((mixed >> 15) ^ mixed) * 2246822519 % 4294967296
    return ((mixed >> 13) % 2 * 2 - 1).to(like.dtype)


def check_repeated(
    title: str, before: Sequence[torch.Tensor], now: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> None:
    for one, other, dtype in zip(before, now, dtypes, strict=False):
        norm = float(one[-1])
        # an accelerator may add in a different order
        if norm < float("inf") and not (one - other).abs().max() <= tolerance("rows", dtype) * norm:
            break
    else:
        if len(before) == len(now):
            return
    raise StageError(
        f"{title} computed different values in its recomputation than in its forward, so the gradient would be wrong. "
        "If the layer draws from a random generator, make the generator an attribute of the layer. If the layer counts "
        "calls or reads a clock, save the value that differs:\n    if doing_recompute():\n"
        "        (mask,) = get_recompute_data()\n    else:\n        mask = ...; save_for_recompute(mask)"
    )


# Rounding may change integers that are derived from floating-point numbers, so this share of them may differ.
_CHOSEN = 0.02

# Compare the results for some rows at once with the results for parts of these rows.
#
#     rows 0 to 2        hidden (3, 7, 8)    similarity (3, 3)    loss ()      scale (8,)
#     rows 0 and 1              (2, 7, 8)               (2, 2)         ()            (8,)
#     row 2                     (1, 7, 8)               (1, 1)         ()            (8,)
#     equal?             joined, yes         no: pairs        a mean, a sum    equal, or a mean
#
# The row axis is the axis along which the sizes of the parts add up to the size for all rows.


def mixes_rows(
    whole: PyTree,
    parts: Sequence[PyTree],
    rows: Sequence[int],
    coarsest: torch.dtype | None = None,
    share: float = 1.0,
) -> bool:
    """Report whether results for all rows together differ by more than rounding from results for parts of the rows.

    >>> x = torch.arange(6.0).reshape(3, 2)
    >>> mixes_rows([x], [[x[:2]], [x[2:]]], [2, 1]), mixes_rows([x.roll(1, 0)], [[x[:2].roll(1, 0)], [x[2:]]], [2, 1])
    (False, True)
    """
    # coarsest: lowest-precision dtype of the computation, if known; share: factor of the tolerance for 32 bits or more
    columns: list[Sequence[object]] = []
    pair_leaves([whole, *parts], columns, sum(rows))
    tensors = [c for c in columns if all(isinstance(one, torch.Tensor) and not one.is_nested for one in c)]
    close = functools.partial(is_close, coarsest=coarsest, share=share)
    return any(_mixed([t.detach().cpu() for t in c if isinstance(t, torch.Tensor)], rows, close) for c in tensors)


def pair_leaves(trees: Sequence[PyTree], columns: list[Sequence[object]], count: int) -> Any:
    """Add each leaf of the results for all rows, with the leaves for the parts, to ``columns``."""
    # trees: results for all rows, then for each part; count: number of rows
    # returns: whether a leaf has rows; for a container, a list with an entry per child. A list whose lengths for parts
    # add up to the length for all rows is paired item by item, and has rows if no item is padded to a longer row.
    kinds, flat = zip(*map(children, trees), strict=True)
    if len(flat[0]) == 1 and flat[0][0] is trees[0]:
        columns.append(trees)
        is_nested = any(isinstance(one, torch.Tensor) and one.is_nested for one in trees)  # has no shape
        return not is_nested and rows_of(trees[0], trees[-1], count) is not None
    if len(set(kinds)) == 1 and len(set(map(len, flat))) == 1:
        return [pair_leaves(column, columns, count) for column in zip(*flat, strict=True)]
    start, held = len(columns), [item for items in flat[1:] for item in items]
    if not isinstance(trees[0], (list, tuple)) or len(held) != len(flat[0]):
        return False
    for pair in zip(flat[0], held, strict=True):
        pair_leaves(pair, columns, count)
    return all(getattr(one, "shape", None) == getattr(other, "shape", None) for one, other in columns[start:])


def children(tree: PyTree) -> tuple[object, list[PyTree]]:
    # returns: type and keys of a container, and its children; a leaf is its own child
    if isinstance(tree, dict):
        return (type(tree), frozenset(tree)), [tree[key] for key in sorted(tree, key=str)]
    return type(tree), pytree.tree_leaves(tree, is_leaf=lambda one: one is not tree)


def leaves_with_rows(tree: PyTree, has_rows: Any) -> Iterator[torch.Tensor]:
    # has_rows: result of `pair_leaves`
    if isinstance(has_rows, list):
        for child, held in zip(children(tree)[1], has_rows, strict=True):
            yield from leaves_with_rows(child, held)
    elif has_rows:
        yield from (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def rows_of(whole: object, part: object, count: int) -> int | None:
    """Return the axis of the rows: the only axis along which the sizes of ``whole`` and ``part`` differ."""
    if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor) or whole.dim() != part.dim():
        return None
    axes = [axis for axis, (one, other) in enumerate(zip(whole.shape, part.shape, strict=True)) if one != other]
    return axes[0] if len(axes) == 1 and whole.shape[axes[0]] == count else None


def taken(value: object, axis: int | None, order: Sequence[int]) -> Any:
    if axis is None or not isinstance(value, torch.Tensor):
        return value
    return value.index_select(axis, torch.tensor(list(order), device=value.device))


def _mixed(column: Sequence[torch.Tensor], rows: Sequence[int], is_close: Callable[..., bool]) -> bool:
    whole, *parts = column
    if any(one.dim() != whole.dim() or one.dtype != whole.dtype for one in parts) or whole.numel() == 0:
        return False
    axes = [axis for axis, size in enumerate(whole.shape) if any(one.shape[axis] != size for one in parts)]
    if not axes:
        if not whole.is_floating_point():
            return False  # a number of rows or tokens, or a position
        stacked = torch.stack([one.double() for one in parts])
        shares = torch.tensor(rows[: len(parts)], dtype=torch.float64).reshape(-1, *[1] * whole.dim())
        mean, total = (stacked * (shares / shares.sum())).sum(0), stacked.sum(0)
        return not any(is_close(one.to(whole.dtype), whole) for one in (*parts, mean, total))
    if len(axes) == 1:
        (axis,) = axes
        is_joined = sum(one.shape[axis] for one in parts) == whole.shape[axis]
        return is_joined and not is_close(torch.cat(parts, axis), whole)
    # pairs of rows: each is compared only within its own part
    return all([one.shape[axis] for one in column] == [sum(rows), *rows] for axis in axes)


def is_close(found: torch.Tensor, expected: torch.Tensor, coarsest: torch.dtype | None, share: float = 1.0) -> bool:
    if not expected.is_floating_point() and not expected.is_complex():
        return float((found != expected).double().mean()) <= _CHOSEN
    types = [dtype for dtype in (expected.dtype, coarsest) if dtype is not None]
    limit = tolerance("rows", *types) * (share if min(dtype.itemsize for dtype in types) >= 4 else 1.0)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = (torch.where(t.isfinite(), t.to(wide), 0.0) for t in (found, expected))
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return False
    apart = (one - other).abs()
    # a few numbers may be much larger than all others, so the mean square is also compared
    return bool(apart.max() <= limit * other.abs().max()) and bool(
        apart.square().mean() <= limit**2 * other.abs().square().mean()
    )
