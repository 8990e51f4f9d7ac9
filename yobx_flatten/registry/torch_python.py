"""Register classes with ``torch.utils._pytree``, which ``torch.export`` uses.

torch's own ``_deregister_pytree_node`` is not enough to go back: it raises ``KeyError`` half-way when two classes were
registered without a serialised name (they share one key), and it cannot bring an earlier registration back. So the four
tables are read and written here, and nowhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..private_names.of_torch import NODE_REGISTRY_LOCK, pytree, register_python_node, serialised_node
from ..recipe.contract import Recipe
from ..recipe.static_codec import dump_static, load_static


class _FoundNode(NamedTuple):
    node: Any  # NodeDef
    serial: Any  # _SerializeNodeDef, None for classes registered by very old code
    constant: bool


class TorchPython:
    """The tables of ``torch.utils._pytree``."""

    name = "torch"

    def read(self, cls: type) -> _FoundNode | None:
        """Return the node, its serialised name and whether it is a constant."""
        node = pytree.SUPPORTED_NODES.get(cls)
        if node is None:
            return None
        return _FoundNode(node, pytree.SUPPORTED_SERIALIZED_TYPES.get(cls), cls in pytree.CONSTANT_NODES)

    def holds(self, recipe: Recipe) -> bool:
        """Return whether torch holds this recipe's functions."""
        node = pytree.SUPPORTED_NODES.get(recipe.cls)
        return node is not None and node.flatten_fn is recipe.flatten and node.unflatten_fn is recipe.unflatten

    def write(self, recipe: Recipe) -> None:
        """Put the recipe into the tables."""
        cls = recipe.cls
        with NODE_REGISTRY_LOCK:
            name = _free_name(recipe)
            dump, load = (None, None) if recipe.plain_static else (dump_static, load_static)
            if cls not in pytree.SUPPORTED_NODES:
                # torch's function also refuses what cannot be a node at all (opaque types)
                register_python_node(
                    cls,
                    recipe.flatten,
                    recipe.unflatten,
                    serialized_type_name=name,
                    to_dumpable_context=dump,
                    from_dumpable_context=load,
                    flatten_with_keys_fn=recipe.flatten_with_keys,
                )
            else:
                # assigned in place: the class keeps its position in the tables, so that going back is exact
                pytree.SUPPORTED_NODES[cls] = pytree.NodeDef(
                    cls, recipe.flatten, recipe.unflatten, recipe.flatten_with_keys
                )
                pytree.SUPPORTED_SERIALIZED_TYPES[cls] = serialised_node(cls, name, dump, load)
                pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = cls
                pytree.CONSTANT_NODES.discard(cls)
            _forget_loaded_specs()

    def restore(self, recipe: Recipe, found: _FoundNode | None) -> None:
        """Restore the tables, unless another library registered the class after us."""
        cls = recipe.cls
        with NODE_REGISTRY_LOCK:
            if cls in pytree.SUPPORTED_NODES and not self.holds(recipe):
                return
            serial = pytree.SUPPORTED_SERIALIZED_TYPES.get(cls)
            name = None if serial is None else serial.serialized_type_name
            name_found = None if found is None or found.serial is None else found.serial.serialized_type_name
            # a name that both have stays where it is, so that the order of the table does not change either
            names = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
            if name is not None and name != name_found and names.get(name) is cls:
                del names[name]
            if found is None:
                pytree.SUPPORTED_NODES.pop(cls, None)
                pytree.SUPPORTED_SERIALIZED_TYPES.pop(cls, None)
            else:
                pytree.SUPPORTED_NODES[cls] = found.node
                if found.serial is None:
                    pytree.SUPPORTED_SERIALIZED_TYPES.pop(cls, None)
                else:
                    pytree.SUPPORTED_SERIALIZED_TYPES[cls] = found.serial
                    # setdefault: all classes without a name share one key, the last one to come owns it
                    pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.setdefault(found.serial.serialized_type_name, cls)
                if found.constant:
                    pytree.CONSTANT_NODES.add(cls)
            _forget_loaded_specs()


def _free_name(recipe: Recipe) -> str:
    """The recipe's name, or a numbered one when another class of that name (such as a local one) holds it already."""
    name, count = recipe.name, 1
    while pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name, recipe.cls) is not recipe.cls:
        count += 1
        name = f"{recipe.name}#{count}"
    return name


def _forget_loaded_specs() -> None:
    # `treespec_loads` caches by text, and would answer with the class that had the name before
    pytree.treespec_loads.cache_clear()
