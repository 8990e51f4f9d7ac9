"""What other libraries do to torch's tables, through torch's own functions, and how a test takes it away again."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree


def their_flatten(obj: Any) -> tuple[list[Any], Any]:
    return [], ("theirs", obj)


def their_unflatten(children: Any, static: Any) -> Any:
    return static[1]


def their_keys(obj: Any) -> tuple[list[Any], Any]:
    return [], ("theirs", obj)


def their_fx_rule(obj: Any, spec: Any) -> list[Any]:
    return []


def their_fx_match(obj: Any, spec: Any) -> bool:
    return True


def register(cls: type, *, name: str | None = None, fx: bool = False) -> None:
    """Register the class as another library would; without a name by default, as many do."""
    pytree.register_pytree_node(
        cls, their_flatten, their_unflatten, serialized_type_name=name, flatten_with_keys_fn=their_keys
    )
    if fx:
        fx_pytree.register_pytree_flatten_spec(cls, their_fx_rule, their_fx_match)


def forget(*classes: type) -> None:
    for cls in classes:
        serial = pytree.SUPPORTED_SERIALIZED_TYPES.pop(cls, None)
        pytree.SUPPORTED_NODES.pop(cls, None)
        pytree.CONSTANT_NODES.discard(cls)
        if serial is not None and pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(serial.serialized_type_name) is cls:
            del pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[serial.serialized_type_name]
        fx_pytree.SUPPORTED_NODES.pop(cls, None)
        fx_pytree.SUPPORTED_NODES_EXACT_MATCH.pop(cls, None)
        pytree._cxx_pytree_pending_imports[:] = [
            entry for entry in pytree._cxx_pytree_pending_imports if entry[0][0] is not cls
        ]
        registry = sys.modules.get("optree.registry")
        for namespace in ("torch", "yobx_flatten"):
            if registry is not None and (namespace, cls) in registry._NODETYPE_REGISTRY:
                sys.modules["optree"].unregister_pytree_node(cls, namespace=namespace)


@contextlib.contextmanager
def forgotten_afterwards(*classes: type) -> Iterator[None]:
    # The one key that all unnamed classes share points to the last of them.
    shared = pytree.NO_SERIALIZED_TYPE_NAME_FOUND
    owner = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(shared)
    try:
        yield
    finally:
        if owner is not None:
            pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[shared] = owner
        forget(*classes)
