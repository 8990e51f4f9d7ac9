"""Generate the two functions that flatten and rebuild a layer from its template.

Reading an object by walking its template costs twenty times what a plain list does, so each template becomes source
that names every attribute once. The first function also *checks* that what it reads is what the template states, down
to the order of the attributes: where it is not, it states it, and the object is read anew. Of a layer with one state::

    def read(objects, leaves, lengths):
        floating = None
        for obj in objects:
            held = obj.__dict__
            if [*held] != NAMES: return False
            [v0, v1, v2] = held.values()
            if type(v0) is not Tensor: return False
            if v2 is not None: return False
            if v1 is not v0.dtype: return False
            if v1 is not floating:
                if not v1.is_floating_point: return False
                floating = v1
            leaves.append(v0)
        return True

    def fill(objects, length, c0):
        for obj, x0 in zip(objects, c0):
            if type(x0) is not Tensor: raise TypeError
            obj.state = x0
            obj.dtype = x0.dtype
            obj.config = None
"""

from __future__ import annotations

import copy
import functools
import inspect
import keyword
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...recipe.aliases import Static
from ...recipe.codegen import run_source
from ...recipe.static_codec import dump_static, load_static
from .layers import make_window_tensor, window_tensors
from .state import Template, follows_leaf, leaf_paths, leaf_types, read_like
from .stored_classes import part_class
from .stored_templates import read_template

_LITERALS = (str, int, bool, type(None))  # what stands in the source as it is
_KEPT = (
    torch.dtype,
    torch.device,
    torch.Size,
    float,
    complex,
    bytes,
    type,
)  # what cannot change: one object serves all


class _Scope(dict[str, Any]):
    """The names that the source uses."""

    def name(self, value: object) -> str:
        """Write a value: as a literal, or as a new name for it."""
        return repr(value) if type(value) in _LITERALS else self.keep(value)

    def keep(self, value: object) -> str:
        """Return a new name for a value."""
        name = f"K{len(self)}"
        self[name] = value
        return name


def _is_single(value: object) -> bool:
    """Return whether there is one object only that is equal to a value and of its type."""
    return value is None or type(value) is bool


def _structure(entry: list[Any]) -> list[Any]:
    """Write a container of fixed values as a container of entries."""
    if entry[0] != "fixed":
        return entry
    value = load_static(entry[1])
    if type(value) is dict:
        return ["dict", [[dump_static(key), ["fixed", dump_static(x)]] for key, x in value.items()]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [["fixed", dump_static(x)] for x in value]]
    return entry


class _Unchanged:
    """Compares values with stored data. Storing a configuration takes long: the last that was equal is remembered."""

    def __init__(self, data: Static) -> None:
        self._data = data
        self._type = type(load_static(data))
        self._last: tuple[Any, dict[str, Any]] | None = None

    def differs(self, value: object) -> bool:
        """Return whether a value is another than the stored one."""
        if self._last is not None and value is self._last[0] and value.__dict__ == self._last[1]:
            return False
        # 2 and 2.0 are equal, as are 0.0 and -0.0, and not the same attribute
        if type(value) is not self._type or bool(dump_static(value) != self._data):
            return True
        if type(value) is float and repr(value) != repr(self._data):
            return True
        if callable(getattr(value, "to_dict", None)):
            self._last = (value, copy.deepcopy(value.__dict__))
        return False


def _compiled(start: str, name: str, writer: _Reader | _Filler) -> Callable[..., Any]:
    source = "\n".join(writer.lines()) + "\n"
    scope = dict(writer.scope)  # Python finds names quickly in a plain dict only
    run_source(start, source, scope)
    found: Callable[..., Any] = scope[name]
    return found


# -- reading ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def reader(cls: type, names: tuple[str, ...] | int, template: str) -> Callable[..., bool]:
    """Write the function that reads objects of a template."""
    # names: all their attributes; what the template does not mention is passed over. The number of them where their
    # names are known from the template: others are not looked at, nor what follows from the leaves.
    # returns: `read(objects, leaves, lengths)`, which appends the leaves of the objects, and the number of tokens that
    # they counted, once for as many as agree. `False`, or an error, when an object is not as the template states;
    # nothing may be used then.
    writer = _Reader(read_template(template), names)
    return _compiled(f"<read {cls.__module__}.{cls.__qualname__}", "read", writer)


class _Reader:
    def __init__(self, template: Template, names: tuple[str, ...] | int) -> None:
        self.template, self.names = template, None if isinstance(names, int) else names
        self.attributes = names if isinstance(names, int) else len(names)
        self.scope = _Scope(Tensor=torch.Tensor, read_like=read_like, TEMPLATE=template)
        self.leaves: list[str] = []
        self.tensors: list[str] = []  # those of the leaves that are tensors
        self.body: list[str] = []
        self.count = 0
        self.orders: list[tuple[str, list[Any]]] = []  # dicts, and the keys that they should have
        self.known: set[str] = set()  # variables that hold what an object before was found to have
        self.floating: set[str] = set()
        self.has_rank: set[str] = set()

    def lines(self) -> Iterator[str]:
        variables = self._unpack()
        late = []
        for name, entry in self.template.items():
            if self.names is not None and (entry[0] in ("dtype", "device", "shape") or self._may_follow(name, entry)):
                late.append((name, entry))
            elif entry[0] not in ("dtype", "device", "shape"):
                self._read(entry, variables[name], name)
        for name, entry in sorted(
            late, key=lambda pair: pair[1][0] != "dtype"
        ):  # what a dtype states, a device need not
            self._check_like(name, entry, variables[name])
        self._check_orders()
        self._remember_window(variables)
        # Python finds names quicker among the arguments
        yield "def read(objects, leaves, lengths, type=type, len=len, int=int, dict=dict, Tensor=Tensor):"
        yield from (f"    {variable} = None" for variable in sorted(self.known))
        yield "    for obj in objects:"
        yield from (f"        {line}" for line in self.body)
        yield from (f"        leaves.append({leaf})" for leaf in self.leaves)  # quicker than a tuple of them
        yield "    return True"

    def _unpack(self) -> dict[str, str]:
        if self.names is None:
            # one more is one that the template does not mention
            self._check(f"len(obj.__dict__) != {self.attributes}")
            window = f"getattr(obj, {_WINDOW_TENSOR!r}, None)"  # not all versions of transformers have it
            return {**{name: f"obj.{name}" for name in self.template}, _WINDOW_TENSOR: window}
        self.body.append("held = obj.__dict__")
        self._check(f"[*held] != {self.scope.name(list(self.names))}")
        variables = dict(zip(self.names, map(self._new, self.names), strict=True))
        self.body.append(f"[{', '.join(variables.values())}] = held.values()")
        return variables

    def _new(self, _: object = None) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def _check(self, condition: str, *, indent: int = 0) -> None:
        self.body.append(f"{' ' * indent}if {condition}: return False")

    def _bind(self, expression: str) -> str:
        """Read an attribute or an item once."""
        if expression.isidentifier():
            return expression
        variable = self._new()
        self.body.append(f"{variable} = {expression}")
        return variable

    def _read(self, entry: list[Any], expression: str, name: str) -> None:
        kind, *rest = _structure(entry)
        if kind == "fixed" and _is_single(load_static(rest[0])):
            self._check(f"{expression} is not {load_static(rest[0])!r}")
            return
        value = self._bind(expression)
        if kind == "tensor":
            self._check(" or ".join([f"type({value}) is not Tensor", *(f"{value} is {x}" for x in self.tensors)]))
            self.leaves.append(value)
            self.tensors.append(value)
        elif kind == "number":
            self._check(f"type({value}) is not int")
            self.leaves.append(value)
        elif kind == "length":
            self._check(f"type({value}) is not int and type({value}) is not Tensor")
            if leaf_types(self.template):  # an object that holds nothing yet has seen nothing
                self.known.add("length")
                differs = f"{value} is not length and (type({value}) is Tensor or {value} != length)"
                self.body.append(f"if {differs}: lengths.append(length := {value})")
        elif kind == "same":
            self._check(f"{value} is not {self.leaves[rest[0]]}")
        elif kind == "dict":
            self._read_dict(rest[0], value, name)
        elif kind in ("list", "tuple"):
            self._check(f"type({value}) is not {kind} or len({value}) != {len(rest[0])}")
            self._read_all(rest[0], value, [name] * len(rest[0]))
        elif kind == "object":
            attributes = list(rest[1])
            cls, names = self.scope.name(part_class(rest[0])), self.scope.name(attributes)
            self._check(f"type({value}) is not {cls} or [*{value}.__dict__] != {names}")
            self._read_all(rest[1].values(), f"{value}.__dict__.values()", attributes)
        else:
            self._check_fixed(rest[0], value)

    def _read_dict(self, pairs: list[Any], value: str, name: str) -> None:
        keys = [load_static(key) for key, _ in pairs]
        self._check(f"type({value}) is not dict or len({value}) != {len(keys)}")
        if len(keys) > 1:  # their order is that of the leaves
            self.orders.append((value, keys))
        for key, (_, below) in zip(keys, pairs, strict=True):
            self._read(below, f"{value}[{self.scope.name(key)}]", name)

    def _read_all(self, entries: Iterable[list[Any]], values: str, names: list[str]) -> None:
        variables = [self._new() for _ in names]
        self.body.append(f"[{', '.join(variables)}] = {values}")
        for entry, variable, name in zip(entries, variables, names, strict=True):
            self._read(entry, variable, name)

    def _check_orders(self) -> None:
        """Compare the keys of all dicts at once: each has as many as it should have, so none can fall to another."""
        if self.orders:
            found = ", ".join(f"*{value}" for value, _ in self.orders)
            # the very strings that stand in the dicts, mostly
            keys = [sys.intern(key) if type(key) is str else key for _, keys in self.orders for key in keys]
            self._check(f"[{found}] != {self.scope.name(keys)}")

    def _check_fixed(self, data: Static, value: str) -> None:
        fixed = load_static(data)
        if type(fixed) in (int, str):
            same = self.scope.keep(fixed)  # what is identical need not be compared
            self._check(f"{value} is not {same} and (type({value}) is not {type(fixed).__name__} or {value} != {same})")
        else:
            self._check(f"{self.scope.name(_Unchanged(data))}.differs({value})")

    def _may_follow(self, name: str, entry: list[Any]) -> bool:
        """Return whether a fixed dtype, device or size would follow a leaf if one had it."""
        return entry[0] == "fixed" and bool(leaf_types(self.template)) and follows_leaf(name, load_static(entry[1]))

    def _check_like(self, name: str, entry: list[Any], value: str) -> None:
        """Check that the template would state the same of this value."""
        leaf = self.leaves[entry[1]] if entry[0] != "fixed" else ""
        if entry[0] == "shape":
            if leaf not in self.has_rank:
                self._check(f"{leaf}.dim() < 2")
            self.has_rank.add(leaf)
            return
        paths = leaf_paths(self.template)
        named = [i for i, path in enumerate(paths) if path.startswith(name.removesuffix(f"_{entry[0]}"))]
        by_name = name.endswith(f"_{entry[0]}") and named[:1] == entry[1:]
        first = not (name.endswith(f"_{entry[0]}") and named) and entry[1:] == [0]
        if entry[0] == "fixed" or not (by_name or first):
            leaves = f"[{', '.join(self.leaves)}]"
            self._check(f"read_like({name!r}, {value}, {leaves}, TEMPLATE) != {self.scope.name(entry)}")
            return
        if entry[0] == "dtype":
            condition, dtype = f"{value} is not {leaf}.dtype", value
        else:
            condition, dtype = f"{value} != {leaf}.device", f"{leaf}.dtype"
        self._check(condition)
        if first and leaf not in self.floating:  # numbers of the model come before counters
            self.floating.add(leaf)
            self.known.add("floating")
            self.body.append(f"if {dtype} is not floating:")
            self._check(f"not {dtype}.is_floating_point", indent=4)
            self.body.append(f"    floating = {dtype}")

    def _remember_window(self, variables: dict[str, str]) -> None:
        window = _window_of(self.template)
        if window is None or _WINDOW_TENSOR not in variables:
            return
        tensors, condition, device = self.scope.keep(window_tensors(window)), "", variables.get("device")
        if device is not None and self.leaves:  # one layer of each device will do
            device = self._bind(device)
            self.known.add("device")
            condition = f"{device} != device and "
        tensor = variables[_WINDOW_TENSOR]
        self.body.append(f"if {condition}type(window := {tensor}) is Tensor:")
        self.body.append(f"    {tensors}.setdefault(window.device, window)")
        if condition:
            self.body.append(f"    device = {device}")


_WINDOW_TENSOR = "_sliding_window_tensor"


def _window_of(template: Template) -> int | None:
    """Return the window of a layer that slides, for which transformers 5 also keeps a tensor."""
    kind, window = template.get("sliding_window", ["", None])[:2]
    return window if kind == "fixed" and type(window) is int and "cumulative_length" in template else None


# -- filling ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def filler(cls: type, template: str) -> Callable[..., None]:
    """Write the function that fills new objects with their leaves: no copy, no ``__init__``, no tensor made."""
    # returns: `fill(objects, length, *columns)`: objects without attributes, the number of tokens seen, and for each
    # leaf of the template the sequence of its values, real ones. It raises when the leaves do not suit the template.
    writer = _Filler(cls, read_template(template))
    return _compiled(f"<fill {cls.__module__}.{cls.__qualname__}", "fill", writer)


class _Filler:
    def __init__(self, cls: type, template: Template) -> None:
        self.cls, self.template = cls, template
        self.scope = _Scope(Tensor=torch.Tensor, load=load_static, part=_part)
        self.used = 0

    def lines(self) -> Iterator[str]:
        types = leaf_types(self.template)
        values, columns = ([f"{letter}{i}" for i in range(len(types))] for letter in "xc")
        window = _window_of(self.template)
        yield f"def fill({', '.join(['objects', 'length', *columns])}):"
        if window is not None:
            yield "    device = window = None"
        if types:
            yield f"    for {', '.join(['obj', *values])} in zip({', '.join(['objects', *columns])}):"
            unfit = (f"type({x}) is not {kind.__name__}" for x, kind in zip(values, types, strict=True))
            yield f"        if {' or '.join(unfit)}: raise TypeError"
        else:
            yield "    for obj in objects:"
        sized = {entry[1] for entry in self.template.values() if entry[0] == "shape"}
        yield from (f"        shape{i} = x{i}.shape" for i in sorted(sized))
        for name, entry in self.template.items():
            yield f"        {self._place(name)} = {self._write(entry)}"
        if window is not None:
            yield from (f"        {line}" for line in self._window(window, bool(types)))

    def _place(self, name: str) -> str:
        described = inspect.getattr_static(self.cls, name, None)
        plain: Any = self.cls.__setattr__
        if plain is object.__setattr__ and not hasattr(described, "__set__") and _is_name(name):
            return f"obj.{name}"
        return f"obj.__dict__[{name!r}]"

    def _write(self, entry: list[Any]) -> str:
        kind, *rest = _structure(entry)
        if kind in ("tensor", "number"):
            self.used += 1
            return f"x{self.used - 1}"
        if kind == "length":
            return "length"
        if kind == "same":
            return f"x{rest[0]}"
        if kind in ("dtype", "device"):
            return f"x{rest[0]}.{kind}"
        if kind == "shape":
            return f"shape{rest[0]}[{rest[1]}]"
        if kind == "dict":
            pairs = (f"{self.scope.name(load_static(key))}: {self._write(below)}" for key, below in rest[0])
            return f"{{{', '.join(pairs)}}}"
        if kind in ("list", "tuple"):
            items = "".join(f"{self._write(below)}, " for below in rest[0])
            return f"[{items}]" if kind == "list" else f"({items})"
        if kind == "object":
            held = (f"{name!r}: {self._write(below)}" for name, below in rest[1].items())
            return f"part({self.scope.name(part_class(rest[0]))}, {{{', '.join(held)}}})"
        fixed = load_static(rest[0])
        # caches of one model share its configuration
        if type(fixed) in _LITERALS or isinstance(fixed, _KEPT) or callable(getattr(fixed, "to_dict", None)):
            return self.scope.name(fixed)
        return f"load({self.scope.name(rest[0])})"  # a new one for each object

    def _window(self, window: int, filled: bool) -> Iterator[str]:
        tensors = self.scope.name(window_tensors(window))
        device = "obj.device" if "device" in self.template else self.scope.name(torch.device("cpu"))
        if filled:
            yield f"if {device} != device:"  # asked once, as long as layers are on one device
            yield f"    device = {device}"
            yield f"    window = {tensors}.get(device)"
            make, cls = self.scope.keep(make_window_tensor), self.scope.keep(self.cls)
            yield f"    if window is None: window = {make}({cls}, {window}, device)"
            yield f"if window is not None: obj.{_WINDOW_TENSOR} = window"
        else:  # what holds nothing yet needs it for its first update: a KeyError leaves that to the slow way
            yield f"obj.{_WINDOW_TENSOR} = {tensors}[{device}]"


def _part(cls: type, held: dict[str, Any]) -> object:
    obj: Any = object.__new__(cls)
    obj.__dict__.update(held)
    return obj


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
