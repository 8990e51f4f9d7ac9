"""Register classes as pytree nodes with functions, decorators or a context manager."""

from __future__ import annotations

from .listing import FlatteningRow, flattening_list
from .nodes import (
    mirror,
    pytree_dataclass,
    register,
    register_pytree_node,
    register_pytree_node_class,
    register_pytree_with_keys,
    register_pytree_with_keys_class,
    static_field,
)
from .scopes import (
    Undo,
    make_flattening_function_for_dataclass,
    register_cache_flattening,
    register_class_flattening,
    register_flattening_functions,
    unregister_cache_flattening,
    unregister_class_flattening,
)

__all__ = [
    "FlatteningRow", "Undo", "flattening_list", "make_flattening_function_for_dataclass", "mirror", "pytree_dataclass",
    "register", "register_cache_flattening", "register_class_flattening", "register_flattening_functions",
    "register_pytree_node", "register_pytree_node_class", "register_pytree_with_keys",
    "register_pytree_with_keys_class", "static_field", "unregister_cache_flattening", "unregister_class_flattening",
]  # fmt: skip
