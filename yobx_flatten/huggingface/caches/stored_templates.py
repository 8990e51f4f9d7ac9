"""Read the templates that the names of a cache state as untrusted data.

A name such as ``layer_0=transformers.cache_utils:DynamicIndexedLayer={"keys": ["tensor"], ...}`` can come from a stored
value, a recorded call or a program of anyone. So it is checked before anything is made of it: entries have the kinds
and types of a fixed table, and attributes are no special ones.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator

from ...errors import CacheStructureError
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
    _check(["object", None, template], 0, itertools.count())
    return template  # type: ignore[no-any-return] # checked


def _check(entry: object, depth: int, counter: Iterator[int]) -> None:
    if depth > _DEEPEST or next(counter) > _MOST_ENTRIES:
        raise _refused(f"it has more than {_DEEPEST} levels or {_MOST_ENTRIES} entries")
    below: Iterable[object] = ()
    match entry:
        case ["tensor" | "number" | "length"]:
            pass
        case ["same" | "dtype" | "device", place] if type(place) is int and 0 <= place < _MOST_ENTRIES:
            pass
        case ["shape", place, axis] if type(place) is type(axis) is int and 0 <= place < _MOST_ENTRIES:
            if not -_MOST_AXES <= axis < _MOST_AXES:
                raise _refused(f"it has the axis {axis}")
        case ["list" | "tuple", list(below)]:
            pass
        case ["dict", list(pairs)] if all(type(pair) is list and len(pair) == 2 for pair in pairs):
            below = [value for key, value in pairs if hash(load_static(key)) is not None]
        case ["object", name, dict(held)]:
            # obj.__class__ = ... would make it another object
            if special := [one for one in held if one.startswith("__") or one == "_yobx_placeholders"]:
                raise _refused(f"it sets {special[0]}")
            if depth:
                part_class(name)
            below = held.values()
        case ["fixed", value]:
            load_static(value)
        case _:
            raise _refused(f"it has the entry {str(entry)[:80]}")
    for one in below:
        _check(one, depth + 1, counter)


def _refused(reason: str) -> CacheStructureError:
    return CacheStructureError(f"The names of a cache hold a template that cannot be read: {reason}.")
