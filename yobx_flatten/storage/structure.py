"""Convert a nested object to JSON that names its classes and its leaves, and back.

{"node": "builtins:dict", "static": ["x", "cache"], "children": [
    {"leaf": "torch", "name": "x", "dtype": "bfloat16", "shape": [2, 3], "crc32": 2768625435},
    {"node": "transformers.cache_utils:DynamicCache", "static": ["key_0", "value_0"], "children": [...]}]}
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import DamagedFileError, FlattenError, NotRegisteredError, StaticDataError
from ..errors.failures import raised_as
from ..private_names.of_torch import get_node_type, pytree
from ..recipe.aliases import Device, PyTree, Static
from ..recipe.safe_names import import_known
from ..recipe.static_codec import dump_static
from ..trees.walk import check_no_cycles, leaf_names, recipe_for
from .values import Payload, Source, load_trusted, read_leaf, write_leaf


class Structure(NamedTuple):
    """A flattened nested object: its structure as JSON, and the data of its leaves."""

    json: dict[str, Any]  # the metadata; the records of the payloads are parts of it
    payloads: list[Payload]  # payloads of the initializers, in the order of the leaves
    again: list[dict[str, Any]]  # the records of the second and further places of a tensor


def flatten_tree(tree: PyTree) -> Structure:
    """Flatten a nested object; classes that ``register_flattening_functions`` knows need no open with block."""
    check_no_cycles(tree, "values")
    taken: set[str] = set()
    names = iter([unique(name or "value", taken) for name in leaf_names(tree)])
    payloads: list[Payload] = []
    again: list[dict[str, Any]] = []
    seen: dict[int, tuple[Any, str]] = {}  # by id; a reference to the leaf is stored, so that its id is not reused

    def visit(obj: object) -> dict[str, Any]:
        node = _functions_of(type(obj), get_node_type(obj))
        if node is not None:
            children, static = node.flatten(obj)
            cls = f"{type(obj).__module__}:{type(obj).__qualname__}"
            try:
                dumped = dump_static(static)
            except StaticDataError as error:
                raise StaticDataError(f"{type(obj).__qualname__}: {error}") from error
            return {"node": cls, "static": dumped, "children": [visit(child) for child in children]}
        name = next(names)
        # a tensor in two places is stored once, and is read as one tensor
        if id(obj) in seen:
            again.append({"leaf": "same", "name": name, "as": seen[id(obj)][1]})
            return again[-1]
        record, payload = write_leaf(obj, name, where=name)
        if payload is not None:
            payloads.append(payload)
            if record["leaf"] in ("torch", "numpy"):
                seen[id(obj)] = obj, name
        return record

    return Structure(visit(tree), payloads, again)


def unflatten_tree(json: dict[str, Any], source: Source, device: Device) -> PyTree:
    """Rebuild the object that :func:`flatten_tree` flattened."""
    read: dict[str, Any] = {}

    def visit(part: dict[str, Any]) -> Any:
        if "node" in part:
            node = _node_named(part["node"])
            children = [visit(child) for child in part["children"]]
            static = load_trusted(part["static"])
            _check_called(part["node"], node, static)
            with raised_as(functools.partial(_not_rebuilt, part["node"])):
                return node.unflatten(children, static)
        if part["leaf"] == "same":
            return read[part["as"]]
        value = read_leaf(part, source, device)
        if "name" in part:
            read[part["name"]] = value
        return value

    try:
        return visit(json)
    except FlattenError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedFileError(f"The structure cannot be read ({type(error).__name__}: {error}).") from error


def unique(name: str, taken: set[str]) -> str:
    """Return a name that is unique in the graph, and that protobuf can store.

    >>> taken = set()
    >>> unique("a.b", taken), unique("a.b", taken)
    ('a.b', 'a.b#2')
    """
    # taken: names that are in use; the new name is added
    name = name.encode("utf-8", "replace").decode()
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}#{count}"
    taken.add(found)
    return found


class _Functions(NamedTuple):
    flatten: Callable[[Any], tuple[Any, Any]]
    unflatten: Callable[[Any, Any], Any]


def _not_rebuilt(name: str, error: Exception) -> DamagedFileError:
    return DamagedFileError(
        f"{name} cannot be rebuilt by its registration ({type(error).__name__}: {error}). Register the class with the "
        "functions with which the file was written."
    )


def _functions_of(cls: type, node_type: Any) -> _Functions | None:
    recipe = recipe_for(cls)
    if recipe is not None:
        return _Functions(recipe.flatten, recipe.unflatten)
    node = pytree.SUPPORTED_NODES.get(node_type)
    if node is not None and cls is torch.Size:  # torch's own unflatten function returns a tuple
        return _Functions(node.flatten_fn, lambda children, static: torch.Size(children))
    return None if node is None else _Functions(node.flatten_fn, node.unflatten_fn)


def _check_called(name: str, node: _Functions, static: Static) -> None:
    """Refuse static data that torch would call: the class of a named tuple, or the factory of a ``defaultdict``."""
    if name == "collections:defaultdict":
        factory = static[0]
        if factory is not None and not (isinstance(factory, type) and factory.__module__ == "builtins"):
            raise DamagedFileError(f"In this file, {name} has the factory {factory!r}, which is not a built-in type.")
        return
    of_named_tuples = pytree.SUPPORTED_NODES[collections.namedtuple].unflatten_fn  # type: ignore[index] # its key
    own = f"{getattr(static, '__module__', None)}:{getattr(static, '__qualname__', None)}"
    if node.unflatten is of_named_tuples and own != name:
        raise DamagedFileError(f"This file would create an object of {name} with the class {static!r} instead.")


def _node_named(name: str) -> _Functions:
    module, _, qualified = name.partition(":")
    import_known(module)
    cls: Any = sys.modules.get(module)
    for part in qualified.split("."):  # without a module's __getattr__
        cls = vars(cls).get(part) if isinstance(cls, (type, type(sys))) else None
    if not isinstance(cls, type):  # a class that is defined in a function is only in the table
        cls = next((c for c in pytree.SUPPORTED_NODES.copy() if f"{c.__module__}:{c.__qualname__}" == name), None)
    found = None
    if isinstance(cls, type):
        # torch keeps one entry for all named tuples
        named = pytree.is_namedtuple_class(cls) and cls not in pytree.SUPPORTED_NODES
        found = _functions_of(cls, collections.namedtuple if named else cls)
    if found is None:
        where = "" if module in sys.modules else f"import {module}\n    "
        raise NotRegisteredError(
            f"The file holds an object of {module}.{qualified}, which is not registered, and a file cannot cause an "
            f"import. Register the class first:\n    {where}register_class_flattening({qualified}, ...)"
        )
    return found
