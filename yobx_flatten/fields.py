"""Flatten functions read off a class: dataclasses by their fields, mapping-like classes by ``keys`` and ``values``."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils._pytree import GetAttrKey, MappingKey

from .errors import InvalidRegistrationError, describe_class
from .recipe import Flatten, FlattenWithKeys, Unflatten, require_class

__all__ = ["functions_of", "is_mapping_like", "snake_case"]


def snake_case(name: str) -> str:
    """Spell a class name as a function name.

    >>> snake_case("HiddenState"), snake_case("BaseModelOutput"), snake_case("_Private")
    ('hidden_state', 'base_model_output', '_private')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def is_mapping_like(cls: type) -> bool:
    """Tell whether instances list their content by ``keys()`` and ``values()``."""
    return all(callable(getattr(cls, name, None)) for name in ("keys", "values"))


def functions_of(cls: type) -> tuple[Flatten, FlattenWithKeys, Unflatten]:
    """Make the flatten, keyed flatten and unflatten functions of a dataclass or a mapping-like class.

    Args:
        cls: a class with ``keys()`` and ``values()`` (a ``dict`` subclass, a ``ModelOutput``), or a dataclass. A field
            declared with ``dataclasses.field(metadata={"static": True})`` becomes static data.

    Returns:
        The three functions, named ``flatten_<class>``, ``flatten_with_keys_<class>`` and ``unflatten_<class>``.

    Raises:
        InvalidRegistrationError: for any other class.
    """
    require_class(cls, "make_flattening_function_for_dataclass")
    if is_mapping_like(cls):
        functions = _mapping_functions(cls)
    elif dataclasses.is_dataclass(cls):
        functions = _dataclass_functions(cls)
    else:
        raise InvalidRegistrationError(
            f"make_flattening_function_for_dataclass: {describe_class(cls)} is neither a dataclass nor has keys() and "
            "values(). Write the three functions yourself:\n"
            f"    register_class_flattening({cls.__qualname__}, f_flatten, f_unflatten, f_flatten_with_keys)"
        )
    for prefix, function in zip(("flatten", "flatten_with_keys", "unflatten"), functions, strict=True):
        function.__name__ = function.__qualname__ = f"{prefix}_{snake_case(cls.__name__)}"
        function.__doc__ = f"{prefix} for {cls.__qualname__}"
    return functions


def _mapping_functions(cls: type) -> tuple[Flatten, FlattenWithKeys, Unflatten]:
    rebuild: Callable[[zip[tuple[Any, Any]]], Any]
    if issubclass(cls, dict) and not dataclasses.is_dataclass(cls):
        rebuild = cls  # any hashable key, not only names
    else:

        def rebuild(items: zip[tuple[Any, Any]]) -> Any:
            return cls(**dict(items))

    def flatten(obj: Any) -> tuple[list[Any], list[Any]]:
        return list(obj.values()), list(obj.keys())

    def flatten_with_keys(obj: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
        children, keys = flatten(obj)
        return [(MappingKey(k), child) for k, child in zip(keys, children, strict=True)], keys

    def unflatten(children: Iterable[Any], keys: list[Any], output_type: type | None = None) -> Any:
        return rebuild(zip(keys, children, strict=True))

    return flatten, flatten_with_keys, unflatten


def _dataclass_functions(cls: type) -> tuple[Flatten, FlattenWithKeys, Unflatten]:
    fields = dataclasses.fields(cls)
    names = [f.name for f in fields if not f.metadata.get("static", False)]
    static_names = [f.name for f in fields if f.metadata.get("static", False)]
    read_children, read_static = _reader(names), _reader(static_names)
    path = [GetAttrKey(name) for name in names]
    set_field = object.__setattr__

    def flatten(obj: Any) -> tuple[list[Any], Any]:
        return read_children(obj), [names, read_static(obj)] if static_names else names

    def flatten_with_keys(obj: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, static = flatten(obj)
        return list(zip(path, children, strict=True)), static

    def unflatten(children: Iterable[Any], static: Any, output_type: type | None = None) -> Any:
        # neither __init__ nor __post_init__: they may refuse the placeholders that a trace puts in, or compute anew
        # what is already there; object.__setattr__ because the class may be frozen
        obj: Any = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            set_field(obj, name, child)
        if static_names:
            for name, value in zip(static_names, static[1], strict=True):
                set_field(obj, name, value)
        return obj

    return flatten, flatten_with_keys, unflatten


def _reader(names: list[str]) -> Callable[[Any], list[Any]]:
    """Read several attributes at once: attrgetter does it in C, but returns a bare value for one name."""
    if not names:
        return lambda obj: []
    read = operator.attrgetter(*names)
    if len(names) == 1:
        return lambda obj: [read(obj)]
    return lambda obj: list(read(obj))
