"""Make flatten functions for classes with ``keys()`` and ``values()``.

The constructor rebuilds an instance. So content outside of the items is refused, and the items that the constructor
makes are compared with the given items::

    class Config(dict):                     config.scale = tensor     flatten raises: the attribute is not an item
        def __init__(self, name):           Config(items)             unflatten raises: its items are {"name": items}
            super().__init__(name=name)
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MemberDescriptorType
from typing import Any

from ..errors import RoundTripError
from ..private_names.of_torch import MappingKey
from .attributes import builtin_base
from .contract import FlattenFunctions, is_derived


def is_mapping_like(cls: type) -> bool:
    """Return whether instances of a class have the methods ``keys()`` and ``values()``."""
    return all(callable(getattr(cls, name, None)) for name in ("keys", "values"))


def is_mapping(cls: type) -> bool:
    """Return whether a class is a mapping that stores everything as items, including fields if it is a dataclass.

    A dataclass of chex has the methods of a mapping, and a dataclass that derives from ``dict`` may not store its
    fields as items; such classes are described by their fields. A ``ModelOutput`` copies its fields into items.
    """
    if not is_mapping_like(cls) or (issubclass(cls, dict) and _has_slots(cls)):
        return False
    if not dataclasses.is_dataclass(cls):
        return True
    return issubclass(cls, dict) and any(name in vars(base) for base in _written(cls) for name in _KEEPS_ITEMS)


def mapping_functions(cls: type) -> FlattenFunctions:
    """Return the flatten, keyed flatten and unflatten functions of a mapping class; see :func:`is_mapping`."""
    check_items = _check_of(cls)
    rebuild = _rebuilding(cls)

    def flatten(obj: Mapping[Any, Any]) -> tuple[list[Any], list[Any]]:
        check_items(obj)
        return list(obj.values()), list(obj.keys())

    def flatten_with_keys(obj: Mapping[Any, Any]) -> tuple[list[tuple[Any, Any]], list[Any]]:
        children, keys = flatten(obj)
        return [(MappingKey(k), child) for k, child in zip(keys, children, strict=True)], keys

    def unflatten(children: Iterable[Any], keys: list[Any], output_type: type | None = None) -> Any:
        return rebuild(dict(zip(keys, children, strict=True)))

    return FlattenFunctions(flatten, flatten_with_keys, unflatten)


_KEEPS_ITEMS = ("__post_init__", "__setitem__")


def _written(cls: type) -> list[type]:
    """Return a class and its bases that are written in Python."""
    return list(cls.__mro__[: cls.__mro__.index(builtin_base(cls))])


def _has_slots(cls: type) -> bool:
    return any(type(value) is MemberDescriptorType for base in _written(cls) for value in vars(base).values())


# -- content outside items --------------------------------------------------------------------------------------------


def _check_of(cls: type) -> Callable[[Any], None]:
    if dataclasses.is_dataclass(cls):
        return _check_of_fields(cls)
    if not cls.__dictoffset__:
        return lambda obj: None
    return _check_attributes if issubclass(cls, (dict, collections.UserDict)) else _check_of_constructor(cls)


def _check_of_fields(cls: type) -> Callable[[Any], None]:
    names = [field.name for field in dataclasses.fields(cls)]
    known = frozenset(names)

    def check_items(obj: Any) -> None:
        for name in names:
            value = getattr(obj, name, None)  # a field without an item must be None
            if value is not dict.get(obj, name):
                raise _not_an_item(obj, name, [name])
        if not vars(obj).keys() <= known:
            _check_attributes(obj)

    return check_items


def _check_attributes(obj: Any) -> None:
    held = obj.__dict__
    if not held or held is obj:
        return
    is_dict = isinstance(obj, dict)
    more = [
        name
        for name, value in held.items()
        if not (is_dict and dict.get(obj, name, obj) is value)
        and not (name == "data" and not is_dict)
        and not is_derived(type(obj), name, value)
    ]
    if more:
        raise _not_an_item(obj, more[0], more)


def _check_of_constructor(cls: type) -> Callable[[Any], None]:
    """Return a check that the constructor sets all attributes; any other attribute would be lost."""
    rebuild, known = _rebuilding(cls), set[str]()

    def check_items(obj: Any) -> None:
        if obj.__dict__.keys() <= known:
            return
        known.update(rebuild(dict(zip(obj.keys(), obj.values(), strict=True))).__dict__)
        more = [name for name, value in obj.__dict__.items() if not (name in known or is_derived(cls, name, value))]
        if more:
            raise _not_an_item(obj, more[0], more)

    return check_items


def _not_an_item(obj: object, name: str, names: list[str]) -> RoundTripError:
    cls = type(obj)
    if isinstance(obj, dict):
        line = f"register({cls.__qualname__}, children={names})"
    else:
        line = f"register_class_flattening({cls.__qualname__}, f_flatten, f_unflatten, f_flatten_with_keys)"
    return RoundTripError(
        f"{cls.__qualname__}: its attribute {name!r} would be lost: only items are exported. Store the value as an "
        f"item, or register the class (static data in static=[...]):\n    {line}"
    )


# -- unflattened ----------------------------------------------------------------------------------------------------


def _rebuilding(cls: type) -> Callable[[dict[Any, Any]], Any]:
    make: Callable[..., Any] = cls
    if dataclasses.is_dataclass(cls):
        # the value of a field without an item is None, not its default
        absent = {field.name: None for field in dataclasses.fields(cls) if field.init and field.default is not None}
        return lambda items: make(**{**absent, **items})
    if not issubclass(cls, dict):
        return lambda items: make(**items)
    base: Any = builtin_base(cls)
    if not any(name in vars(written) for written in _written(cls) for name in ("__init__", "__new__")):
        return make  # `make(**items)` would accept only names as keys

    def rebuild(items: Mapping[Any, Any]) -> Any:
        obj = make(items)
        found = dict(base.items(obj))
        if list(found) != list(items) or not all(map(_kept, found.values(), items.values())):
            raise RoundTripError(
                f"{cls.__qualname__}: its constructor changes the items: {_format_items(found)} instead of "
                f"{_format_items(items)}. To rebuild it without its constructor:\n"
                f"    register({cls.__qualname__}, children=[])"
            )
        return obj

    return rebuild


def _kept(found: object, given: object) -> bool:
    # some constructors convert nested containers to their own class
    return found is given or isinstance(given, (dict, list, tuple))


def _format_items(items: Mapping[Any, Any]) -> str:
    return f"{{{', '.join(f'{key!r}: {type(value).__name__}' for key, value in items.items())}}}"
