"""Compare two nested values: structure, classes, types, and the largest difference.

The one comparison of this package. Two leaves are as far apart as their worst element is; what no number can say,
another shape, another type, ``None`` for a tensor, is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import ReplayError, describe_class
from ..errors.tried_versions import without_cause
from ..private_names.of_torch import pytree
from ..recipe.aliases import PyTree
from .spec_diff import compare_specs

__all__ = ["compare_outputs", "is_text", "largest_difference", "share_of_nan", "shares_of_nan"]

_NUMBERS = (bool, int, float, complex)


def compare_outputs(expected: PyTree, found: PyTree, names: Sequence[str]) -> dict[str, float]:
    """Compare nested outputs: their structure with all classes and static parts, then leaf by leaf."""
    # returns: by name, the largest difference; nothing for text, `None` and other leaves that are not numbers, where
    # they are equal
    leaves, spec = pytree.tree_flatten(expected)
    other_leaves, other_spec = pytree.tree_flatten(found)
    if spec != other_spec:
        places = compare_specs(spec, other_spec, name="output", names=("expected", "found"))
        first = " ".join(str(places[0]).split()) if places else f"expected {spec}, found {other_spec}"
        raise ReplayError(f"the outputs have another structure: {first}")
    differences = {}
    for name, one, other in zip(names, leaves, other_leaves, strict=True):
        try:
            if _kind(one) is not _kind(other):
                raise ReplayError(f"expected {_describe(one)}, found {_describe(other)}")
            difference = largest_difference(one, other)
        except ReplayError as error:
            raise ReplayError(f"output {name!r}: {without_cause(error)}") from None
        if isinstance(one, (torch.Tensor, *_NUMBERS)):
            differences[name] = difference
    return differences


def largest_difference(expected: object, found: object) -> float:
    """Compare two leaves: tensors, arrays, numbers, text, ``None``.

    >>> largest_difference(torch.tensor([1, 2**60]), torch.tensor([1, 2**60 + 1]))
    1.0
    >>> largest_difference(torch.tensor([1 + 2j]), torch.tensor([1 + 0j]))
    2.0
    """
    # expected: a leaf. A number has no type of its own, so a tensor without axes may be found in its place.
    # returns: the largest absolute difference of real and imaginary parts, infinite where one of them is NaN and the
    # other is not. Integers are compared exactly, whatever their size.
    if is_text(expected) or is_text(found):
        return _same_text(expected, found)
    if isinstance(expected, _NUMBERS) and isinstance(found, _NUMBERS):
        return _apart(expected, found)
    if not (_is_data(expected) and _is_data(found)):
        if type(expected) is type(found) and (expected is found or bool(expected == found)):
            return 0.0
        raise ReplayError(f"expected {_describe(expected)}, found {_describe(found)}")
    typed = not isinstance(expected, _NUMBERS)
    one, other = _tensor(expected), _tensor(found)
    if one.is_nested or other.is_nested:
        return _components_apart(one, other)
    if one.shape != other.shape:
        raise ReplayError(f"expected shape {tuple(one.shape)}, found {tuple(other.shape)}")
    if typed and one.dtype != other.dtype:
        raise ReplayError(f"expected {one.dtype}, found {other.dtype}")
    return _tensors_apart(one, other)


def shares_of_nan(expected: PyTree, names: Sequence[str]) -> dict[str, float]:
    """Return :func:`share_of_nan` of every output that has elements."""
    shares = zip(names, map(share_of_nan, pytree.tree_leaves(expected)), strict=True)
    return {name: share for name, share in shares if share is not None}


def share_of_nan(expected: object) -> float | None:
    """Return how much of a leaf no comparison can show: NaN equals NaN, whatever was computed before it.

    >>> share_of_nan(torch.tensor([1.0, math.nan])), share_of_nan(torch.tensor([math.nan, math.inf])), share_of_nan(3)
    (0.5, 1.0, 0.0)
    """
    # returns: the share of its elements that are NaN; 1.0 where no element is finite; `None` for a leaf without
    # elements
    if is_text(expected) or not _is_data(expected):
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
    """Return whether a leaf is text, or an array of it."""
    if isinstance(value, (str, torch.Tensor)):
        return isinstance(value, str)
    return getattr(getattr(value, "dtype", None), "kind", "") in ("U", "O")


def _same_text(expected: object, found: object) -> float:
    one, other = (getattr(value, "tolist", lambda value=value: value)() for value in (expected, found))
    if one != other:
        raise ReplayError(f"expected {_describe(expected)}, found {_describe(found)}")
    return 0.0


def _apart(expected: complex, found: complex) -> float:
    """How far two numbers are apart; integers of Python have no largest one."""
    if expected == found or (expected != expected and found != found):
        return 0.0
    difference = float(abs(expected - found))
    return math.inf if difference != difference else difference


def _is_data(value: object) -> bool:
    return isinstance(value, (torch.Tensor, *_NUMBERS)) or (hasattr(value, "__array__") and hasattr(value, "dtype"))


def _tensor(value: object) -> torch.Tensor:
    tensor = torch.as_tensor(value).detach().cpu()
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.is_nested or tensor.layout is torch.strided:
        return tensor
    return tensor.to_dense()


def _components_apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.is_nested is not other.is_nested:
        raise ReplayError(f"expected a {'nested' if one.is_nested else 'plain'} tensor, found the other kind")
    parts, others = one.unbind(), other.unbind()
    if len(parts) != len(others):
        raise ReplayError(f"expected {len(parts)} components, found {len(others)}")
    return max(map(largest_difference, parts, others), default=0.0)


def _tensors_apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.numel() == 0:
        return 0.0
    if one.is_complex() or other.is_complex():
        wide = [torch.view_as_real(tensor.to(torch.complex128).resolve_conj()) for tensor in (one, other)]
        return _tensors_apart(*wide)
    try:
        differ = one != other
        left, right = one.double(), other.double()
    except (RuntimeError, NotImplementedError):  # types of less than 8 bits have no arithmetic: bit by bit
        return 0.0 if torch.equal(one.view(torch.uint8), other.view(torch.uint8)) else math.inf
    differ &= ~(left.isnan() & right.isnan())
    if not differ.any():
        return 0.0
    worst = (left - right).abs()[differ].max().item()  # inf - inf is nan, and no difference
    if worst != worst:
        return math.inf
    # 64-bit integers that a double cannot distinguish differ by 1 at least
    return max(worst, 1.0) if not one.is_floating_point() and not other.is_floating_point() else worst


def _kind(leaf: object) -> type:
    return torch.Tensor if isinstance(leaf, torch.Tensor) else type(leaf)


def _describe(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {tuple(leaf.shape)}, {leaf.dtype}"
    return describe_class(leaf)
