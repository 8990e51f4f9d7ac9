"""The static parts of inputs and outputs: a program always has those of its example."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from ...errors import StaticDataError
from ...huggingface.cache_names import is_cache
from ...private_names.of_torch import pytree
from ...recipe.aliases import PyTree
from ...trees.walk import key_name, node_of


def check_static_parts(program: ExportedProgram) -> None:
    """Refuse a program whose outputs hold a size of the trace as static data."""
    for spec in program.call_spec:
        for cls, place, size in [] if spec is None else list(_sizes(spec)):
            raise StaticDataError(
                f"The static part of {cls} holds {size} at {place}, a size that varies in the trace: the program would "
                f"always return the size of its example. Return it among the children of {cls}, as an int."
            )


def _sizes(spec: pytree.TreeSpec) -> Iterator[tuple[str, str, Any]]:
    if spec.type is not None and not spec.is_leaf():
        name = getattr(spec.type, "__qualname__", str(spec.type))
        for place, size in _within(spec.context, "static"):
            yield name, place, size
        for child in spec.children():
            yield from _sizes(child)


def _within(value: object, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield place, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _within(item, f"{place}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _within(item, f"{place}[{key!r}]")


def static_constants(tree: PyTree, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield the numbers, texts and enums that objects of registered classes among the inputs hold as static data."""
    node = None if is_cache(tree) else node_of(tree)  # what is static in a cache is how it is made
    if node is None:
        return
    names = [f"{name}.{key_name(key)}" if name else key_name(key) for key in node.keys]
    if node.recipe is not None and not isinstance(tree, Mapping):
        children = {key_name(key) for key in node.keys}
        for attribute, value in getattr(tree, "__dict__", {}).items():
            if attribute not in children and isinstance(value, (bool, int, float, str, enum.Enum)):
                yield f"{name}.{attribute}", value
    for below, child in zip(names, node.children, strict=True):
        yield from static_constants(child, below)
