"""Walk nested objects: one level, all leaves, their names and dynamic shapes."""

from __future__ import annotations

from .describe import string_type
from .shapes import check_dynamic_shapes, dynamic_shapes, make_dynamic_shapes_kv_cache
from .walk import Leaf, leaves

__all__ = [
    "Leaf",
    "check_dynamic_shapes",
    "dynamic_shapes",
    "leaves",
    "make_dynamic_shapes_kv_cache",
    "string_type",
]
