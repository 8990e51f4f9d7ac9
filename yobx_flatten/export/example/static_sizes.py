"""Refuse a traced size in the static part of an output: the program would always return the example's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram

from ...errors import StaticDataError
from ...private_names.of_torch import pytree

__all__ = ["check_static_parts"]


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
