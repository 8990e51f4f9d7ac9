"""Visit nested objects, and list and name their leaves as in torch's pytree, such as ``past_key_values.0.key``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.contents import MODULE_OF, QUALNAME_OF, format_key
from ..core.private_names.of_torch import get_node_type, pytree
from ..errors import InvalidArgumentError, describe_class
from ..errors.failures import noted_on_failure
from ..huggingface.cache_names import CACHE, PRESENT, word_in_files
from ..registry.claims import REGISTRY
from ..registry.recipe.aliases import PyTree
from ..registry.recipe.contract import Recipe


class Place(NamedTuple):
    """One of the objects that :func:`walk` yields, with its key path and its parent."""

    keys: tuple[Any, ...]  # the keys from the root to the object
    obj: Any
    parent: Any  # the parent object; `None` for the root
    is_leaf: bool  # whether the object is a leaf, not a node without children
    # in a cycle, the keys from the root to the earlier place of this object; else `None`
    outer: tuple[Any, ...] | None = None


Children = Callable[[Any, tuple[Any, ...]], Sequence[tuple[Any, Any]] | None]
"""Function of an object and its key path that returns the children with their keys, or ``None`` for a leaf."""


def walk(tree: PyTree, children: Children) -> Iterator[Place]:
    """Yield a nested object and all objects inside it, parents before children, in the order of the leaves."""
    above: dict[int, tuple[Any, ...]] = {}
    # an entry without keys ends an object, and keeps a reference to the object, so that its id is not reused
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
    """Yield the path and the value of each leaf that torch's pytree finds; cycles are not followed."""
    for place in walk(tree, torch_children(name)):
        if place.is_leaf:
            yield format_path(name, place.keys), place.obj


def torch_children(name: str) -> Children:
    """Return a function for :func:`walk` that lists children as torch's pytree does."""

    def children(obj: object, keys: tuple[Any, ...]) -> list[tuple[Any, Any]] | None:
        node = pytree.SUPPORTED_NODES.get(get_node_type(obj))
        return None if node is None else children_of(node, obj, name, keys)

    return children


def children_of(node: pytree.NodeDef, obj: object, name: str, keys: tuple[Any, ...] = ()) -> list[tuple[Any, Any]]:
    # keys: the keys from the root to the object; none by default
    # a flatten function of a user may raise any error
    with noted_on_failure(lambda _: f"while {format_path(name, keys)}, {describe_class(type(obj))}, was flattened"):
        if node.flatten_with_keys_fn is not None:
            return list(node.flatten_with_keys_fn(obj)[0])
        return [(pytree.SequenceKey(index), child) for index, child in enumerate(node.flatten_fn(obj)[0])]


def format_path(name: str, keys: Iterable[Any]) -> str:
    """Return the path to an object as a Python expression, such as ``batch['x'][1]``."""
    return name + "".join(map(format_entry, keys))


def format_entry(key: object) -> str:
    """Return one key of a pytree path as Python code: ``['a']``, ``[2]`` or ``.x``."""
    return f"[{format_key(key.key)}]" if isinstance(key, pytree.MappingKey) else str(key)


def class_name(cls: type) -> str:
    """Return the name of a class with its module (``collections.OrderedDict``), or without ``builtins`` (``dict``)."""
    module, name = MODULE_OF(cls), QUALNAME_OF(cls)
    return name if module == "builtins" else f"{module}.{name}"


class Leaf(NamedTuple):
    """One leaf of a nested object: its path, its value and the meaning of its axes.

    Attributes:
        path: key path of the leaf, as a Python expression.
        value: the leaf itself, such as a tensor or a number.
        axes: the names of the dynamic axes, such as ``{0: "batch", 2: "length"}``; all other axes are fixed.
            ``{}`` for fixed shapes; ``None`` if the parent's class was not registered with ``axes`` for this leaf.
    """

    path: str
    value: Any
    axes: dict[int, str] | None


def leaves(tree: PyTree, *, name: str = "tree") -> list[Leaf]:
    """List the leaves of a nested object in the order of ``torch.utils._pytree.tree_leaves``.

    Args:
        tree: any object. An object of an unregistered class is one leaf, even if it contains tensors.
        name: name of ``tree``, the start of each path. ``"tree"`` by default.

    Returns:
        One :class:`Leaf` for each entry of ``torch.utils._pytree.tree_leaves(tree)``.

    Raises:
        InvalidArgumentError: when an object contains itself.

    >>> import torch
    >>> [(leaf.path, leaf.axes) for leaf in leaves({"x": torch.zeros(2), "y": [1]}, name="batch")]
    [("batch['x']", None), ("batch['y'][0]", None)]
    """
    found = []
    for place in leaf_places(tree, torch_children(name), name):
        recipe = REGISTRY.recipe_in_force(type(place.parent)) if place.keys else None
        axes = None if recipe is None or recipe.axes is None else recipe.axes(key_name(place.keys[-1]))
        found.append(Leaf(format_path(name, place.keys), place.obj, axes))
    return found


class Node(NamedTuple):
    keys: list[Any]
    children: list[Any]
    recipe: Recipe | None  # the recipe, if this package registers the class


def node_of(obj: object) -> Node | None:
    """Return the direct children of an object and their keys; ``None`` if the object is a leaf."""
    # classes that `patch_transformers=True` registers are also flattened outside of the with block
    recipe = recipe_for(type(obj))
    if recipe is not None:
        pairs, _ = recipe.flatten_with_keys(obj)
        return Node([key for key, _ in pairs], [child for _, child in pairs], recipe)
    node = pytree.SUPPORTED_NODES.get(get_node_type(obj))
    if node is None:
        return None
    if node.flatten_with_keys_fn is not None:
        pairs, _ = node.flatten_with_keys_fn(obj)
        return Node([key for key, _ in pairs], [child for _, child in pairs], None)
    children, _ = node.flatten_fn(obj)
    children = list(children)
    # transformers < 5.17 registers its outputs without keys, although they are mappings
    if isinstance(obj, Mapping) and len(obj) == len(children):
        return Node([pytree.MappingKey(key) for key in obj], children, None)
    return Node([pytree.SequenceKey(i) for i in range(len(children))], children, None)


def own_children(obj: object, keys: tuple[Any, ...] = ()) -> list[tuple[Any, Any]] | None:
    node = node_of(obj)
    return None if node is None else list(zip(node.keys, node.children, strict=True))


def leaf_places(tree: PyTree, children: Children, name: str = "tree") -> Iterator[Place]:
    """Yield the leaves of a nested object, or raise an error if the object contains itself."""
    for place in walk(tree, children):
        if place.outer is not None:
            inner, outer = format_path(name, place.keys), format_path(name, place.outer)
            raise InvalidArgumentError(f"{format_cycle(inner, outer)}\n    {inner} = None")
        if place.is_leaf:
            yield place


def recipe_for(cls: type) -> Recipe | None:
    """Return this package's flatten functions for a registered class or a transformers cache or output class."""
    recipe = REGISTRY.recipe_in_force(cls)
    if recipe is None and "transformers.cache_utils" in sys.modules and cls.__module__.startswith("transformers."):
        from ..huggingface.recipes import transformers_recipes

        recipe = transformers_recipes().get(cls)
    return recipe


def find_cycle(tree: PyTree, name: str = "tree") -> tuple[str, str] | None:
    """Return two paths of an object that contains itself, such as ``x[0]`` and ``x``; ``None`` without a cycle."""
    for place in walk(tree, own_children):
        if place.outer is not None:
            return format_path(name, place.keys), format_path(name, place.outer)
    return None


def check_no_cycles(tree: PyTree, name: str, *, caller: str = "") -> None:
    # caller: the function that the user called; empty if the name states it
    cycle = find_cycle(tree, name)
    if cycle is not None:
        raise InvalidArgumentError(f"{f'{caller}: ' if caller else ''}{format_cycle(*cycle)}\n    {cycle[0]} = None")


def format_cycle(inner: str, outer: str) -> str:
    return (
        f"{inner} is {outer} itself. Such a cycle cannot be flattened. Leave this reference out of the children of its "
        "class, or set it to None first:"
    )


def key_name(key: object) -> str:
    """Return one key of a pytree path as plain text, without brackets or quotes."""
    attribute = next((one for one in ("key", "idx", "name") if hasattr(key, one)), None)
    return str(key if attribute is None else getattr(key, attribute))


def leaf_names(tree: PyTree, *, cache: str | None = CACHE) -> list[str]:
    """Return a name for every leaf of nested inputs, made from the leaf's path, such as ``extra.1.a``."""
    # cache: the name for a cache on the first level; by default, the input name that generation tools expect. `None`
    # keeps the names as they are.
    # returns: one name per leaf, in the order of `torch.utils._pytree.tree_leaves` inside the with block
    # `walk` is not used, since the class of a node may rename all leaves below the node
    node = node_of(tree)
    if node is None:
        return [""]
    names = []
    for key, child in zip(node.keys, node.children, strict=True):
        first = key_name(key)
        first = first if cache is None else word_in_files(first, child, cache)
        for below in leaf_names(child, cache=None):
            if node.recipe is not None and node.recipe.label is not None:
                names.append(node.recipe.label(first, below))
            else:
                names.append(f"{first}.{below}" if below else first)
    return names


def output_names(outputs: PyTree, taken: Collection[str] = ()) -> list[str]:
    """Return a name for every leaf of a module's outputs, made from the leaf's path, such as ``present.0.key``."""
    # taken: names of inputs. An output with the name of an input is called `output.<name>`, since names are unique in
    # an ONNX graph. For example, Qwen2Audio returns its attention mask.
    names = leaf_names(outputs, cache=PRESENT)
    if isinstance(outputs, (tuple, list)):
        return [f"output.{name}" for name in names]
    return [f"output.{name}" if name in taken else name or "output" for name in names]


def leaves_of(tree: PyTree) -> list[Any]:
    """Return a nested object's leaves in the order of :func:`leaf_names`; cache classes need not be registered."""
    return [place.obj for place in leaf_places(tree, own_children)]


def plain_names(tree: PyTree) -> list[str]:
    """Return the key path of every leaf, as ``torch.export`` names it: ``cache.key_0``."""
    return [".".join(map(key_name, place.keys)) for place in leaf_places(tree, own_children)]


def match(graph: Sequence[str], spellings: Sequence[Sequence[str]]) -> dict[str, int]:
    """Match names of a graph's inputs or outputs with leaves, and return a dict from each name to the leaf's position.

    Names are first compared exactly. Names without an equal name are compared in lower case, with an underscore for
    each character that is not a letter or digit. Leaves are matched by order if no name matches, or if the remaining
    leaves have only numbers as names (entries of a tuple).

    >>> match(["x", "cache_key_0"], [["past_key_values.0.key", "cache.key_0"], ["x"]])
    {'x': 1, 'cache_key_0': 0}
    >>> match(["a", "b"], [["0"], ["1"]])
    {'a': 0, 'b': 1}
    >>> match(["a", "b"], [["a"], ["y"]])
    {'a': 0}
    """
    # spellings: the names of each leaf; the last name is the key path
    # returns: the positions by the names of the graph; a name without a leaf has no entry
    found: dict[str, int] = {}
    for spell in (str, plain_spelling):
        # the first leaf gets a repeated name
        known = {spell(name): place for place in reversed(range(len(spellings))) for name in spellings[place]}
        for name in graph:
            if name not in found and spell(name) in known and known[spell(name)] not in found.values():
                found[name] = known[spell(name)]
    by_order = {name: place for place, name in enumerate(graph)}
    left = [names[-1] for place, names in enumerate(spellings) if place not in found.values()]
    if found and any(part and not part.isdigit() for path in left for part in path.split(".")):
        return found  # a remaining leaf has a name
    if len(graph) == len(spellings) and found.items() <= by_order.items():
        return by_order
    return found


def plain_spelling(name: str) -> str:
    return re.sub(r"\W", "_", name).lower()
