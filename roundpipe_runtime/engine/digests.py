"""Keep enough of a gradient to compare it later: all of it, or sixteen random projections.

The gradients of a model take as much memory as the model. So none is kept that is large: as soon as it is there, its
numbers are added up sixteen times, each time with other factors. The factors are always the same ones, so equal
gradients have equal sums; and the mean square of the differences between two gradients' sums is, in expectation, the
square of the norm of their difference (Alon, Matias and Szegedy, *The space complexity of approximating the frequency
moments*, 1996; factors of any size instead of signs, so that two numbers that differ do not cancel). With sixteen
sums the estimate is rarely off by half; that it is too small by a factor of 25, which could take a mistake for
rounding, happens once in 10**15 times.

Sums of gradients have the sums of sums: a parameter that several layers use is digested layer by layer.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

_SUMS = 16
_COLUMNS = 4096
_ROWS = 128  # elements per piece: 2 MB of float32, which stay in a cache


@dataclasses.dataclass(frozen=True, slots=True)
class Digest:
    """A gradient, or random projections of a large gradient, for a later comparison with another gradient."""

    shape: torch.Size  # shape of the gradient
    values: torch.Tensor  # values, or sums with random factors; 0 for those that are not finite
    is_whole: bool  # whether they are the values themselves
    norm: float  # the norm of the gradient; for sums, an estimate
    # digest of the non-finite values: 1 for NaN, 2 and 3 for the infinities, 0 elsewhere; `None` if all are
    # finite
    odd: Digest | None = None

    def divided(self, factor: float) -> Digest:
        """Return the digest of the gradient divided by a positive number."""
        return dataclasses.replace(self, values=self.values / factor, norm=self.norm / factor)

    def __add__(self, other: Digest) -> Digest:
        values, odd = self.values + other.values, _sum_of_odd(self.odd, other.odd)
        if odd is not None and self.is_whole:
            values = torch.where(odd.values == 0, values, 0.0)
        scale = 1.0 if self.is_whole else _SUMS**-0.5
        return Digest(self.shape, values, self.is_whole, _norm(values) * scale, odd)


def digest(gradient: torch.Tensor, *, whole: int | None = None) -> Digest:
    """Return a gradient for a comparison: all of it, or random projections if it has more than ``whole`` elements.

    >>> found = digest(torch.tensor([3.0, 4.0, torch.inf]))
    >>> found.norm, found.values.tolist(), found.odd.values.tolist()
    (5.0, [3.0, 4.0, 0.0], [0.0, 0.0, 2.0])
    """
    # whole: keep all values of gradients up to this size; `None`: of all gradients
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

    A missing gradient counts as zeros.

    >>> distance(digest(torch.tensor([3.0, 4.5])), digest(torch.tensor([3.0, 4.0])))
    0.1
    """
    if one is None or other is None:
        present = other if one is None else one
        return 0.0 if present is None or (present.norm == 0.0 and present.odd is None) else math.inf
    if one.shape != other.shape or _are_odd_apart(one.odd, other.odd):
        return math.inf
    scale = 1.0 if one.is_whole else _SUMS**-0.5
    difference = _norm(one.values.double() - other.values.double()) * scale
    found = difference / max(other.norm, least * math.prod(other.shape) ** 0.5, 1e-30) if difference else 0.0
    return math.inf if math.isnan(found) else found


def typical(found: Digest) -> float:
    """Return the root mean square of a gradient's elements."""
    root: float = max(math.prod(found.shape), 1) ** 0.5
    return found.norm / root


def _are_odd_apart(one: Digest | None, other: Digest | None) -> bool:
    if one is None or other is None:
        return one is not other
    if one.values.isnan().any() or other.values.isnan().any():  # with sums, the only known fact is that both have some
        return False
    return not torch.equal(one.values, other.values)


def _sum_of_odd(one: Digest | None, other: Digest | None) -> Digest | None:
    """The values that are not finite in the sum of two gradients.

    NaN stays NaN, an infinity stays what it is, and two different ones are NaN. Sums of such marks are no marks of the
    sum; where only sums are kept, the result is marked as unknown, by NaN.
    """
    if one is None or other is None:
        return other if one is None else one
    a, b = one.values, other.values
    if not one.is_whole:
        return dataclasses.replace(one, values=torch.full_like(a, torch.nan))
    marks = torch.where(a == 0, b, torch.where((b == 0) | (a == b), a, 1.0))
    return dataclasses.replace(one, values=marks, norm=_norm(marks))


def _norm(values: torch.Tensor) -> float:
    found: float = torch.linalg.vector_norm(values, dtype=torch.float64).item() if values.numel() else 0.0
    return found


def _summed(gradient: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The sums of a gradient's values, and their norm.

    The factor of a value is the product of a row factor and a column factor, where rows are pieces of 4096
    values: so a sum is two matrix products, and few factors are drawn.
    """
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
    """Random numbers with mean 0 and variance 1, always the same ones."""
    made = torch.rand((count, _SUMS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.sub_(0.5).mul_(12**0.5)
