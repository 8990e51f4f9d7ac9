"""The static part of a node (torch says *context*, JAX *aux*) to JSON and back, with nothing lost on the way.

JSON turns tuples into lists and integer keys into strings. A tree spec that went through plain JSON (as in
``torch.export.save``) then differs from the live one, and the loaded program refuses its own inputs. What plain JSON
keeps stays plain, so that a saved program is readable; everything else is a dict with the single key ``"!<kind>"``.
"""

from __future__ import annotations

import enum
import importlib
import json
from collections.abc import Callable
from typing import Any

import torch

from .errors import StaticDataError, describe_class

__all__ = ["dump_static", "load_static", "locate"]

_PLAIN = (str, int, float, bool, type(None))


def locate(name: str) -> Any:
    """Find what ``module:qualified.name`` names."""
    module, _, qualified = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def _name_of(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        found = locate(name)
    except (ImportError, AttributeError):
        found = None
    if found is not cls:
        raise StaticDataError(
            f"Static data holds {describe_class(cls)}, which another process could not find by that name. Define the "
            "class at the top of a module."
        )
    return name


# kind -> (test, to JSON, from JSON). The first row that fits is used, so subclasses stand before their bases.
_KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Any], Callable[[Any], Any]]] = {
    # combined and empty flags have no name
    "flag": (
        lambda v: isinstance(v, enum.Flag),
        lambda v: [_name_of(type(v)), v.value],
        lambda d: locate(d[0])(d[1]),
    ),
    "enum": (
        lambda v: isinstance(v, enum.Enum),
        lambda v: [_name_of(type(v)), v.name],
        lambda d: locate(d[0])[d[1]],
    ),
    "size": (lambda v: type(v) is torch.Size, list, torch.Size),
    "tuple": (
        lambda v: type(v) is tuple,
        lambda v: [dump_static(x) for x in v],
        lambda d: tuple(load_static(x) for x in d),
    ),
    "set": (
        lambda v: type(v) is set,
        lambda v: [dump_static(x) for x in sorted(v, key=repr)],
        lambda d: {load_static(x) for x in d},
    ),
    "frozenset": (
        lambda v: type(v) is frozenset,
        lambda v: [dump_static(x) for x in sorted(v, key=repr)],
        lambda d: frozenset(load_static(x) for x in d),
    ),
    "dict": (
        lambda v: type(v) is dict,
        lambda v: [[dump_static(k), dump_static(x)] for k, x in v.items()],
        lambda d: {load_static(k): load_static(x) for k, x in d},
    ),
    "dtype": (
        lambda v: isinstance(v, torch.dtype),
        lambda v: str(v).removeprefix("torch."),
        lambda d: getattr(torch, d),
    ),
    "device": (lambda v: isinstance(v, torch.device), str, torch.device),
    "slice": (
        lambda v: isinstance(v, slice),
        lambda v: [dump_static(x) for x in (v.start, v.stop, v.step)],
        lambda d: slice(*(load_static(x) for x in d)),
    ),
    "range": (lambda v: isinstance(v, range), lambda v: [v.start, v.stop, v.step], lambda d: range(*d)),
    "complex": (lambda v: type(v) is complex, lambda v: [v.real, v.imag], lambda d: complex(*d)),
    "bytes": (lambda v: type(v) is bytes, lambda v: v.hex(), bytes.fromhex),
    "class": (lambda v: isinstance(v, type), _name_of, locate),
    # configurations of transformers, which several caches keep
    "config": (
        lambda v: callable(getattr(v, "to_dict", None)) and callable(getattr(type(v), "from_dict", None)),
        lambda v: [_name_of(type(v)), json.dumps(v.to_dict(), sort_keys=True, default=str)],
        lambda d: locate(d[0]).from_dict(json.loads(d[1])),
    ),
}


def dump_static(value: Any) -> Any:
    """Turn static data into what :mod:`json` can write.

    Args:
        value: strings, numbers, ``None``, lists, tuples, dicts with any of these as keys, sets, enums, dtypes, devices,
            sizes, slices, ranges, bytes and classes, nested at will.

    Returns:
        Lists, dicts with string keys, strings, numbers and ``None``.

    Raises:
        StaticDataError: for anything else, a tensor first of all: tensors are children, not static data.

    >>> dump_static(["key_0", ("relu", None)])
    ['key_0', {'!tuple': ['relu', None]}]
    >>> load_static(dump_static({1: (2, torch.float16)}))
    {1: (2, torch.float16)}
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [dump_static(x) for x in value]
    if type(value) is dict and all(type(k) is str and not k.startswith("!") for k in value):
        return {k: dump_static(x) for k, x in value.items()}
    for kind, (fits, to_json, _) in _KINDS.items():
        if fits(value):
            return {f"!{kind}": to_json(value)}
    raise StaticDataError(
        f"Static data holds {describe_class(value)}, which cannot be stored with a tree spec. Return it among the "
        "children if it may change between calls, otherwise store its name or its numbers."
    )


def load_static(data: Any) -> Any:
    """Bring back what :func:`dump_static` was given.

    Args:
        data: what :func:`dump_static` returned, possibly after a trip through :mod:`json`.

    Returns:
        Static data that compares equal to the original.

    Raises:
        StaticDataError: when the data was written by a newer version.
    """
    if isinstance(data, list):
        return [load_static(x) for x in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        (key, value), *_ = data.items()
        if key.startswith("!"):
            if key[1:] not in _KINDS:
                raise StaticDataError(
                    f"A stored tree spec holds static data of kind {key[1:]!r}, which this version of yobx_flatten "
                    "does not know. Update it: pip install --upgrade yobx-flatten"
                )
            return _KINDS[key[1:]][2](value)
    return {k: load_static(x) for k, x in data.items()}
