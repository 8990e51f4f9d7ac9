"""Make static data hashable and comparable: JAX does both at every call of a compiled function.

Lists and dicts are not hashable, and a caller that changes one later would change a key that is in use. So they travel
as a copy inside :class:`HeldStatic`, and are returned as a copy. A hashable value stays as it is.
"""

from __future__ import annotations

import operator
from collections import OrderedDict

from ..errors import StaticDataError, describe_class
from .aliases import Static


class HeldStatic:
    """Static data that does not hash by itself; two are equal when what they hold is."""

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
    """Return static data in a form that hashes and compares.

    >>> hashable("relu"), hash(hashable(["relu", 3])) == hash(hashable(["relu", 3]))
    ('relu', True)
    >>> original(hashable({"name": [1, 2]}))
    {'name': [1, 2]}
    """
    # returns: `static` itself where it hashes, else a `HeldStatic` that holds a copy of it
    try:
        hash(static)
    except TypeError:
        return HeldStatic(static)
    return static


def original(static: Static) -> Static:
    """Return what :func:`hashable` was given; lists and dicts are fresh ones."""
    return own_copy(static.value) if type(static) is HeldStatic else static


def own_copy(value: Static) -> Static:
    """Return static data with fresh lists, dicts and sets, nested at will: a change of one is none of the other.

    >>> names = ["a"]
    >>> own_copy((names, 1))[0] is names
    False
    """
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
    if kind is slice:  # hashes from Python 3.12 on
        return hash((value.start, value.stop, value.step))
    try:
        return hash(value)
    except TypeError:
        raise StaticDataError(
            f"Static data holds {describe_class(value)}, which does not hash; JAX uses static data as the key of its "
            "compiled functions. Return it among the children if it may change between calls, otherwise store its name "
            "or its numbers, or give its class __hash__ and __eq__ (a frozen dataclass has them)."
        ) from None
