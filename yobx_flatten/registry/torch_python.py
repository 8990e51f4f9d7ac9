"""Register classes with ``torch.utils._pytree``, which ``torch.export`` uses, and with ``torch.fx._pytree``.

torch's own ``_deregister_pytree_node`` cannot restore an earlier registration. If two classes have no serialized name,
it also raises ``KeyError`` after it has changed some tables. So only this file reads and writes the four tables.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..errors import SpecMismatchError, describe_class
from ..private_names.of_torch import NODE_REGISTRY_LOCK, fx_pytree, pytree, register_python_node, serialised_node
from ..recipe.contract import Recipe
from ..recipe.static_codec import dump_static, load_static


class _FoundNode(NamedTuple):
    node: Any  # NodeDef
    serial: Any  # _SerializeNodeDef, None for classes registered by very old code
    constant: bool


class TorchPython:
    """The classes in the tables of ``torch.utils._pytree``, which ``torch.export`` uses."""

    name = "torch"

    def read(self, cls: type) -> _FoundNode | None:
        """Return torch's node of a class, its serialized name, and whether it is a constant, or ``None``."""
        node = pytree.SUPPORTED_NODES.get(cls)
        if node is None:
            return None
        return _FoundNode(node, pytree.SUPPORTED_SERIALIZED_TYPES.get(cls), cls in pytree.CONSTANT_NODES)

    def holds(self, recipe: Recipe) -> bool:
        """Return whether torch has a class registered with the functions in ``recipe``."""
        node = pytree.SUPPORTED_NODES.get(recipe.cls)
        return node is not None and node.flatten_fn is recipe.flatten and node.unflatten_fn is recipe.unflatten

    def write(self, recipe: Recipe) -> None:
        """Register a class in torch's tables, replacing the class's current registration."""
        cls = recipe.cls
        with NODE_REGISTRY_LOCK:
            name = _free_name(recipe)
            dump, load = (None, None) if recipe.plain_static else (dump_static, load_static)
            if cls not in pytree.SUPPORTED_NODES:
                # torch's function also refuses opaque types, which can never be nodes
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
                # an assignment keeps the position of the class in the tables
                pytree.SUPPORTED_NODES[cls] = pytree.NodeDef(
                    cls, recipe.flatten, recipe.unflatten, recipe.flatten_with_keys
                )
                pytree.SUPPORTED_SERIALIZED_TYPES[cls] = serialised_node(cls, name, dump, load)
                pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = cls
                pytree.CONSTANT_NODES.discard(cls)
            _forget_loaded_specs()

    def restore(self, recipe: Recipe, found: _FoundNode | None) -> None:
        """Restore the registration ``found``, unless other code has registered the class after this package."""
        cls = recipe.cls
        with NODE_REGISTRY_LOCK:
            if cls in pytree.SUPPORTED_NODES and not self.holds(recipe):
                return
            serial = pytree.SUPPORTED_SERIALIZED_TYPES.get(cls)
            name = None if serial is None else serial.serialized_type_name
            name_found = None if found is None or found.serial is None else found.serial.serialized_type_name
            # a name that does not change stays in the table, so that the order of the table does not change
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
                    # setdefault: all classes without a name share one key, which the last class owns
                    pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.setdefault(found.serial.serialized_type_name, cls)
                if found.constant:
                    pytree.CONSTANT_NODES.add(cls)
            _forget_loaded_specs()


def _free_name(recipe: Recipe) -> str:
    """Return the serialized name for a class, with a number if a different class has that name."""
    name, count = recipe.name, 1
    while pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name, recipe.cls) is not recipe.cls:
        count += 1
        name = f"{recipe.name}#{count}"
    return name


def _forget_loaded_specs() -> None:
    # `treespec_loads` caches specs by text, and would return a spec of the former class with this name
    pytree.treespec_loads.cache_clear()


_MISSING = object()


# Register classes with `torch.fx._pytree`, by which a graph module flattens its inputs.
#
# Without a rule, fx uses the Python pytree and compares whole specs. A rule of another library, such as that of
# transformers for `DynamicCache`, would silently flatten the inputs in a different order.


class _FoundRules(NamedTuple):
    flatten_spec: Any
    exact_match: Any


class TorchFx:
    """The classes in the tables of ``torch.fx._pytree``, by which a graph module flattens its inputs."""

    name = "torch_fx"

    def read(self, cls: type) -> _FoundRules | None:
        """Return the two rules that ``torch.fx`` has for a class, or ``None`` if the class is not registered."""
        if cls not in fx_pytree.SUPPORTED_NODES:
            return None
        exact = fx_pytree.SUPPORTED_NODES_EXACT_MATCH.get(cls, _MISSING)
        return _FoundRules(fx_pytree.SUPPORTED_NODES[cls], exact)

    def holds(self, recipe: Recipe) -> bool:
        """Return whether the rule of ``torch.fx`` for a class was made from the functions in ``recipe``."""
        rule = fx_pytree.SUPPORTED_NODES.get(recipe.cls)
        return isinstance(rule, functools.partial) and rule.func is _flatten_spec and rule.args[0] is recipe

    def write(self, recipe: Recipe) -> None:
        """Register a rule for a class with ``torch.fx``, replacing the class's current rule."""
        fx_pytree.register_pytree_flatten_spec(recipe.cls, functools.partial(_flatten_spec, recipe))

    def restore(self, recipe: Recipe, found: _FoundRules | None) -> None:
        """Restore the two rules ``found``, unless other code has registered the class after this package."""
        cls = recipe.cls
        if cls in fx_pytree.SUPPORTED_NODES and not self.holds(recipe):
            return
        if found is None:
            fx_pytree.SUPPORTED_NODES.pop(cls, None)
            fx_pytree.SUPPORTED_NODES_EXACT_MATCH.pop(cls, None)
            return
        fx_pytree.SUPPORTED_NODES[cls] = found.flatten_spec
        if found.exact_match is _MISSING:
            fx_pytree.SUPPORTED_NODES_EXACT_MATCH.pop(cls, None)
        else:
            fx_pytree.SUPPORTED_NODES_EXACT_MATCH[cls] = found.exact_match


def _flatten_spec(recipe: Recipe, obj: object, spec: pytree.TreeSpec) -> list[Any]:
    """Flatten an object as the spec of a program states, or raise an error that shows the difference."""
    if type(obj) is not recipe.cls:
        raise SpecMismatchError(
            f"The program was exported with {describe_class(recipe.cls)} here, but it was called with "
            f"{describe_class(type(obj))}."
        )
    children, static = recipe.flatten(obj)
    if static != spec.context:
        raise SpecMismatchError(
            f"This {recipe.cls.__qualname__} does not have the structure the program was exported with.\n"
            f"  exported with: {spec.context}\n  called with:   {static}"
        )
    return children
