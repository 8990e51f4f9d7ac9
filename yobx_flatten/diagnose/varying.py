"""List the axes of nested inputs that a ``dynamic_shapes`` specification lets vary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.export import Dim

from ..trees.node import node_of
from ..trees.walk import format_entry

__all__ = ["Axis", "varying_axes"]


class Axis(NamedTuple):
    """One axis of one tensor."""

    path: str
    number: int
    size: int
    dim: Any


def varying_axes(inputs: Mapping[str, Any], shapes: Mapping[str, Any]) -> Iterator[Axis]:
    """Yield the axes that may vary, in the order of the leaves.

    Args:
        inputs: by parameter name.
        shapes: a specification that fits them.
    """
    for name, value in inputs.items():
        yield from _axes(value, shapes[name], name)


def _axes(obj: Any, shapes: Any, path: str) -> Iterator[Axis]:
    if shapes is None:
        return
    node = node_of(obj)
    if node is not None:
        below = shapes.values() if isinstance(shapes, Mapping) else shapes
        if type(obj) is dict:
            below = [shapes[key] for key in obj]
        for key, child, spec in zip(node.keys, node.children, below, strict=True):
            yield from _axes(child, spec, path + format_entry(key))
    elif isinstance(obj, torch.Tensor) and not obj.is_nested:
        for number, dim in dict(shapes if isinstance(shapes, Mapping) else enumerate(shapes)).items():
            if dim is not None and type(dim) is not int and dim is not Dim.STATIC:
                yield Axis(path, number, int(obj.shape[number]), dim)
