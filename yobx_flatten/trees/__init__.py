"""Any nested object: one level of it, its leaves, their names and dynamic shapes, the whole in a line."""

from __future__ import annotations

from .describe import string_type
from .leaf import Leaf, leaves
from .shapes import check_dynamic_shapes, dynamic_shapes, make_dynamic_shapes_kv_cache

__all__ = [
    "Leaf",
    "check_dynamic_shapes",
    "dynamic_shapes",
    "leaves",
    "make_dynamic_shapes_kv_cache",
    "string_type",
]
