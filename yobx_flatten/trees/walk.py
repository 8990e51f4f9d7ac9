"""The leaves that torch's pytree sees, with the way to each, spelled as Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.utils._pytree as pytree

from ..aliases import PyTree
from ..errors import describe_class

__all__ = ["NUMBERS", "children_of", "class_name", "format_entry", "format_key", "torch_leaves"]

# Built-in types whose ``repr`` runs no code of a user.
NUMBERS = (bool, int, float, complex, str, bytes, bytearray, type(None), type(...), range)

_MODULE: Callable[[type], str] = type.__dict__["__module__"].__get__
_QUALNAME: Callable[[type], str] = type.__dict__["__qualname__"].__get__


def torch_leaves(tree: PyTree, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves that torch's pytree sees, with the way to each; an object that holds itself ends the way."""
    inside: set[int] = set()
    # an entry without a path says that its object has been left; it also keeps the object, and so its id, alive
    stack: list[tuple[str | None, Any]] = [(name, tree)]
    while stack:
        path, obj = stack.pop()
        if path is None:
            inside.discard(id(obj))
            continue
        node = pytree.SUPPORTED_NODES.get(pytree._get_node_type(obj))
        if node is None:
            yield path, obj
        elif id(obj) not in inside:
            inside.add(id(obj))
            stack.append((None, obj))
            stack += [(path + format_entry(key), child) for key, child in reversed(children_of(node, obj, path))]


def children_of(node: Any, obj: Any, path: str) -> list[tuple[Any, Any]]:
    """The children of a registered object with their keys."""
    try:
        if node.flatten_with_keys_fn is not None:
            return list(node.flatten_with_keys_fn(obj)[0])
        return [(pytree.SequenceKey(index), child) for index, child in enumerate(node.flatten_fn(obj)[0])]
    except Exception as error:
        error.add_note(f"while {path}, {describe_class(type(obj))}, was taken apart")
        raise


def format_entry(key: Any) -> str:
    """Spell one step of a key path as Python.

    >>> format_entry(pytree.MappingKey("a")), format_entry(pytree.SequenceKey(2)), format_entry(pytree.GetAttrKey("x"))
    ("['a']", '[2]', '.x')
    """
    if isinstance(key, pytree.MappingKey):
        return f"[{format_key(key.key)}]"
    return str(key)


def format_key(key: Any) -> str:
    """Spell the key of a dict; an object whose ``__repr__`` is its own business by its class.

    >>> from collections import OrderedDict
    >>> format_key("a"), format_key((1, "b")), format_key(OrderedDict())
    ("'a'", "(1, 'b')", '<OrderedDict>')
    """
    if any(type(key) is kind for kind in NUMBERS):
        return repr(key)
    if type(key) is tuple:
        inner = [format_key(item) for item in key]
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    return f"<{_QUALNAME(type(key)) if not issubclass(type(key), type) else _QUALNAME(key)}>"


def class_name(cls: type) -> str:
    """The full name of a class, read without asking its metaclass.

    >>> from collections import OrderedDict
    >>> class_name(OrderedDict), class_name(dict)
    ('collections.OrderedDict', 'dict')
    """
    module, name = _MODULE(cls), _QUALNAME(cls)
    return name if module == "builtins" else f"{module}.{name}"
