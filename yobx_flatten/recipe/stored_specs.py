"""Check untrusted tree specs before torch reads them: it imports the modules that they name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..errors import StaticDataError
from .safe_names import find_named

_BUILT_IN = {cls.__name__ for cls in (list, dict, set, tuple, int, float, str, bool)}


def check_spec(text: str) -> None:
    """Refuse a spec for which torch would import a module: one with an enum, or a function that fills a dict."""
    for node in _dicts(_parsed(text)):
        context = node.get("context")
        if node.get("type") == "collections.defaultdict" and not _is_built_in(context):
            raise StaticDataError("A tree spec has a defaultdict that is filled by something that is not built in.")
        for part in _dicts(_parsed(context) if isinstance(context, str) else context):
            if "__enum__" in part:
                find_named(part.get("fqn"), "enum")


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a context may be any text where its class reads it itself
        return None


def _is_built_in(context: object) -> bool:
    factory = context if isinstance(context, dict) else {}
    name = factory.get("default_factory_name")
    return factory.get("default_factory_module") == "builtins" and isinstance(name, str) and name in _BUILT_IN


def _dicts(tree: object) -> Iterator[dict[str, Any]]:
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
