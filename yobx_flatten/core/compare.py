"""Compare computed values with expected values, and decide whether rounding explains the difference."""

# The table lists the tolerances of both packages. A rounding is the machine epsilon of the dtype.
#
# =========  ==========================================  ==================  ===========  ===========  ======
# kind       measure                                     float32, float64    float16      bfloat16     reason
# =========  ==========================================  ==================  ===========  ===========  ======
# file       largest difference                          1e-4                6e-2         2e-1         1
# layers     norm of the difference / norm of expected   1e-6 at least       4 roundings  4 roundings  2
# gradients  as layers                                   10 times as much    the same     the same     3
# sums       each difference / size of its element       1e-4                3e-2         1e-1         4
# kernels    largest difference / largest expected       64 roundings        the same     the same     5
# rows       largest difference / largest expected       1e-3                3e-2         1.5e-1       6
# =========  ==========================================  ==================  ===========  ===========  ======
#
# 1. Different kernels compute in a different order, and each layer adds rounding errors. For 316 model types with
#    random weights, outputs of exported files and models differ by less than the tolerance.
# 2. The same kernels run in a different program, such as a split model; 1e-6 is about 8 roundings of float32.
# 3. If a parameter is used several times, the terms of its gradient are added in a different order.
# 4. The same terms are added in a different order and grouping, such as the losses of the microbatches of a batch.
# 5. The same kernels run on the same numbers in one ONNX file.
# 6. The rows of a batch are computed in one batch or in smaller batches: kernels differ, and layers amplify rounding.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch

from ..errors import ReplayError, describe_class
from .private_names.of_torch import pytree

Kind: TypeAlias = Literal["file", "layers", "gradients", "sums", "kernels", "rows"]

WEIGHT_TYPES = ("float32", "float64", "float16", "bfloat16")
"""Dtypes of weights for which the kind ``file`` has a tolerance."""

_NUMBERS = (bool, int, float, complex)

# By kind: for 32 bits and more, float16, bfloat16.
_ABSOLUTE: dict[Kind, tuple[float, float, float]] = {
    "file": (1e-4, 6e-2, 2e-1),
    "sums": (1e-4, 3e-2, 1e-1),
    "rows": (1e-3, 3e-2, 1.5e-1),
}


class Comparison(NamedTuple):
    """The difference of two values and the allowed difference; ``bool()`` is true if the difference is allowed."""

    difference: float
    allowed: float

    def __bool__(self) -> bool:
        return self.difference <= self.allowed  # false for NaN


def compare(expected: object, found: object, kind: Kind) -> Comparison:
    """Compare two values. ``kind``, such as ``"file"``, chooses how the difference is measured, and the tolerance."""
    allowed = tolerance(kind, *([expected.dtype] if isinstance(expected, torch.Tensor) else []))
    if kind == "file" or not (isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor)):
        try:
            return Comparison(largest_difference(expected, found), allowed)
        except ReplayError:  # another shape, type or text
            return Comparison(math.inf, allowed)
    if expected.shape != found.shape:
        return Comparison(math.inf, allowed)
    if kind in ("layers", "gradients"):
        return Comparison(relative_difference(expected, found), allowed)
    one, other = (tensor.detach().cpu().double() for tensor in (expected, found))
    finite = one[one.isfinite()].abs()
    size = one.abs() + 1e-2 if kind == "sums" else finite.max() if finite.numel() else one.new_zeros(())
    apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs() / size)
    return Comparison(apart.nan_to_num(torch.inf).max().item() if apart.numel() else 0.0, allowed)


def tolerance(kind: Kind, *types: torch.dtype | str) -> float:
    """Return the difference that :func:`compare` allows for a ``kind`` and the least precise of the given dtypes."""
    given = (getattr(torch, one, None) if isinstance(one, str) else one for one in types)
    floats = [one for one in given if isinstance(one, torch.dtype) and one.is_floating_point]
    if kind in _ABSOLUTE:
        usual, half, brain = _ABSOLUTE[kind]
        return max(({torch.float16: half, torch.bfloat16: brain}.get(one, usual) for one in floats), default=usual)
    coarsest = max((torch.finfo(one).eps for one in floats), default=0.0)
    if kind == "kernels":
        return 64 * coarsest
    of_layers = max(1e-6, 8 * coarsest) if coarsest < 1e-6 else 4 * coarsest
    return of_layers if kind == "layers" else 10 * of_layers


def relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the norm of the difference of two tensors divided by the norm of ``expected``; NaN is equal to NaN."""
    expected, found = (torch.where(expected.isnan() & found.isnan(), 0.0, one) for one in (expected, found))
    difference: float = (found - expected).norm().item() / max(expected.norm().item(), 1e-30)
    return difference


def largest_difference(expected: object, found: object) -> float:
    """Return the largest absolute difference between two values, or infinity if an element of only one value is NaN."""
    # expected: a leaf; a Python number may be compared with a 0-d tensor of any dtype
    if is_text(expected) or is_text(found):
        text, other_text = (getattr(value, "tolist", lambda value=value: value)() for value in (expected, found))
        if text != other_text:
            raise ReplayError(f"expected {describe_leaf(expected)}, found {describe_leaf(found)}")
        return 0.0
    if isinstance(expected, _NUMBERS) and isinstance(found, _NUMBERS):
        if expected == found or (expected != expected and found != found):
            return 0.0
        difference = float(abs(expected - found))  # exact for integers of any size
        return math.inf if difference != difference else difference
    if not (is_data(expected) and is_data(found)):
        if type(expected) is type(found) and (expected is found or bool(expected == found)):
            return 0.0
        raise ReplayError(f"expected {describe_leaf(expected)}, found {describe_leaf(found)}")
    typed = not isinstance(expected, _NUMBERS)
    one, other = _tensor(expected), _tensor(found)
    if one.is_nested or other.is_nested:
        if one.is_nested is not other.is_nested:
            raise ReplayError(f"expected a tensor with is_nested={one.is_nested}, found is_nested={other.is_nested}")
        parts, others = one.unbind(), other.unbind()
        if len(parts) != len(others):
            raise ReplayError(f"expected {len(parts)} components, found {len(others)}")
        return max(map(largest_difference, parts, others), default=0.0)
    if one.shape != other.shape:
        raise ReplayError(f"expected shape {tuple(one.shape)}, found {tuple(other.shape)}")
    if typed and one.dtype != other.dtype:
        raise ReplayError(f"expected {one.dtype}, found {other.dtype}")
    return _tensors_apart(one, other)


def shares_of_nan(expected: object, names: Sequence[str]) -> dict[str, float]:
    """Return the share of NaN elements in each output, by output name; outputs without elements are omitted."""
    shares = zip(names, map(share_of_nan, pytree.tree_leaves(expected)), strict=True)
    return {name: share for name, share in shares if share is not None}


def share_of_nan(expected: object) -> float | None:
    """Return a tensor's share of NaN elements, or 1.0 if no element is finite; ``None`` for text and empty tensors."""
    # comparisons do not detect NaN, which counts as equal to NaN
    if is_text(expected) or not is_data(expected):
        return None
    if isinstance(expected, int):  # of any size
        return 0.0
    try:
        tensor = _tensor(expected)
        if tensor.is_nested:
            tensor = torch.cat([part.flatten() for part in tensor.unbind()])
        tensor = tensor if tensor.is_complex() else tensor.double()
    except (RuntimeError, NotImplementedError):  # types of less than 8 bits
        return 0.0
    if not tensor.numel():
        return None
    return tensor.isnan().sum().item() / tensor.numel() if tensor.isfinite().any() else 1.0


def is_text(value: object) -> bool:
    if isinstance(value, (str, torch.Tensor)):
        return isinstance(value, str)
    return getattr(getattr(value, "dtype", None), "kind", "") in ("U", "O")


def is_data(value: object) -> bool:
    return isinstance(value, (torch.Tensor, *_NUMBERS)) or (hasattr(value, "__array__") and hasattr(value, "dtype"))


def _tensor(value: object) -> torch.Tensor:
    tensor = torch.as_tensor(value).detach().cpu()
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.is_nested or tensor.layout is torch.strided else tensor.to_dense()


def _tensors_apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.numel() == 0:
        return 0.0
    if one.is_complex() or other.is_complex():
        wide = [torch.view_as_real(tensor.to(torch.complex128).resolve_conj()) for tensor in (one, other)]
        return _tensors_apart(*wide)
    try:
        differ = one != other
        left, right = one.double(), other.double()
    except (RuntimeError, NotImplementedError):  # types of less than 8 bits have no arithmetic: compare bits
        return 0.0 if torch.equal(one.view(torch.uint8), other.view(torch.uint8)) else math.inf
    differ &= ~(left.isnan() & right.isnan())
    if not differ.any():
        return 0.0
    worst = (left - right).abs()[differ].max().item()  # inf - inf is nan, but the two are equal
    if worst != worst:
        return math.inf
    # 64-bit integers that a double cannot distinguish differ by 1 at least
    return max(worst, 1.0) if not one.is_floating_point() and not other.is_floating_point() else worst


def describe_leaf(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {tuple(leaf.shape)}, {leaf.dtype}"
    return describe_class(leaf)
