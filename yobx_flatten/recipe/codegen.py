"""Generate flatten functions as source, the way :mod:`dataclasses` writes ``__init__``.

A loop over field names costs several times what the attributes themselves cost. The source written here names every
attribute once; a traceback shows it, and so does :func:`inspect.getsource`::

    def flatten_state(obj):
        if len(obj.__dict__) != 2:
            undeclared(obj)
        return [obj.hidden, obj.cell], NAMES

    def flatten_with_keys_state(obj):
        if len(obj.__dict__) != 2:
            undeclared(obj)
        return [(KEY_0, obj.hidden), (KEY_1, obj.cell)], NAMES

    def unflatten_state(children, static, output_type=None):
        obj = builtin.__new__(cls)
        obj.hidden, obj.cell, = children
        return obj

A class that derives from ``dict``, ``list`` or ``tuple`` has items in addition to its attributes. They are also
children, after those from the attributes::

    def flatten_state(obj):
        return [obj.hidden, *builtin.values(obj)], [NAMES, [], [*builtin.keys(obj)]]
"""

from __future__ import annotations

import contextlib
import inspect
import keyword
import linecache
import re
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..errors import InvalidRegistrationError, UnsetFieldError, describe_class
from ..private_names.of_torch import GetAttrKey, MappingKey, SequenceKey
from .aliases import Static
from .contract import FlattenFunctions, own_copy, require_node, undeclared_check
from .static_codec import check_static

__all__ = [
    "builtin_base",
    "checked",
    "functions_from_fields",
    "name_functions",
    "require_content",
    "run_source",
    "snake_case",
]

_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8  # flags of types: a class statement sets the first one alone
_FIT = frozenset({str, int, bool, type(None), bytes, range, torch.dtype, torch.device, torch.Size})
_approved: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id


def snake_case(name: str) -> str:
    """Spell a class name as a function name.

    >>> snake_case("HiddenState"), snake_case("BaseModelOutput"), snake_case("_Private")
    ('hidden_state', 'base_model_output', '_private')
    >>> snake_case("Pair[int, str]")
    'pair_int_str_'
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return re.sub(r"\W+", "_", words)  # a class made by `type` can have any name


def functions_from_fields(
    cls: type, names: Iterable[str], static_names: Iterable[str] = (), *, names_in_static: bool = True
) -> FlattenFunctions:
    """Write the flatten, keyed flatten and unflatten functions of a class that is described by its attributes.

    Args:
        cls: the class. It may be frozen, have slots, and refuse to be constructed: ``unflatten`` calls neither
            ``__init__`` nor ``__post_init__`` nor a ``__setattr__`` of the class.
        names: the attributes that are children, in order.
        static_names: the attributes that are static data, in order; none by default.
        names_in_static: whether the static part repeats the names, as documented for dataclasses; ``True`` by default.

    Returns:
        ``flatten_<class>``, ``flatten_with_keys_<class>`` and ``unflatten_<class>``, as a named tuple that
        :func:`~yobx_flatten.register_class_flattening` takes whole. The static part is the list
        ``names``, or ``[names, values of static_names]`` where there are static attributes; without the names it is
        ``None``, or a tuple of the values, which is hashable where they are, as JAX wants it. The items of a subclass
        of ``dict``, ``list`` or ``tuple`` are children after the attributes, and the keys of a ``dict`` come last in
        the static part. Flatten raises :class:`~yobx_flatten.errors.StaticDataError`, with the name of the attribute,
        for a value that cannot be static data, and :class:`~yobx_flatten.errors.RoundTripError` for an instance with
        an attribute that is not named.

    Raises:
        InvalidRegistrationError: when ``cls`` is not a class, or a name is not a valid name or is given twice.

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
    names, static_names = list(names), list(static_names)
    _check_names(cls, names + static_names)
    keys = {f"KEY_{i}": GetAttrKey(name) for i, name in enumerate(names)}
    helpers = {"cls": cls, "builtin": builtin_base(cls), "checked": checked, "own_copy": own_copy, "unset": _unset}
    holds_more, of_check = undeclared_check(cls, [*names, *static_names])
    scope: dict[str, Any] = {"NAMES": names, "MappingKey": MappingKey, "SequenceKey": SequenceKey, **keys, **helpers}
    scope |= of_check
    suffix = snake_case(cls.__name__)
    made = [f"flatten_{suffix}", f"flatten_with_keys_{suffix}", f"unflatten_{suffix}"]
    run_source(
        f"<functions of {cls.__module__}.{cls.__qualname__}",
        _source(cls, made, names, static_names, names_in_static, holds_more),
        scope,
    )
    return name_functions(cls, FlattenFunctions(*(scope[name] for name in made)))


def name_functions(cls: type, functions: FlattenFunctions) -> FlattenFunctions:
    """Name the three functions after the class, as documented, and return them."""
    for prefix, function in zip(("flatten", "flatten_with_keys", "unflatten"), functions, strict=True):
        function.__name__ = function.__qualname__ = f"{prefix}_{snake_case(cls.__name__)}"
        function.__doc__ = f"{prefix} for {cls.__qualname__}"
        function.__module__ = cls.__module__
    return functions


def checked(value: Static, where: str) -> Static:
    """Return the value of a static attribute, or raise if it cannot be static; approvals are remembered.

    A list, dict or set is returned as a copy: a program keeps what it is given here and compares with it at every call,
    and a caller that appends to its own list does not change a program.
    """
    if type(value) in _FIT:
        return value
    if not (_is_fit(value) or _approved.get(id(value)) is value):
        check_static(value, where=where)
        with contextlib.suppress(TypeError):  # what takes no weak reference is looked through each time
            _approved[id(value)] = value
    return own_copy(value)


def _is_fit(value: Any) -> bool:
    """Return whether static data is of a common simple type; ``False`` needs a full check."""
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
    return next(base for base in cls.__mro__ if base.__flags__ & (_HEAP_TYPE | _IMMUTABLE) != _HEAP_TYPE)


class _Items(NamedTuple):
    """Source code that reads and restores the items of a built-in container."""

    children: str
    keyed: str
    keys: str
    made: str
    filled: tuple[str, ...]


_CONTAINERS = (dict, OrderedDict, list, tuple)
_NEW = "builtin.__new__(cls)"  # dynamo of torch 2.11 follows no other name of that function


def _items_of(cls: Any) -> _Items | None:
    """Return source that reads items without the class's own methods; ``None`` if its built-in base has no items."""
    base = builtin_base(cls)
    if base not in _CONTAINERS:
        return None
    if issubclass(base, dict):
        return _Items(
            "*builtin.values(obj)",
            "*[(MappingKey(key), item) for key, item in builtin.items(obj)]",
            f"checked([*builtin.keys(obj)], {f'{cls.__qualname__}.keys()'!r})",
            _NEW,
            (
                "    for key, item in zip(static[-1], items, strict=True):",
                "        builtin.__setitem__(obj, key, item)",
            ),
        )
    # where the methods are the built-in ones, they are called by their names: dynamo follows no other
    items = "obj" if cls.__iter__ is base.__iter__ else "builtin.__iter__(obj)"
    keyed = f"*[(SequenceKey(i), item) for i, item in enumerate({items})]"
    if base is tuple:
        return _Items(f"*{items}", keyed, "", "builtin.__new__(cls, items)", ())
    extend = "obj.extend(items)" if cls.extend is list.extend else "builtin.extend(obj, items)"
    return _Items(f"*{items}", keyed, "", _NEW, (f"    {extend}",))


def require_content(cls: type, caller: str) -> None:
    """Refuse a class whose built-in base has content outside attributes and items: text, a number, a set."""
    base = builtin_base(cls)
    if base not in (object, types.SimpleNamespace, *_CONTAINERS):
        raise InvalidRegistrationError(
            f"{caller}: {describe_class(cls)} derives from {describe_class(base)}, whose content is not in its "
            "attributes: it would be lost. Write the three functions yourself:\n"
            f"    register_class_flattening({cls.__qualname__}, f_flatten, f_unflatten, f_flatten_with_keys)"
        )


def _source(
    cls: type, made: list[str], names: list[str], static_names: list[str], names_in_static: bool, holds_more: str
) -> str:
    items = _items_of(cls)
    attributes = [f"obj.{name}" for name in names]
    values = [f"checked(obj.{name}, {f'{cls.__qualname__}.{name}'!r})" for name in static_names]
    keys = [items.keys] if items is not None and items.keys else []
    if names_in_static:
        parts, held = ["NAMES", *([f"[{', '.join(values)}]"] if values or keys else []), *keys], "static[1]"
        static = f"[{', '.join(parts)}]" if len(parts) > 1 else "NAMES"
    else:
        parts, held = [*values, *(f"tuple({part})" for part in keys)], "static[:-1]" if keys else "static"
        static = f"({', '.join(parts)},)" if parts else "None"
    keyed = [f"(KEY_{i}, {attribute})" for i, attribute in enumerate(attributes)]
    if items is not None:
        attributes.append(items.children)
        keyed.append(items.keyed)
    more = [f"    if {holds_more}:", "        undeclared(obj)"] if holds_more else []
    lines = [
        f"def {made[0]}(obj):",
        *more,
        *_reading(cls, names + static_names, f"return [{', '.join(attributes)}], {static}"),
        "",
        f"def {made[1]}(obj):",
        *more,
        *_reading(cls, names + static_names, f"return [{', '.join(keyed)}], {static}"),
        "",
        f"def {made[2]}(children, static, output_type=None):",
    ]
    if items is None:
        lines += [f"    obj = {_NEW}", *_assignment(cls, names, "children")]
    else:
        locals_ = [f"child_{i}" for i in range(len(names))]
        lines += [f"    {', '.join([*locals_, '*items'])}, = children", f"    obj = {items.made}"]
        lines += [*(_assignment(cls, names, f"[{', '.join(locals_)}]") if names else []), *items.filled]
    if static_names:
        lines += _assignment(cls, static_names, f"[own_copy(value) for value in {held}]")
    lines += ["    return obj"]
    return "\n".join(lines) + "\n"


def _reading(cls: type, names: list[str], line: str) -> list[str]:
    """The body of a flatten function; a slot can be unset."""
    if not any(type(inspect.getattr_static(cls, name, None)) is types.MemberDescriptorType for name in names):
        return [f"    {line}"]
    return [
        "    try:",
        f"        {line}",
        "    except AttributeError as error:",
        "        raise unset(cls, error) from error",
    ]


def _unset(cls: type, error: AttributeError) -> UnsetFieldError:
    name = error.name if error.obj is not None and type(error.obj) is cls else None
    if name is None:  # raised by the code of a property
        return UnsetFieldError(f"{cls.__qualname__} cannot be flattened: {error}")
    return UnsetFieldError(
        f"{cls.__qualname__}.{name} was never set, and is a child, or static data, of every instance. Set it, to None "
        f"where there is nothing:\n    self.{name} = None"
    )


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
    """Define the functions of a source in a scope."""
    # start: how the file name begins that tracebacks find the lines by, such as `"<functions of module.Class"`
    # scope: the names that the source uses; those that it defines are added to them
    # no `__name__` in the scope: dynamo would look its names up in the module of that name
    exec(compile(source, _remember(start, source), "exec"), scope)


def _remember(start: str, source: str) -> str:
    """Register the source for tracebacks; equal source of one class is stored once."""
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
