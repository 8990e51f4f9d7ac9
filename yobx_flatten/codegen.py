"""Flatten functions as generated source, the way :mod:`dataclasses` writes ``__init__``.

A loop over field names costs several times what the attributes themselves cost. The source written here names every
attribute once; a traceback shows it, and so does :func:`inspect.getsource`::

    def flatten_state(obj):
        return [obj.hidden, obj.cell], NAMES

    def flatten_with_keys_state(obj):
        return [(KEY_0, obj.hidden), (KEY_1, obj.cell)], NAMES

    def unflatten_state(children, static, output_type=None):
        obj = builtin.__new__(cls)
        obj.hidden, obj.cell, = children
        return obj
"""

from __future__ import annotations

import contextlib
import keyword
import linecache
import re
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import GetAttrKey

from .errors import InvalidRegistrationError, describe_class
from .recipe import Flatten, FlattenWithKeys, Unflatten, require_class
from .static_codec import check_static

__all__ = ["builtin_base", "checked", "functions_from_fields", "name_functions", "run_source", "snake_case"]

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
_FIT = frozenset({str, int, bool, type(None), bytes, range, torch.dtype, torch.device, torch.Size})
_approved: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id


def snake_case(name: str) -> str:
    """Spell a class name as a function name.

    >>> snake_case("HiddenState"), snake_case("BaseModelOutput"), snake_case("_Private")
    ('hidden_state', 'base_model_output', '_private')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def functions_from_fields(
    cls: type, names: Iterable[str], static_names: Iterable[str] = (), *, names_in_static: bool = True
) -> tuple[Flatten, FlattenWithKeys, Unflatten]:
    """Write the flatten, keyed flatten and unflatten functions of a class whose attributes say it all.

    Args:
        cls: the class. It may be frozen, have slots, and refuse to be constructed: ``unflatten`` calls neither
            ``__init__`` nor ``__post_init__`` nor a ``__setattr__`` of the class.
        names: the attributes that are children, in order.
        static_names: the attributes that are static data, in order.
        names_in_static: whether the static part repeats the names, as documented for dataclasses.

    Returns:
        ``flatten_<class>``, ``flatten_with_keys_<class>`` and ``unflatten_<class>``. The static part is the list
        ``names``, or ``[names, values of static_names]`` where there are static attributes; without the names it is
        ``None``, or a tuple of the values, which hashes where they do, as JAX wants it. Flatten raises
        :class:`~yobx_flatten.StaticDataError`, with the name of the attribute, for static data that is no static data.

    Raises:
        InvalidRegistrationError: when ``cls`` is not a class, or a name is no name or stands there twice.

    >>> class Pair:
    ...     def __init__(self, a, b):
    ...         self.a, self.b = a, b
    >>> flatten, flatten_with_keys, unflatten = functions_from_fields(Pair, ["a"], ["b"])
    >>> flatten(Pair(1, "one"))
    ([1], [['a'], ['one']])
    >>> unflatten([2], [["a"], ["two"]]).b
    'two'
    """
    require_class(cls, "functions_from_fields")
    names, static_names = list(names), list(static_names)
    _check_names(cls, names + static_names)
    keys = {f"KEY_{i}": GetAttrKey(name) for i, name in enumerate(names)}
    helpers = {"cls": cls, "builtin": builtin_base(cls), "checked": checked}
    scope: dict[str, Any] = {"NAMES": names, **keys, **helpers}
    suffix = snake_case(cls.__name__)
    made = [f"flatten_{suffix}", f"flatten_with_keys_{suffix}", f"unflatten_{suffix}"]
    run_source(
        f"<functions of {cls.__module__}.{cls.__qualname__}",
        _source(cls, made, names, static_names, names_in_static),
        scope,
    )
    flatten, flatten_with_keys, unflatten = (scope[name] for name in made)
    return name_functions(cls, (flatten, flatten_with_keys, unflatten))


def name_functions(
    cls: type, functions: tuple[Flatten, FlattenWithKeys, Unflatten]
) -> tuple[Flatten, FlattenWithKeys, Unflatten]:
    """Name the three functions after the class, as documented, and return them."""
    for prefix, function in zip(("flatten", "flatten_with_keys", "unflatten"), functions, strict=True):
        function.__name__ = function.__qualname__ = f"{prefix}_{snake_case(cls.__name__)}"
        function.__doc__ = f"{prefix} for {cls.__qualname__}"
        function.__module__ = cls.__module__
    return functions


def checked(value: Any, where: str) -> Any:
    """Return the value of a static attribute, or say that it cannot be one; what was approved stays approved.

    Raises:
        StaticDataError: see :func:`~yobx_flatten.static_codec.check_static`.
    """
    if type(value) in _FIT or _is_fit(value) or _approved.get(id(value)) is value:
        return value
    check_static(value, where=where)
    with contextlib.suppress(TypeError):  # what takes no weak reference is looked through each time
        _approved[id(value)] = value
    return value


def _is_fit(value: Any) -> bool:
    """The quick answer for what static data mostly is; ``False`` means: look closer."""
    kind = type(value)
    if kind in _FIT or (kind is float and value == value):  # not so for NaN
        return True
    if kind is tuple or kind is list:
        return all(map(_is_fit, value))
    return kind is dict and all(map(_is_fit, value)) and all(map(_is_fit, value.values()))


def builtin_base(cls: type) -> type:
    """Find the base whose ``__new__`` allocates an instance and runs no code of the class.

    >>> builtin_base(type("State", (dict,), {}))
    <class 'dict'>
    """
    return next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)


def _source(cls: type, made: list[str], names: list[str], static_names: list[str], names_in_static: bool) -> str:
    attributes = [f"obj.{name}" for name in names]
    values = [f"checked(obj.{name}, {f'{cls.__qualname__}.{name}'!r})" for name in static_names]
    if names_in_static:
        static, held = f"[NAMES, [{', '.join(values)}]]" if values else "NAMES", "static[1]"
    else:
        static, held = f"({', '.join(values)},)" if values else "None", "static"
    keyed = ", ".join(f"(KEY_{i}, {attribute})" for i, attribute in enumerate(attributes))
    lines = [
        f"def {made[0]}(obj):",
        f"    return [{', '.join(attributes)}], {static}",
        "",
        f"def {made[1]}(obj):",
        f"    return [{keyed}], {static}",
        "",
        f"def {made[2]}(children, static, output_type=None):",
        "    obj = builtin.__new__(cls)",  # dynamo of torch 2.11 follows no other name of that function
        *_assignment(cls, names, "children"),
        *(_assignment(cls, static_names, held) if static_names else []),
        "    return obj",
    ]
    return "\n".join(lines) + "\n"


def _assignment(cls: type, names: list[str], values: str) -> list[str]:
    """Unpack into the attributes; an unpacking of another length raises, so that no field is ever left out."""
    if not names:
        return [f"    [] = {values}"]
    if _plain_setattr(cls):
        return [f"    {', '.join(f'obj.{name}' for name in names)}, = {values}"]
    locals_ = [f"value_{i}" for i in range(len(names))]
    return [
        f"    {', '.join(locals_)}, = {values}",
        # spelt out: dynamo takes any other name of this function for the class's own `__setattr__`
        *(f"    object.__setattr__(obj, {name!r}, {value})" for name, value in zip(names, locals_, strict=True)),
    ]


def _plain_setattr(cls: type) -> bool:
    found: Any = cls.__setattr__
    return found is object.__setattr__


def run_source(start: str, source: str, scope: dict[str, Any]) -> None:
    """Define the functions of a source in a scope.

    Args:
        start: how the file name begins that tracebacks find the lines by, such as ``"<functions of module.Class"``.
        source: what to run.
        scope: the names that the source uses; those that it defines come in beside them.
    """
    # no `__name__` in the scope: dynamo would look its names up in the module of that name
    exec(compile(source, _remember(start, source), "exec"), scope)


def _remember(start: str, source: str) -> str:
    """Put the source where tracebacks look; the same source of the same class is kept once."""
    count = 1
    while True:
        filename = f"{start}>" if count == 1 else f"{start} {count}>"
        # no time stamp: `linecache.checkcache` leaves such entries alone; setdefault: two threads may meet here
        entry = (len(source), None, source.splitlines(keepends=True), filename)
        if linecache.cache.setdefault(filename, entry)[:3] == entry[:3]:
            return filename
        count += 1


def _check_names(cls: type, names: list[str]) -> None:
    unfit = [name for name in names if not str(name).isidentifier() or keyword.iskeyword(name)]
    if unfit:
        raise InvalidRegistrationError(
            f"functions_from_fields({cls.__qualname__}): {unfit[0]!r} is not the name of an attribute. Write the three "
            f"functions yourself:\n    register_class_flattening({cls.__qualname__}, f_flatten, f_unflatten, "
            "f_flatten_with_keys)"
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidRegistrationError(
            f"functions_from_fields({cls.__qualname__}): {twice[0]!r} of {describe_class(cls)} is given twice. An "
            "attribute is either a child or static data, once."
        )
