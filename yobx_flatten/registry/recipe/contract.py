"""Types of the functions that flatten and unflatten a class, and checks of classes and static data."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from types import MemberDescriptorType
from typing import Any, NamedTuple, TypeAlias, is_typeddict

import torch

from ...core.private_names.of_torch import KeyEntry, SequenceKey, is_namedtuple_class
from ...errors import InvalidRegistrationError, RoundTripError, StaticDataError, describe_class
from .aliases import Static

Flatten: TypeAlias = Callable[[Any], tuple[list[Any], Any]]
FlattenWithKeys: TypeAlias = Callable[[Any], tuple[list[tuple[KeyEntry, Any]], Any]]
Unflatten: TypeAlias = Callable[[Iterable[Any], Any], Any]


class FlattenFunctions(NamedTuple):
    """The flatten, flatten_with_keys and unflatten functions of a class, for ``register_class_flattening``."""

    flatten: Flatten
    flatten_with_keys: FlattenWithKeys
    unflatten: Unflatten


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """The registration of a class: functions that flatten and unflatten its instances, and its name in saved files."""

    cls: type  # the class, exactly: subclasses need their own recipe
    flatten: Flatten  # `obj -> (children, static)`
    unflatten: Unflatten  # `(children, static) -> obj`
    flatten_with_keys: FlattenWithKeys  # `obj -> ([(key, child), ...], static)`
    name: str  # the name stored in saved programs; unique and stable across versions
    remedy: str  # the line a user types to have the class registered; part of error messages
    # `key -> {axis: meaning}` for the axes of a leaf that vary between calls (`{0: "batch"}`). If the function or its
    # result is `None`, every axis may vary.
    axes: Callable[[str], dict[int, str] | None] | None = None
    # `(key, name below the key) -> name` of a leaf in an exported graph; `None` joins the two by a dot
    label: Callable[[str, str], str] | None = None
    # whether the static part is stored in torch's default form: a program that was saved under the registration of
    # another library then loads under this recipe, and vice versa
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
        require_class(target)
        require_callable(target, "f_flatten", flatten, 1)
        require_callable(target, "f_unflatten", unflatten, 2)
        if flatten_with_keys is None:
            flatten_with_keys = with_positions(flatten)
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
        mine, theirs = (
            (recipe.flatten, recipe.unflatten, recipe.flatten_with_keys if recipe.has_keys else None)
            for recipe in (self, other)
        )
        # not always `==`: the registry calls this under its lock, and a callable object can define `__eq__`
        return all(
            one is other or (isinstance(one, types.MethodType) and one == other)
            for one, other in zip(mine, theirs, strict=True)
        )

    @property
    def has_keys(self) -> bool:
        """Whether a ``flatten_with_keys`` function was registered for the class."""
        return getattr(self.flatten_with_keys, "__name__", "") != "flatten_with_positions"


def require_class(target: object, function: str = "register_class_flattening") -> None:
    if isinstance(target, type):
        return
    is_builtin = type(target).__module__ in ("builtins", "types", "typing")
    hint = "" if is_builtin else f" Did you mean type(obj), the class {type(target).__qualname__}?"
    if isinstance(target, str):
        hint = " Pass the class, not its name."
    raise InvalidRegistrationError(
        f"{function}: expected a class as first argument, found {describe_class(target)}.{hint}\n"
        f"    {function}(MyClass, ...)"
    )


def require_node(target: object, function: str) -> None:
    """Raise an error if ``target`` is not a class, or is a class that cannot be registered, such as an enum."""
    require_class(target, function)
    cls: Any = target
    start = f"{function}: {describe_class(cls)} is "
    if is_namedtuple_class(cls):
        raise InvalidRegistrationError(
            f"{start}a named tuple, which torch, optree and JAX flatten without a registration. Only torch.export.save "
            "needs a name for the class:\n"
            f'    torch.utils._pytree._register_namedtuple({cls.__qualname__}, serialized_type_name="...")'
        )
    if is_typeddict(cls):
        raise InvalidRegistrationError(
            f"{start}a TypedDict, whose instances are plain dicts: torch, optree and JAX flatten them without a "
            "registration."
        )
    if is_constant_class(cls):
        raise InvalidRegistrationError(
            f"{start}an enum or a similar class: each of its constants exists once, and must not be rebuilt. Make the "
            "value static data of the object that holds it:\n"
            f'    mode: {cls.__qualname__} = dataclasses.field(metadata={{"static": True}})'
        )


def is_constant_class(cls: type) -> bool:
    """Return whether instances of a class, such as enum members, dtypes and devices, are always static data."""
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
    needed = needed or ("()", "(obj)", "(children, static)")[arity]
    if not callable(function):
        raise InvalidRegistrationError(
            f"{caller}({target.__qualname__}): {argument} must be a function f{needed}, found "
            f"{describe_class(function)}."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins such as `list` have no signature
        return
    try:
        signature.bind(*range(arity))
    except TypeError as error:
        line = f"{caller}({target.__qualname__}, functions)"
        remedy = f" Pass the result of functions_from_fields as one argument:\n    {line}" if arity == 2 else ""
        raise InvalidRegistrationError(
            f"{caller}({target.__qualname__}): {argument} is called as f{needed}, but its signature is {signature} "
            f"({error}).{remedy}"
        ) from None


def with_positions(flatten: Flatten) -> FlattenWithKeys:
    def flatten_with_positions(obj: object) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        children, static = flatten(obj)
        return [(SequenceKey(i), child) for i, child in enumerate(children)], static

    return flatten_with_positions


UNSET = object()  # marks an attribute that is not set


def slots_of(cls: type) -> list[str]:
    """Return the names of the ``__slots__`` of a class and its bases, beginning with the bases."""
    found = []
    for base in reversed(cls.__mro__):
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in dict.fromkeys(found) if name not in ("__weakref__", "__dict__")]


def held_attributes(obj: object) -> dict[str, Any]:
    """Return the attributes in ``__dict__`` and slots of an instance by name, without running code of its class."""
    cls, held = type(obj), dict[str, Any]()
    for name in slots_of(cls):
        descriptor = inspect.getattr_static(cls, name, None)
        if type(descriptor) is MemberDescriptorType:
            with contextlib.suppress(AttributeError):  # never set
                held[name] = descriptor.__get__(obj, cls)
    stored = getattr(obj, "__dict__", {})
    # the items of a dict with `self.__dict__ = self` are not attributes
    return held | ({} if stored is obj else dict(stored))


def is_derived(cls: type, name: str, value: object) -> bool:
    """Return whether flatten may drop an attribute, because a class attribute or cached property has its value."""
    of_class = inspect.getattr_static(cls, name, UNSET)
    # typing stores the parameters of a generic class in this attribute
    return name == "__orig_class__" or of_class is value or isinstance(of_class, functools.cached_property)


def undeclared_check(cls: type, declared: Collection[str]) -> Callable[[Any], None] | None:
    """Return a function that refuses instances with undeclared attributes; ``None`` if no instance can have any."""
    more_slots = set(slots_of(cls)) - set(declared)
    if cls.__dictoffset__ == 0 and not more_slots:
        return None
    known = frozenset(declared)
    of_class = {name: inspect.getattr_static(cls, name, UNSET) for name in declared}
    properties = frozenset(name for name, found in of_class.items() if hasattr(type(found), "__set__"))

    def undeclared(obj: object) -> None:
        held = held_attributes(obj)
        lost = [name for name, value in held.items() if name not in known and not is_derived(cls, name, value)]
        if lost and properties:  # their setters may set further attributes
            made: Any = object.__new__(cls)
            for name in properties:
                setattr(made, name, getattr(obj, name))
            behind = held_attributes(made)
            lost = [name for name in lost if behind.get(name, UNSET) is not held[name]]
        if lost:
            present = sorted(name for name in known if name in held or hasattr(cls, name))
            raise lost_attribute(cls, lost[-1], [*present, *lost[:-1]])

    if more_slots:
        return undeclared
    stored = known - properties
    # when all attributes are in `__dict__`, equal counts mean equal names
    compares_names = hasattr(cls, "__getattr__") or any(found is not UNSET for found in of_class.values())

    def check(obj: Any) -> None:
        held = obj.__dict__
        if (held.keys() != stored) if compares_names else (len(held) != len(stored)):
            undeclared(obj)

    return check


def lost_attribute(cls: type, name: str, declared: Collection[str] | Iterator[str]) -> RoundTripError:
    return RoundTripError(
        f"{cls.__qualname__}: an instance has the attribute {name!r}, which is not declared for {describe_class(cls)}, "
        "so it would be lost. Declare it as a field, or register the class with it (static data in static=[...]):\n"
        f"    register({cls.__qualname__}, children={[*declared, name]})"
    )


class HeldStatic:
    """A wrapper that makes static data hashable, because JAX hashes and compares static data at every call."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Static) -> None:
        self.value = own_copy(value)
        self._hash = _hash(self.value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return type(other) is HeldStatic and self._hash == other._hash and bool(self.value == other.value)

    def __repr__(self) -> str:
        return repr(self.value)


def hashable(static: Static) -> Static:
    try:
        hash(static)
    except TypeError:
        return HeldStatic(static)
    return static


def original(static: Static) -> Static:
    """Undo :func:`hashable`: return a copy of wrapped static data, or the given static data if it is not wrapped."""
    return own_copy(static.value) if type(static) is HeldStatic else static


def own_copy(value: Static) -> Static:
    """Return a copy of static data with new lists, dicts and sets at every level."""
    kind = type(value)
    if kind is list:
        return [own_copy(item) for item in value]
    if kind is tuple:
        items = [own_copy(item) for item in value]
        return value if all(map(operator.is_, items, value)) else tuple(items)
    if kind is dict:
        return {key: own_copy(item) for key, item in value.items()}
    if kind is OrderedDict:
        return OrderedDict([(key, own_copy(item)) for key, item in value.items()])
    return set(value) if kind is set else value


def _hash(value: Static) -> int:
    kind = type(value)
    if kind is list or kind is tuple:
        return hash((kind, *map(_hash, value)))
    if kind is dict:  # equal dicts can differ in order
        return hash(frozenset((key, _hash(item)) for key, item in value.items()))
    if kind is set:
        return hash(frozenset(value))
    if kind is slice:  # not hashable before Python 3.12
        return hash((value.start, value.stop, value.step))
    try:
        return hash(value)
    except TypeError:
        raise StaticDataError(
            f"Static data holds {describe_class(value)}, which is not hashable. JAX needs hashable static data, as the "
            "key of its compiled functions. Flatten the value as a child if it changes between calls; otherwise "
            "store it as strings or numbers, or give its class __hash__ and __eq__ (a frozen dataclass has them)."
        ) from None
