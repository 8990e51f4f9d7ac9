"""The one walk over a nested object, and its leaves as torch sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..core.contents import format_key
from ..errors import describe_class
from ..errors.failures import noted_on_failure
from ..private_names.of_torch import get_node_type, pytree
from ..recipe.aliases import PyTree

_MODULE: Callable[[type], str] = type.__dict__["__module__"].__get__
_QUALNAME: Callable[[type], str] = type.__dict__["__qualname__"].__get__


class Place(NamedTuple):
    """One object of a walk."""

    keys: tuple[Any, ...]  # the keys on the way to it
    obj: Any
    parent: Any  # the object that holds it; `None` for the one that the walk began with
    is_leaf: bool  # whether it has no children because it is not a node
    # the keys on the way to the same object further up, where an object holds itself; else `None`
    outer: tuple[Any, ...] | None = None


Children = Callable[[Any, tuple[Any, ...]], Sequence[tuple[Any, Any]] | None]
"""Takes an object and the keys on the way to it; returns its children with their keys, ``None`` for a leaf."""


def walk(tree: PyTree, children: Children) -> Iterator[Place]:
    """Walk over a nested object from above to below, in the order of its leaves.

    >>> tree = {"x": [1]}
    >>> tree["x"].append(tree)
    >>> [(format_path("tree", p.keys), p.is_leaf, p.outer) for p in walk(tree, torch_children("tree"))]
    [('tree', False, None), ("tree['x']", False, None), ("tree['x'][0]", True, None), ("tree['x'][1]", False, ())]
    """
    # returns: an iterator over the object and everything below it. What is below an object that holds itself comes
    # once.
    above: dict[int, tuple[Any, ...]] = {}
    # an entry without keys states that its object has been left; it also keeps the object, and so its id, alive
    stack: list[tuple[tuple[Any, ...] | None, Any, Any]] = [((), tree, None)]
    while stack:
        keys, obj, parent = stack.pop()
        if keys is None:
            del above[id(obj)]
            continue
        if id(obj) in above:
            yield Place(keys, obj, parent, False, above[id(obj)])
            continue
        below = children(obj, keys)
        yield Place(keys, obj, parent, below is None)
        if below:
            above[id(obj)] = keys
            stack.append((None, obj, None))
            stack += [((*keys, key), child, obj) for key, child in reversed(below)]


def torch_leaves(tree: PyTree, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves that torch's pytree sees, with the way to each; an object that holds itself ends the way."""
    # name: what it is called; the paths begin with it
    for place in walk(tree, torch_children(name)):
        if place.is_leaf:
            yield format_path(name, place.keys), place.obj


def torch_children(name: str) -> Children:
    """Return what :func:`walk` asks for the children that torch's pytree sees."""

    def children(obj: object, keys: tuple[Any, ...]) -> list[tuple[Any, Any]] | None:
        node = pytree.SUPPORTED_NODES.get(get_node_type(obj))
        return None if node is None else children_of(node, obj, name, keys)

    return children


def children_of(node: pytree.NodeDef, obj: object, name: str, keys: tuple[Any, ...] = ()) -> list[tuple[Any, Any]]:
    """Return the children of a registered object with their keys."""
    # keys: the keys on the way from there to the object; none by default
    # of a user's flatten function
    with noted_on_failure(lambda _: f"while {format_path(name, keys)}, {describe_class(type(obj))}, was flattened"):
        if node.flatten_with_keys_fn is not None:
            return list(node.flatten_with_keys_fn(obj)[0])
        return [(pytree.SequenceKey(index), child) for index, child in enumerate(node.flatten_fn(obj)[0])]


def format_path(name: str, keys: Iterable[Any]) -> str:
    """Write the way to an object as Python.

    >>> format_path("batch", [pytree.MappingKey("x"), pytree.SequenceKey(1)])
    "batch['x'][1]"
    """
    return name + "".join(map(format_entry, keys))


def format_entry(key: object) -> str:
    """Spell one step of a key path as Python.

    >>> format_entry(pytree.MappingKey("a")), format_entry(pytree.SequenceKey(2)), format_entry(pytree.GetAttrKey("x"))
    ("['a']", '[2]', '.x')
    """
    if isinstance(key, pytree.MappingKey):
        return f"[{format_key(key.key)}]"
    return str(key)


def class_name(cls: type) -> str:
    """The full name of a class, read without asking its metaclass.

    >>> from collections import OrderedDict
    >>> class_name(OrderedDict), class_name(dict)
    ('collections.OrderedDict', 'dict')
    """
    module, name = _MODULE(cls), _QUALNAME(cls)
    return name if module == "builtins" else f"{module}.{name}"
