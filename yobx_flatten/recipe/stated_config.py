"""Check a transformers configuration before transformers makes an object of it.

Making one already costs what it states: a name for each label, a kind for each layer. And one that names a kernel of
the hub makes transformers download and run it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_COUNTS = re.compile(r"(layers?|experts?|depths?|blocks|stages|heads|num_labels)$")
_MOST = 10_000  # layers, experts or labels; models of today have some hundred, and 1,000 to 22,000 labels
_MOST_LABELS = 100_000


def objection_to(stated: Mapping[str, Any]) -> str | None:
    """Return why a configuration is not read, as the end of a sentence; ``None`` for one that may be.

    >>> objection_to({"num_hidden_layers": 32, "text_config": {"num_labels": 10**9}})
    'states num_labels = 1,000,000,000, and 100,000 are the most'
    >>> objection_to({"attn_implementation": "owner/kernel"})
    "states attn_implementation = 'owner/kernel', code of the hub: take it out to compute with transformers' own"
    """
    names = stated.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return f"states architectures = {names!r}, which is not a list of names"
    for key, value in _leaves(stated):
        last = key.rpartition(".")[2]
        if type(value) is int and _COUNTS.search(last):
            most = _MOST_LABELS if last.endswith("labels") else _MOST
            if value > most:
                return f"states {last} = {value:,}, and {most:,} are the most"
        if isinstance(value, str) and "attn_implementation" in key and "/" in value:
            return f"states {key} = {value!r}, code of the hub: take it out to compute with transformers' own"
    return None


def _leaves(stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The parts of a document with the names that lead to them, those of inner configurations included."""
    waiting: list[tuple[str, Any]] = [("", stated)]
    while waiting:
        key, one = waiting.pop()
        if isinstance(one, Mapping):
            waiting.extend((f"{key}.{name}".lstrip("."), value) for name, value in one.items())
        elif isinstance(one, list):
            waiting.extend((key, value) for value in one)
        else:
            yield key, one
