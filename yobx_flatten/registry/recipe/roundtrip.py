"""Check that an object is equal after flatten and unflatten, for the option ``f_check`` and for ``check_recipe``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ...core.private_names.of_torch import TorchDispatchMode, get_node_type, pop_mode, push_mode, pytree
from ...errors import RoundTripError, StaticDataError, describe_class
from ...errors.failures import raised_as, result_or
from .contract import UNSET, Recipe, hashable, held_attributes, is_derived


def check_round_trip(recipe: Recipe, sample: object) -> None:
    name = recipe.cls.__qualname__
    if type(sample) is not recipe.cls:
        raise RoundTripError(f"{name}: f_check must return a {name} for a test, not a {type(sample).__qualname__}.")
    for check in CHECKS.values():
        check(recipe, sample)


def _check_no_tensors_in_static(recipe: Recipe, sample: object) -> None:
    _, static = _flatten(recipe, sample)
    numpy = sys.modules.get("numpy")
    arrays = (torch.Tensor,) if numpy is None else (torch.Tensor, numpy.ndarray)
    left, seen = [static], set()
    while left:
        value = left.pop()
        if isinstance(value, arrays):
            raise RoundTripError(
                f"{recipe.cls.__qualname__}: its tree spec cannot be stored in a saved program: Static data holds "
                f"{describe_class(value)}, which cannot be stored with a tree spec. Flatten the value as a "
                "child if it changes between calls; otherwise store it as strings or numbers."
            )
        if isinstance(value, (list, tuple, set, frozenset, dict)) and id(value) not in seen:
            seen.add(id(value))
            left += [*value, *value.values()] if isinstance(value, dict) else value


def _check_keys(recipe: Recipe, sample: object) -> None:
    name = recipe.cls.__qualname__
    children, static = _flatten(recipe, sample)
    keyed, keyed_static = _pair(name, "f_flatten_with_keys", recipe.flatten_with_keys(sample))
    if not all(isinstance(item, tuple) and len(item) == 2 for item in keyed):
        raise RoundTripError(f"{name}: f_flatten_with_keys must return (list of (key, child) pairs, static part).")
    for key, _ in keyed:
        if not isinstance(key, (pytree.MappingKey, pytree.GetAttrKey, pytree.SequenceKey)):
            raise RoundTripError(
                f"{name}: f_flatten_with_keys returns the key {key!r}, which torch.export does not know. Use a key "
                f"class of torch.utils._pytree:\n    return [(GetAttrKey({str(key)!r}), obj.{key}), ...], static"
            )
    if not _same([child for _, child in keyed], children) or not _equal(keyed_static, static):
        raise RoundTripError(
            f"{name}: f_flatten and f_flatten_with_keys disagree.\n"
            f"  f_flatten:           {len(children)} children, static {static!r}\n"
            f"  f_flatten_with_keys: {len(keyed)} children, static {keyed_static!r}"
        )


def _check_rebuilt(recipe: Recipe, sample: object) -> None:
    name, cls = recipe.cls.__qualname__, recipe.cls
    children, static = _flatten(recipe, sample)
    rebuilt = recipe.unflatten(list(children), static)
    if type(rebuilt) is not cls:
        raise RoundTripError(f"{name}: f_unflatten returned a {type(rebuilt).__qualname__} instead of a {name}.")
    children_again, static_again = _flatten(recipe, rebuilt)
    if not _same(children_again, children):
        difference = f"{len(children_again)} instead of {len(children)}"
        if len(children_again) == len(children):
            pairs = enumerate(zip(children_again, children, strict=True))
            index = next((i for i, (a, b) in pairs if not _same([a], [b])), 0)
            difference = f"child {index} is not the original {type(children[index]).__qualname__}"
        raise RoundTripError(
            f"{name}: the rebuilt object has different children than the original ({difference}). f_unflatten must "
            "take the children in the order in which f_flatten returns them, and not copy them."
        )
    if not _equal(static_again, static):
        raise RoundTripError(
            f"{name}: the rebuilt object has a different static part than the original.\n  original: {static!r}\n  "
            f"rebuilt:  {static_again!r}"
        )
    after = held_attributes(rebuilt)
    for attribute, value in held_attributes(sample).items():
        found = after.get(attribute, UNSET if value is not None else None)
        is_computed_again = found is UNSET and is_derived(cls, attribute, value)
        if not is_computed_again and not _unchanged(value, found, set()):
            raise RoundTripError(
                f"{name}: attribute {attribute!r} is not restored, because it is neither a child nor static data. "
                f"Declare the attribute as a field, or as a child:\n    register({name}, children=[..., {attribute!r}])"
            )


def _check_no_tensors_made(recipe: Recipe, sample: object) -> None:
    """Raise an error if unflatten creates a tensor, which would become a constant of a traced program."""
    # torch's `run_decompositions` does not find such a constant: https://github.com/pytorch/pytorch/issues/179555
    children, static = _flatten(recipe, sample)
    recorder = _OperatorLog()
    # `with recorder:` also sets a flag of the process, which stays set if two threads do so at the same time
    # (torch.utils._python_dispatch, torch 2.13)
    push_mode(recorder)
    try:
        recipe.unflatten(list(children), static)
    finally:
        pop_mode()
    if recorder.operators:
        raise RoundTripError(
            f"{recipe.cls.__qualname__}: f_unflatten must not make tensors, but calls {', '.join(recorder.operators)}. "
            "Exports store new tensors as constants. Let f_flatten return them as children, or make them in the model."
        )


def _check_placeholders(recipe: Recipe, sample: object) -> None:
    """Raise an error if unflatten fails for placeholders, which torch.export and JAX pass as children."""
    children, static = _flatten(recipe, sample)
    placeholders = [child if get_node_type(child) in pytree.SUPPORTED_NODES else object() for child in children]

    def failure(error: Exception) -> RoundTripError:
        return RoundTripError(
            f"{recipe.cls.__qualname__}: f_unflatten fails with placeholders, which torch.export and JAX pass as "
            f"children ({type(error).__name__}: {error}). f_unflatten must store the children without reading them; "
            "f_flatten can store computed values in the static part."
        )

    with raised_as(failure):
        recipe.unflatten(placeholders, static)


def _check_hashable(recipe: Recipe, sample: object) -> None:
    _, static = _flatten(recipe, sample)
    try:
        hashable(static)
    except StaticDataError as error:
        raise RoundTripError(f"{recipe.cls.__qualname__}: {error}") from error


def _check_stored(recipe: Recipe, sample: object) -> None:
    name = recipe.cls.__qualname__
    spec = pytree.tree_structure(sample)
    with raised_as(lambda error: RoundTripError(f"{name}: its tree spec cannot be stored in a saved program: {error}")):
        stored = pytree.treespec_loads(pytree.treespec_dumps(spec))
    if stored != spec:
        raise RoundTripError(
            f"{name}: its tree spec changes when it is stored and loaded, so a loaded program fails.\n  before: {spec}"
            f"\n  after:  {stored}"
        )


def _check_cpp(recipe: Recipe, sample: object) -> None:
    cxx = sys.modules.get("torch.utils._cxx_pytree")
    if cxx is not None and not _same(cxx.tree_leaves(sample), pytree.tree_leaves(sample)):
        name = recipe.cls.__qualname__
        raise RoundTripError(f"{name}: torch's C++ and Python pytree flatten it differently. Register it only once.")


CHECKS: dict[str, Callable[[Recipe, Any], None]] = {
    "no tensors in the static part": _check_no_tensors_in_static,
    "keyed equals plain": _check_keys,
    "comes back the same": _check_rebuilt,
    "unflatten makes no tensors": _check_no_tensors_made,
    "placeholders are accepted": _check_placeholders,
    "the spec can be stored": _check_stored,
    "the static part hashes": _check_hashable,
    "C++ agrees with Python": _check_cpp,
}


def _flatten(recipe: Recipe, obj: object) -> tuple[list[Any], Any]:
    return _pair(recipe.cls.__qualname__, "f_flatten", recipe.flatten(obj))


def _pair(name: str, function: str, result: object) -> tuple[list[Any], Any]:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], (list, tuple)):
        return list(result[0]), result[1]
    raise RoundTripError(
        f"{name}: {function} must return a pair (list of children, static part), found {type(result).__qualname__}"
        f"{' of ' + str(len(result)) if isinstance(result, (tuple, list)) else ''}.\n"
        "    return [obj.a, obj.b], None"
    )


def _unchanged(before: Any, after: Any, seen: set[int]) -> bool:
    """Return whether two values are equal; objects without ``__eq__`` are compared by their attributes."""
    if before is after or id(before) in seen:
        return True
    if type(before) is not type(after) or isinstance(before, torch.Tensor):
        return False
    seen.add(id(before))
    if isinstance(before, (list, tuple)):
        pairs = zip(before, after, strict=False)
        return len(before) == len(after) and all(_unchanged(one, other, seen) for one, other in pairs)
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(_unchanged(before[key], after[key], seen) for key in before)
    compares: object = type(before).__eq__
    if compares is not object.__eq__:
        return _equal(before, after)
    held, kept = held_attributes(before), held_attributes(after)
    return all(
        _unchanged(value, kept.get(name, UNSET), seen)
        for name, value in held.items()
        if name in kept or not is_derived(type(before), name, value)
    )


class _OperatorLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch annotates it no further
        self.operators: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[f"torch.ops.{func}"] = None
        return func(*args, **(kwargs or {}))


def _same(left: list[Any], right: list[Any]) -> bool:
    """Return whether two lists have the same pytree leaves; a copy of a tensor counts as different."""
    left_leaves, left_spec = pytree.tree_flatten(left)
    right_leaves, right_spec = pytree.tree_flatten(right)
    # an equal copy of a tensor would lose the dynamic shapes of a trace
    return left_spec == right_spec and all(
        a is b or (not isinstance(a, torch.Tensor) and _equal(a, b))
        for a, b in zip(left_leaves, right_leaves, strict=True)
    )


def _equal(left: object, right: object) -> bool:
    # a user's __eq__ can raise any error; then the values are not equal
    return result_or(lambda: left is right or bool(left == right), lambda error: False)
