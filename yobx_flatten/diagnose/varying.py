"""List the axes of nested inputs that a ``dynamic_shapes`` specification lets vary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.export import Dim

from ..trees.shapes import shapes_of_leaves
from ..trees.walk import format_path, leaf_places, own_children


class Axis(NamedTuple):
    """One axis of one tensor."""

    path: str
    number: int
    size: int
    dim: Any


def varying_axes(inputs: Mapping[str, Any], shapes: Mapping[str, Any]) -> Iterator[Axis]:
    """Yield the axes that may vary, in the order of the leaves."""
    for name, value in inputs.items():
        places = leaf_places(value, own_children, name)
        for place, entries in zip(places, shapes_of_leaves(value, shapes[name]), strict=True):
            if not isinstance(place.obj, torch.Tensor) or place.obj.is_nested:
                continue
            for number, dim in (entries or {}).items():
                if dim is not None and type(dim) is not int and dim is not Dim.STATIC:
                    yield Axis(format_path(name, place.keys), number, int(place.obj.shape[number]), dim)
