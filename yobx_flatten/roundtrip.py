"""Does an object come back from flatten and unflatten as it went in? The check behind ``f_check``."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.utils._pytree as pytree

from .errors import RoundTripError
from .recipe import Recipe

__all__ = ["check_round_trip"]


def check_round_trip(recipe: Recipe, sample: Any) -> None:
    """Flatten, unflatten and flatten again, with every function of the recipe.

    Args:
        recipe: the recipe to check; it must be in force.
        sample: an instance of its class.

    Raises:
        RoundTripError: naming the class, the function and the difference.
    """
    name, cls = recipe.cls.__qualname__, recipe.cls
    if type(sample) is not cls:
        raise RoundTripError(f"f_check of {name} returned a {type(sample).__qualname__}; return an instance of {name}.")
    children, static = _pair(name, "f_flatten", recipe.flatten(sample))
    keyed, keyed_static = _pair(name, "f_flatten_with_keys", recipe.flatten_with_keys(sample))
    if not all(isinstance(item, tuple) and len(item) == 2 for item in keyed):
        raise RoundTripError(f"{name}: f_flatten_with_keys must return a list of (key, child) pairs first.")
    for key, _ in keyed:
        if not isinstance(key, (pytree.MappingKey, pytree.GetAttrKey, pytree.SequenceKey)):
            raise RoundTripError(
                f"{name}: f_flatten_with_keys gives the key {key!r}, which torch.export does not know; write it with "
                f"torch.utils._pytree:\n    return [(GetAttrKey({str(key)!r}), obj.{key}), ...], static"
            )
    if not _same([child for _, child in keyed], children) or not _equal(keyed_static, static):
        raise RoundTripError(
            f"{name}: f_flatten and f_flatten_with_keys disagree.\n"
            f"  f_flatten:           {len(children)} children, static {static!r}\n"
            f"  f_flatten_with_keys: {len(keyed)} children, static {keyed_static!r}"
        )
    rebuilt = recipe.unflatten(list(children), static)
    if type(rebuilt) is not cls:
        raise RoundTripError(f"{name}: f_unflatten returned a {type(rebuilt).__qualname__} instead of a {name}.")
    children_again, static_again = _pair(name, "f_flatten", recipe.flatten(rebuilt))
    if not _same(children_again, children):
        raise RoundTripError(
            f"{name}: the rebuilt object has other children than the original "
            f"({_difference(children_again, children)}). f_unflatten must "
            "take the children in the order in which f_flatten returns them, and not copy them."
        )
    if not _equal(static_again, static):
        raise RoundTripError(
            f"{name}: the rebuilt object has another static part than the original.\n"
            f"  original: {static!r}\n  rebuilt:  {static_again!r}"
        )
    _check_libraries(name, sample)


def _check_libraries(name: str, sample: Any) -> None:
    """The spec survives storage, and torch's C++ pytree sees the same leaves as its Python one."""
    leaves, spec = pytree.tree_flatten(sample)
    try:
        stored = pytree.treespec_loads(pytree.treespec_dumps(spec))
    except Exception as error:
        raise RoundTripError(f"{name}: its tree spec cannot be stored in a saved program: {error}") from error
    if stored != spec:
        raise RoundTripError(
            f"{name}: its tree spec does not survive torch.export.save.\n  before: {spec}\n  after:  {stored}"
        )
    cxx = sys.modules.get("torch.utils._cxx_pytree")
    if cxx is not None and not _same(cxx.tree_leaves(sample), leaves):
        raise RoundTripError(f"{name}: torch's C++ pytree and its Python pytree see different leaves.")


def _pair(name: str, function: str, result: Any) -> tuple[list[Any], Any]:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], (list, tuple)):
        return list(result[0]), result[1]
    raise RoundTripError(
        f"{name}: {function} must return a pair (list of children, static part), found {type(result).__qualname__}"
        f"{' of ' + str(len(result)) if isinstance(result, (tuple, list)) else ''}.\n"
        f"    return [obj.a, obj.b], None"
    )


def _difference(found: list[Any], expected: list[Any]) -> str:
    """What is wrong with the children that came back, in words."""
    if len(found) != len(expected):
        return f"{len(found)} instead of {len(expected)}"
    pairs = enumerate(zip(found, expected, strict=True))
    index = next((i for i, (a, b) in pairs if not _same([a], [b])), 0)
    return f"child {index} is not the {type(expected[index]).__qualname__} that was taken out"


def _same(left: list[Any], right: list[Any]) -> bool:
    """The same objects: equal is not enough, since a copy loses the dynamic shapes of a trace."""
    left_leaves, left_spec = pytree.tree_flatten(left)
    right_leaves, right_spec = pytree.tree_flatten(right)
    return left_spec == right_spec and all(
        a is b or (not isinstance(a, torch.Tensor) and _equal(a, b))
        for a, b in zip(left_leaves, right_leaves, strict=True)
    )


def _equal(left: Any, right: Any) -> bool:
    try:
        return left is right or bool(left == right)
    except Exception:  # whatever a user's __eq__ raises: static data that does not compare is not equal
        return False
