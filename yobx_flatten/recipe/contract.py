"""The functions that flatten and unflatten a class."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias, is_typeddict

import torch

from ..errors import InvalidRegistrationError, describe_class
from ..private_names.of_torch import KeyEntry, SequenceKey, is_namedtuple_class

Flatten: TypeAlias = Callable[[Any], tuple[list[Any], Any]]
FlattenWithKeys: TypeAlias = Callable[[Any], tuple[list[tuple[KeyEntry, Any]], Any]]
Unflatten: TypeAlias = Callable[[Iterable[Any], Any], Any]


class FlattenFunctions(NamedTuple):
    """The three functions of one class, by name or in this order; ``register_class_flattening`` takes them as one."""

    flatten: Flatten
    flatten_with_keys: FlattenWithKeys
    unflatten: Unflatten


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How instances of one class are flattened and unflattened."""

    cls: type  # the class, exactly: subclasses need a recipe of their own
    flatten: Flatten  # `obj -> (children, static)`
    unflatten: Unflatten  # `(children, static) -> obj`
    flatten_with_keys: FlattenWithKeys  # `obj -> ([(key, child), ...], static)`
    name: str  # the name stored in saved programs; unique and stable across versions
    remedy: str  # the line a user types to have the class registered; part of error messages
    # `key -> {axis: meaning}` of a leaf, for the axes that vary between calls (`{0: "batch"}`); `None` when nothing is
    # known, and every axis may vary
    axes: Callable[[str], dict[int, str] | None] | None = None
    # `(key, name of what is below it) -> name` of a leaf in an exported graph; `None` joins them by dots
    label: Callable[[str, str], str] | None = None
    # whether the static part is stored as torch stores it by itself, as the suspended registration does, so that a
    # program that was saved under one of them loads under the other
    plain_static: bool = False

    @classmethod
    def from_functions(
        cls,
        target: type,
        flatten: Flatten,
        unflatten: Unflatten,
        flatten_with_keys: FlattenWithKeys | None,
        *,
        remedy: str | None = None,
    ) -> Recipe:
        """Check the functions a user gave and make a recipe of them."""
        require_class(target)
        require_callable(target, "f_flatten", flatten, 1)
        require_callable(target, "f_unflatten", unflatten, 2)
        if flatten_with_keys is None:
            flatten_with_keys = _with_positions(flatten)
        else:
            require_callable(target, "f_flatten_with_keys", flatten_with_keys, 1)
        qualified = f"{target.__module__}.{target.__qualname__}"
        return cls(
            target,
            flatten,
            unflatten,
            flatten_with_keys,
            f"yobx_flatten:{qualified}",
            remedy or f"register_class_flattening({target.__qualname__}, ...)",
        )

    def same_functions(self, other: Recipe) -> bool:
        """Return whether both recipes do the same, so that registering one after the other changes nothing."""
        mine, theirs = (self.flatten, self.unflatten, _given(self)), (other.flatten, other.unflatten, _given(other))
        return all(map(_same_function, mine, theirs))

    @property
    def has_keys(self) -> bool:
        """Whether the author named the children; they are numbered otherwise."""
        return _given(self) is not None


def require_class(target: object, function: str = "register_class_flattening") -> None:
    """Refuse what is not a class, with the line to type."""
    if isinstance(target, type):
        return
    hint = f" Did you mean type(obj), the class {type(target).__qualname__}?" if target is not None else ""
    if isinstance(target, str):
        hint = " Pass the class, not its name."
    raise InvalidRegistrationError(
        f"{function}: expected a class as first argument, found {describe_class(target)}.{hint}\n"
        f"    {function}(MyClass, ...)"
    )


def require_node(target: object, function: str) -> None:
    """Refuse what is not a class, and classes that are nodes, or never are, whatever is registered."""
    require_class(target, function)
    cls: Any = target
    start = f"{function}: {describe_class(cls)} is "
    if is_namedtuple_class(cls):
        raise InvalidRegistrationError(
            f"{start}a named tuple, which torch, optree and JAX flatten by themselves, whatever is registered. Only "
            "torch.export.save wants a name for it:\n"
            f'    torch.utils._pytree._register_namedtuple({cls.__qualname__}, serialized_type_name="...")'
        )
    if is_typeddict(cls):
        raise InvalidRegistrationError(
            f"{start}a TypedDict, whose instances are plain dicts: torch, optree and JAX flatten them as they are."
        )
    if is_constant_class(cls):
        raise InvalidRegistrationError(
            f"{start}an enum or a class like it: each of its constants exists once, and a rebuilt one would be a "
            "second. Make it static data of the object that holds it:\n"
            f'    mode: {cls.__qualname__} = dataclasses.field(metadata={{"static": True}})'
        )


def is_constant_class(cls: type) -> bool:
    """Return whether a class is that of an enum, or of dtypes, devices and the like: static data, never a node."""
    return issubclass(cls, (enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format))


def require_callable(
    target: type,
    argument: str,
    function: object,
    arity: int,
    *,
    caller: str = "register_class_flattening",
    needed: str | None = None,
) -> None:
    """Refuse a function that cannot take the arguments it will be called with."""
    needed = needed or ("()", "(obj)", "(children, static)")[arity]
    if not callable(function):
        raise InvalidRegistrationError(
            f"{caller}({target.__qualname__}): {argument} must be a function {needed}, found "
            f"{describe_class(function)}."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins such as `list` have no signature to check
        return
    try:
        signature.bind(*range(arity))
    except TypeError as error:
        raise InvalidRegistrationError(
            f"{caller}({target.__qualname__}): {argument} is called as f{needed}, but its signature "
            f"is {signature} ({error})."
        ) from None


def _same_function(one: object, other: object) -> bool:
    # not `==` for everything: the registry asks while it holds its lock, and a callable object can define `__eq__`
    return one is other or (isinstance(one, types.MethodType) and one == other)


def _given(recipe: Recipe) -> FlattenWithKeys | None:
    """The keyed function the author gave, ``None`` for keys by position."""
    return (
        None
        if getattr(recipe.flatten_with_keys, "__name__", "") == "flatten_with_positions"
        else recipe.flatten_with_keys
    )


def _with_positions(flatten: Flatten) -> FlattenWithKeys:
    """Key paths by position, for classes whose author gave none."""

    def flatten_with_positions(obj: object) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        children, static = flatten(obj)
        return [(SequenceKey(i), child) for i, child in enumerate(children)], static

    return flatten_with_positions
