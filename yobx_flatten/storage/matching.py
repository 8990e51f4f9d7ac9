"""Match the leaves of a case with the inputs and outputs of a graph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..recipe.aliases import PyTree
from ..trees.walk import key_name, leaf_places, own_children


def leaves_of(tree: PyTree) -> list[Any]:
    """List the leaves in the order of their names, in the block or outside of it."""
    return [place.obj for place in leaf_places(tree, own_children)]


def plain_names(tree: PyTree) -> list[str]:
    """Name every leaf by its keys alone, as ``torch.export`` does: ``cache.key_0``.

    Exporters that are given no names use these, with underscores.

    >>> plain_names({"input_ids": 1, "extra": [2, {"a": 3}]})
    ['input_ids', 'extra.0', 'extra.1.a']
    """
    return [".".join(map(key_name, place.keys)) for place in leaf_places(tree, own_children)]


def match(graph: Sequence[str], spellings: Sequence[Sequence[str]]) -> dict[str, int]:
    """Find the leaf for each name of a graph.

    A leaf has the name of an input if one of its spellings is equal to it; then if they are equal once all that is
    neither letter nor digit is an underscore, in small letters. The order decides where there are no names to go by:
    where the leaves that are left have none (entries of a tuple, or one value alone), or where not one of the graph's
    names was found (``torch.onnx.export`` calls outputs ``linear_14``).

    >>> match(["x", "cache_key_0"], [["past_key_values.0.key", "cache.key_0"], ["x"]])
    {'x': 1, 'cache_key_0': 0}
    >>> match(["a", "b"], [["0"], ["1"]])
    {'a': 0, 'b': 1}
    >>> match(["a", "b"], [["a"], ["y"]])
    {'a': 0}
    """
    # returns: the position of a leaf by the graph's name. A name without a leaf is not there.
    found: dict[str, int] = {}
    for spell in (str, _plain):
        # the first leaf of a name has it
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
    """Whether a leaf has a name: not where all that leads to it are positions in tuples and lists."""
    return any(part and not part.isdigit() for part in spellings[-1].split("."))


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name).lower()
