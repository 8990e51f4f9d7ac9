"""Make the flatten functions of a class from the names of its attributes."""

# a class                         [obj.hidden, obj.cell], ["hidden", "cell"]
# with static attributes          [obj.hidden], [["hidden"], [obj.size]]
# that derives from a dict        [obj.hidden, *obj.values()], [["hidden"], [], [*obj.keys()]]

from __future__ import annotations

import contextlib
import keyword
import re
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...core.private_names.of_torch import GetAttrKey, MappingKey, SequenceKey
from ...errors import InvalidRegistrationError, UnsetFieldError, describe_class
from .aliases import Static
from .contract import FlattenFunctions, held_attributes, own_copy, require_node, undeclared_check
from .static_codec import check_static

_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8  # type flags of CPython: a ``class`` statement sets only the first
# types of static data that need no check
_FIT = frozenset({str, int, bool, type(None), bytes, range, torch.dtype, torch.device, torch.Size})
_approved: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id


def functions_from_fields(
    cls: type, names: Iterable[str], static_names: Iterable[str] = (), *, names_in_static: bool = True
) -> FlattenFunctions:
    """Make ``flatten``, ``flatten_with_keys`` and ``unflatten`` functions for a class from its attribute names.

    Args:
        cls: the class. The class may be frozen, have slots, and refuse to be constructed: ``unflatten`` calls neither
            ``__init__`` nor ``__post_init__`` nor a ``__setattr__`` of the class.
        names: names of the attributes that become children, in order.
        static_names: names of the attributes that become static data, in order; none by default.
        names_in_static: whether the static part includes ``names``; ``False`` makes the static part hashable, as JAX
            requires, if all values of ``static_names`` are hashable. ``True`` by default.

    Returns:
        A named tuple of three functions, which :func:`~yobx_flatten.register_class_flattening` takes as ``f_flatten``.
        The static part is ``names``, or ``[names, values of static_names]`` if there are static attributes. With
        ``names_in_static=False``, the static part is ``None`` or a tuple of the values of ``static_names``. The items
        of an instance of a ``dict``, ``list`` or ``tuple`` subclass are children after the attributes. The keys of an
        instance of a ``dict`` subclass are the last entry of the static part. The flatten function raises
        :class:`~yobx_flatten.errors.StaticDataError` for a value that cannot be static data. Flatten raises
        :class:`~yobx_flatten.errors.RoundTripError` for an attribute that is in neither ``names`` nor ``static_names``.

    Raises:
        InvalidRegistrationError: when ``cls`` is not a class, or a name is invalid or given twice.

    >>> class Pair:
    ...     def __init__(self, a, b):
    ...         self.a, self.b = a, b
    >>> flatten, flatten_with_keys, unflatten = functions_from_fields(Pair, ["a"], ["b"])
    >>> flatten(Pair(1, "one"))
    ([1], [['a'], ['one']])
    >>> unflatten([2], [["a"], ["two"]]).b
    'two'
    """
    require_node(cls, "functions_from_fields")
    require_content(cls, "functions_from_fields")
    names, static_names = names_of(names), names_of(static_names)
    caller = f"functions_from_fields({cls.__qualname__})"
    for name in names + static_names:
        if not str(name).isidentifier() or keyword.iskeyword(name):
            raise InvalidRegistrationError(
                f"{caller}: {name!r} is not the name of an attribute. Write the three functions yourself:\n"
                f"    register_class_flattening({cls.__qualname__}, f_flatten, f_unflatten, f_flatten_with_keys)"
            )
        if not cls.__dictoffset__ and not hasattr(cls, name):
            raise InvalidRegistrationError(f"{caller}: {describe_class(cls)} has no slot {name!r}. Remove the name.")
        found = getattr(cls, name, None)
        if isinstance(found, property) and not found.fset:
            raise InvalidRegistrationError(
                f"{caller}: {name!r} is a property without a setter, so an instance cannot be rebuilt from it. Name "
                "the attribute that the property reads."
            )
    twice = next((name for name, count in Counter(names + static_names).items() if count > 1), None)
    if twice is not None:
        raise InvalidRegistrationError(
            f"{caller}: the attribute {twice!r} of {describe_class(cls)} is given twice. Name it once, as a child "
            "or as static data."
        )
    flatten, flatten_with_keys = _flattening(cls, names, static_names, names_in_static)
    unflatten = _unflattening(cls, names, static_names, names_in_static)
    return name_functions(cls, FlattenFunctions(flatten, flatten_with_keys, unflatten))


def _flattening(
    cls: type, names: list[str], static_names: list[str], names_in_static: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    builtin: Any = builtin_base(cls)
    has_keys, has_items = issubclass(builtin, dict), builtin in _CONTAINERS
    # dynamo traces the iteration of a container, but not a call of `list.__iter__`
    iterates = has_items and getattr(cls, "__iter__", None) is builtin.__iter__
    keys = [GetAttrKey(name) for name in names]
    places = [(name, f"{cls.__qualname__}.{name}") for name in static_names]
    check_undeclared = undeclared_check(cls, [*names, *static_names])

    def parts_of(obj: Any) -> tuple[list[Any], Static]:
        children = [getattr(obj, name) for name in names]
        values: list[Any] = [checked(getattr(obj, name), place) for name, place in places]
        more = [checked([*builtin.keys(obj)], f"{cls.__qualname__}.keys()")] if has_keys else []
        if has_keys:
            children += builtin.values(obj)
        elif has_items:
            children += obj if iterates else builtin.__iter__(obj)
        if names_in_static:
            return children, [names, values, *more] if values or more else names
        return children, (*values, *map(tuple, more)) or None

    def flatten(obj: Any) -> tuple[list[Any], Static]:
        if check_undeclared is not None:
            check_undeclared(obj)
        try:
            return parts_of(obj)
        except AttributeError as error:
            unset = error.name if error.obj is obj else None
            if unset not in (*names, *static_names):  # raised by the code of a property
                raise UnsetFieldError(f"{cls.__qualname__} cannot be flattened: {error}") from error
            found = [one for one in (*names, *held_attributes(obj)) if one != unset and one not in static_names]
            more = f", static={[one for one in static_names if one != unset]}" if static_names else ""
            raise UnsetFieldError(
                f"{cls.__qualname__}.{unset} was never set, but is registered as a child or as static data. Set the "
                f"attribute in every instance, to None if there is no value:\n    self.{unset} = None\nor register the "
                f"class without it:\n    register({cls.__qualname__}, children={list(dict.fromkeys(found))}{more})"
            ) from error

    def flatten_with_keys(obj: Any) -> tuple[list[tuple[Any, Any]], Static]:
        children, static = flatten(obj)
        items: list[Any] = [MappingKey(key) for key in builtin.keys(obj)] if has_keys else []
        if has_items and not has_keys:
            items = [SequenceKey(place) for place in range(len(children) - len(names))]
        return list(zip([*keys, *items], children, strict=True)), static

    return flatten, flatten_with_keys


def _unflattening(cls: type, names: list[str], static_names: list[str], names_in_static: bool) -> Callable[..., Any]:
    builtin: Any = builtin_base(cls)
    has_keys, has_items = issubclass(builtin, dict), builtin in _CONTAINERS
    extends = getattr(cls, "extend", None) is list.extend

    def unflatten(children: Iterable[Any], static: Any, output_type: type | None = None) -> Any:
        children = list(children)
        values, items = (children[: len(names)], children[len(names) :]) if has_items else (children, [])
        # dynamo traces these functions only under the names `builtin.__new__` and `object.__setattr__`
        obj: Any = builtin.__new__(cls, items) if issubclass(builtin, tuple) else builtin.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(obj, name, value)
        if has_keys:
            for key, item in zip(static[-1], items, strict=True):
                builtin.__setitem__(obj, key, item)
        elif extends:
            obj.extend(items)
        elif issubclass(builtin, list):
            builtin.extend(obj, items)
        if static_names:
            held = static[1] if names_in_static else static[: len(static_names)]
            for name, value in zip(static_names, held, strict=True):
                object.__setattr__(obj, name, own_copy(value))
        return obj

    return unflatten


def name_functions(cls: type, functions: FlattenFunctions) -> FlattenFunctions:
    """Name the functions after a class: ``flatten_hidden_state`` for the class ``HiddenState``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()
    snake_case = re.sub(r"\W+", "_", words)  # a class made by `type` can have any name
    for prefix, function in zip(("flatten", "flatten_with_keys", "unflatten"), functions, strict=True):
        function.__name__ = function.__qualname__ = f"{prefix}_{snake_case}"
        function.__doc__ = f"{prefix} for {cls.__qualname__}"
        function.__module__ = cls.__module__
    return functions


def checked(value: Static, where: str) -> Static:
    """Check that the value of an attribute can be static data; return the value, or a copy if the value can change."""
    if type(value) in _FIT:
        return value
    if not (_is_fit(value) or _approved.get(id(value)) is value):
        check_static(value, where=where)
        with contextlib.suppress(TypeError):  # objects without weak references are checked each time
            _approved[id(value)] = value
    # a program compares the stored value at every call, and must not change when the caller changes a list
    return own_copy(value)


def _is_fit(value: Any) -> bool:
    """Return whether static data consists of simple types only, which :func:`check_static` need not check."""
    kind = type(value)
    if kind in _FIT or (kind is float and value == value):  # false for NaN
        return True
    if kind is tuple or kind is list:
        return all(map(_is_fit, value))
    return kind is dict and all(map(_is_fit, value)) and all(map(_is_fit, value.values()))


def builtin_base(cls: type) -> type:
    """Return the base class whose ``__new__`` allocates an instance of ``cls`` without running code of ``cls``."""
    return next(base for base in cls.__mro__ if base.__flags__ & (_HEAP_TYPE | _IMMUTABLE) != _HEAP_TYPE)


_CONTAINERS = (dict, OrderedDict, list, tuple)


def require_content(cls: type, caller: str) -> None:
    """Raise an error if a class derives from ``str``, ``set`` or another type whose content is not in attributes."""
    base = builtin_base(cls)
    if base not in (object, types.SimpleNamespace, *_CONTAINERS):
        raise InvalidRegistrationError(
            f"{caller}: {describe_class(cls)} derives from {describe_class(base)}, which stores its content outside of "
            "attributes. That content would be lost. Write the three functions yourself:\n"
            f"    register_class_flattening({cls.__qualname__}, f_flatten, f_unflatten, f_flatten_with_keys)"
        )


def names_of(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
