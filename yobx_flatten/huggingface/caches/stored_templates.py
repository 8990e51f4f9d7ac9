"""Read the templates that the names of a cache state as untrusted data: code is generated from them.

A name such as ``layer_0=transformers.cache_utils:DynamicIndexedLayer={"keys": ["tensor"], ...}`` can come from a stored
value, a recorded call or a program of anyone. So it is checked before anything is made of it: entries have the kinds
and types of a fixed table, and attributes are no special ones.
"""

from __future__ import annotations

import functools
import json

from ...errors import CacheStructureError, describe_class
from ...recipe.static_codec import load_static
from .state import Template
from .stored_classes import part_class

_DEEPEST = 16
_MOST_ENTRIES = 10_000
_MOST_AXES = 16


@functools.lru_cache(maxsize=1024)
def read_template(text: str) -> Template:
    """Return a template that was written as JSON, with every entry checked."""
    # text: what `json.dumps` made of what `state.read_state` returned; shared, not to be changed
    try:
        template = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"it is not JSON ({error})") from None
    _Check().attributes(template, 0)
    return template  # type: ignore[no-any-return] # checked


class _Check:
    """Goes through a template once."""

    def __init__(self) -> None:
        self.count = self.leaves = 0

    def attributes(self, template: object, depth: int) -> None:
        if type(template) is not dict:
            raise _refused(f"attributes are {describe_class(template)}")
        for name, entry in template.items():
            # obj.__class__ = ... would make it another object
            if name.startswith("__") or name == "_yobx_placeholders":
                raise _refused(f"it sets {name}")
            self.entry(entry, depth + 1)

    def entry(self, entry: object, depth: int) -> None:
        self.count += 1
        if depth > _DEEPEST or self.count > _MOST_ENTRIES:
            raise _refused(f"it has more than {_DEEPEST} levels or {_MOST_ENTRIES} entries")
        if type(entry) is not list or not entry or type(entry[0]) is not str:
            raise _refused(f"an entry is {str(entry)[:80]}")
        kind, *rest = entry
        if kind in ("tensor", "number"):
            self.leaves += 1
        lengths = {"tensor": 0, "number": 0, "length": 0, "shape": 2, "object": 2}
        if len(rest) != lengths.get(kind, 1):
            raise _refused(f"{kind!r} has {len(rest)} values")
        if kind in ("same", "dtype", "device", "shape"):
            index, *axes = rest
            is_place = type(index) is int and 0 <= index < _MOST_ENTRIES
            if not is_place or not all(type(axis) is int and -_MOST_AXES <= axis < _MOST_AXES for axis in axes):
                raise _refused(f"{kind!r} has {str(rest)[:80]}, which are no places of leaves and axes")
        elif kind in ("list", "tuple", "dict"):
            self.container(kind, rest[0], depth)
        elif kind == "object":
            part_class(rest[0])
            self.attributes(rest[1], depth)
        elif kind == "fixed":
            load_static(rest[0])
        elif kind not in ("tensor", "number", "length"):
            raise _refused(f"there is an entry of kind {kind!r}")

    def container(self, kind: str, entries: object, depth: int) -> None:
        if type(entries) is not list:
            raise _refused(f"a {kind} holds {describe_class(entries)}")
        for entry in entries:
            if kind != "dict":
                self.entry(entry, depth + 1)
                continue
            if type(entry) is not list or len(entry) != 2:
                raise _refused(f"a dict has the item {str(entry)[:80]}")
            hash(load_static(entry[0]))
            self.entry(entry[1], depth + 1)


def _refused(reason: str) -> CacheStructureError:
    return CacheStructureError(f"The names of a cache hold a template that cannot be read: {reason}.")
