"""Name the leaves of nested inputs and outputs, and match names: ``past_key_values.0.key``, ``present.length``."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from ..huggingface.cache_names import CACHE, PRESENT, word_in_files
from ..recipe.aliases import PyTree
from .walk import key_name, leaf_places, node_of, own_children


def leaf_names(tree: PyTree, *, cache: str = CACHE) -> list[str]:
    """Return a name for every leaf of nested inputs, made from the leaf's path.

    >>> leaf_names({"input_ids": 1, "extra": [2, {"a": 3}]})
    ['input_ids', 'extra.0', 'extra.1.a']
    >>> leaf_names({"cache": [{"key": 1, "value": 2}]})
    ['past_key_values.0.key', 'past_key_values.0.value']
    """
    # cache: the name for a cache on the first level; by default, the input name that generation tools expect
    # returns: one name per leaf, in the order of `torch.utils._pytree.tree_leaves` inside the with block
    return _leaf_names(tree, cache)


def _leaf_names(tree: PyTree, cache: str | None) -> list[str]:
    # `walk` is not used, since the class of a node may rename all leaves below the node
    node = node_of(tree)
    if node is None:
        return [""]
    names = []
    for key, child in zip(node.keys, node.children, strict=True):
        first = key_name(key)
        first = first if cache is None else word_in_files(first, child, cache)
        for below in _leaf_names(child, None):
            if node.recipe is not None and node.recipe.label is not None:
                names.append(node.recipe.label(first, below))
            else:
                names.append(f"{first}.{below}" if below else first)
    return names


def output_names(outputs: PyTree, taken: Collection[str] = ()) -> list[str]:
    """Return a name for every leaf of a module's outputs, made from the leaf's path.

    >>> output_names(3), output_names((1, 2)), output_names({"logits": 1, "cache": [{"key": 2, "value": 3}]})
    (['output'], ['output.0', 'output.1'], ['logits', 'present.0.key', 'present.0.value'])
    >>> output_names({"logits": 1, "attention_mask": 2}, ["input_ids", "attention_mask"])
    ['logits', 'output.attention_mask']
    """
    # taken: names of inputs. An output with the name of an input is called `output.<name>`, since names are unique in
    # an ONNX graph. For example, Qwen2Audio returns its attention mask.
    names = leaf_names(outputs, cache=PRESENT)
    if isinstance(outputs, (tuple, list)):
        return [f"output.{name}" for name in names]
    return [f"output.{name}" if name in taken else name or "output" for name in names]


def leaves_of(tree: PyTree) -> list[Any]:
    """Return the leaves in the order of :func:`leaf_names`, also outside of a with block."""
    return [place.obj for place in leaf_places(tree, own_children)]


def plain_names(tree: PyTree) -> list[str]:
    """Return the key path of every leaf, as ``torch.export`` names it: ``cache.key_0``.

    Exporters use these names, with underscores, unless names are given.

    >>> plain_names({"input_ids": 1, "extra": [2, {"a": 3}]})
    ['input_ids', 'extra.0', 'extra.1.a']
    """
    return [".".join(map(key_name, place.keys)) for place in leaf_places(tree, own_children)]


def match(graph: Sequence[str], spellings: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the position of the leaf to which each input or output name of a graph belongs.

    First, spellings are compared exactly; then in lower case, with underscores for all characters except letters and
    digits. Leaves are matched by order if the remaining leaves have no names (entries of a tuple, or a single value),
    or if no name of the graph was found (``torch.onnx.export`` names outputs ``linear_14``).

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
    left = [names for place, names in enumerate(spellings) if place not in found.values()]
    if found and any(_is_name(names) for names in left):
        return found
    if len(graph) == len(spellings) and found.items() <= by_order.items():
        return by_order
    return found


def _is_name(spellings: Sequence[str]) -> bool:
    """Return whether the key path of a leaf has a name, not only positions in tuples and lists."""
    return any(part and not part.isdigit() for part in spellings[-1].split("."))


def plain_spelling(name: str) -> str:
    """Return a name in lower case, with underscores for all characters except letters and digits."""
    return re.sub(r"\W", "_", name).lower()
