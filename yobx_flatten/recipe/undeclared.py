"""Refuse an instance with an attribute that its recipe does not name: flatten would drop it.

.. code-block:: text

    @dataclass                          class Sub(Base):                 value.__dict__  {"x": ..., "bias": ...}
    class Base:                             def __init__(self, x):       declared        {"x"}
        x: Tensor                               super().__init__(x)      flatten raises: nothing rebuilds "bias"
                                                self.bias = x + 1
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from types import MemberDescriptorType
from typing import Any

from ..errors import RoundTripError, describe_class

UNSET = object()
"""In place of the value of an attribute that is not set."""


def slots_of(cls: type) -> list[str]:
    """The slots of a class and of its bases, as they are spelt in the instance; bases come first."""
    found = []
    for base in reversed(cls.__mro__):
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in dict.fromkeys(found) if name not in ("__weakref__", "__dict__")]


def held_attributes(obj: object) -> dict[str, Any]:
    """What an instance holds in its ``__dict__`` and its slots, by name; no code of its class runs."""
    held = {name: _slot(type(obj), obj, name) for name in slots_of(type(obj))}
    stored = getattr(obj, "__dict__", {})
    # the items of a dict with `self.__dict__ = self` are no attributes
    return {name: value for name, value in held.items() if value is not UNSET} | ({} if stored is obj else dict(stored))


def _slot(cls: type, obj: object, name: str) -> Any:
    descriptor = inspect.getattr_static(cls, name, None)
    if type(descriptor) is not MemberDescriptorType:
        return UNSET
    try:
        return descriptor.__get__(obj, cls)
    except AttributeError:
        return UNSET


def is_derived(cls: type, name: str, value: object) -> bool:
    """Return whether an instance without the attribute reads the same: from its class, or computed when it is read."""
    of_class = inspect.getattr_static(cls, name, UNSET)
    # typing notes in it what a generic class was called with
    return name == "__orig_class__" or of_class is value or isinstance(of_class, functools.cached_property)


def undeclared_check(cls: type, declared: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Return the condition, as source, in which ``undeclared(obj)`` is called, and the names that it uses.

    It costs a tenth of a microsecond per object. An empty condition: instances hold nothing more.
    """
    more_slots = set(slots_of(cls)) - set(declared)
    if cls.__dictoffset__ == 0 and not more_slots:
        return "", {}
    check = _checking(cls, frozenset(declared))
    if more_slots:
        return "True", {"undeclared": check}
    of_class = [inspect.getattr_static(cls, name, UNSET) for name in declared]
    stored = [name for name, found in zip(declared, of_class, strict=True) if not _is_data_descriptor(found)]
    # where all of them are read from `__dict__`, as many names are the same names
    if hasattr(cls, "__getattr__") or any(found is not UNSET for found in of_class):
        return "obj.__dict__.keys() != DECLARED", {"undeclared": check, "DECLARED": frozenset(stored)}
    return f"len(obj.__dict__) != {len(stored)}", {"undeclared": check}


def _checking(cls: type, declared: frozenset[str]) -> Callable[[Any], None]:
    def undeclared(obj: object) -> None:
        for name, value in held_attributes(obj).items():
            if name not in declared and not is_derived(cls, name, value) and not _is_behind(cls, declared, obj, name):
                raise lost_attribute(cls, name, sorted(declared))

    return undeclared


def _is_behind(cls: type, declared: frozenset[str], obj: object, name: str) -> bool:
    """Whether setting what is declared also sets this attribute, as the setter of a property does."""
    behind = {one for one in declared if _is_data_descriptor(inspect.getattr_static(cls, one, UNSET))}
    if not behind:
        return False
    made: Any = object.__new__(cls)
    for one in behind:
        setattr(made, one, getattr(obj, one))
    return held_attributes(made).get(name, UNSET) is held_attributes(obj)[name]


def _is_data_descriptor(found: object) -> bool:
    return hasattr(type(found), "__set__")


def lost_attribute(cls: type, name: str, declared: Collection[str] | Iterator[str]) -> RoundTripError:
    """Return the error for an attribute that no child and no static data holds, with the lines to type."""
    return RoundTripError(
        f"{cls.__qualname__}: an instance holds the attribute {name!r}, and what is declared of {describe_class(cls)} "
        f"does not: it would be lost. Declare it as a field, or name it (static data goes in a second list):\n"
        f"    f, k, u = functions_from_fields({cls.__qualname__}, {[*declared, name]})\n"
        f"    register_class_flattening({cls.__qualname__}, f, u, k)"
    )
