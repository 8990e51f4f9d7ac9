"""Visit nested objects (pytrees), and list the names and the dynamic shapes of their leaves."""

from __future__ import annotations

from .describe import string_type
from .shapes import check_dynamic_shapes, dynamic_shapes, make_dynamic_shapes_kv_cache
from .walk import Leaf, leaves

__all__ = ["Leaf", "check_dynamic_shapes", "dynamic_shapes", "leaves", "make_dynamic_shapes_kv_cache", "string_type"]
