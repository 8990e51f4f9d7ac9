"""Register classes with torch: ``torch.utils._pytree``, ``torch.fx._pytree`` and ``torch.utils._cxx_pytree``.

torch's ``_deregister_pytree_node`` cannot restore an earlier registration, and fails for some pairs of classes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..core.private_names import of_torch
from ..core.private_names.of_torch import NODE_REGISTRY_LOCK, fx_pytree, pytree, register_python_node, serialised_node
from ..errors import SpecMismatchError, describe_class
from ..errors.failures import undone_on_failure
from .recipe.contract import Flatten, Recipe, Unflatten
from .recipe.static_codec import dump_static, load_static


class _FoundNode(NamedTuple):
    node: Any  # NodeDef
    serial: Any  # _SerializeNodeDef, None for classes registered by very old code
    constant: bool


class TorchPython:
    """Registers classes in the tables of ``torch.utils._pytree``, which ``torch.export`` uses."""

    name = "torch"

    def read(self, cls: type) -> _FoundNode | None:
        node = pytree.SUPPORTED_NODES.get(cls)
        if node is None:
            return None
        return _FoundNode(node, pytree.SUPPORTED_SERIALIZED_TYPES.get(cls), cls in pytree.CONSTANT_NODES)

    def write(self, recipe: Recipe) -> None:
        cls = recipe.cls
        with NODE_REGISTRY_LOCK:
            name, count = recipe.name, 1
            while pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name, cls) is not cls:  # another class has that name
                count += 1
                name = f"{recipe.name}#{count}"
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
            # it caches specs by text, and would return a spec of the former class with this name
            pytree.treespec_loads.cache_clear()

    def restore(self, recipe: Recipe, found: _FoundNode | None) -> None:
        cls = recipe.cls
        with NODE_REGISTRY_LOCK:
            node = pytree.SUPPORTED_NODES.get(cls)
            if node is not None and not (node.flatten_fn is recipe.flatten and node.unflatten_fn is recipe.unflatten):
                return  # other code registered the class after us
            serial, before = pytree.SUPPORTED_SERIALIZED_TYPES.get(cls), None if found is None else found.serial
            name = None if serial is None else serial.serialized_type_name
            name_found = None if before is None else before.serialized_type_name
            # a name that does not change stays in the table, so that the order of the table does not change
            names = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
            if name is not None and name != name_found and names.get(name) is cls:
                del names[name]
            if found is None:
                pytree.SUPPORTED_NODES.pop(cls, None)
            else:
                pytree.SUPPORTED_NODES[cls] = found.node
                if found.constant:
                    pytree.CONSTANT_NODES.add(cls)
            if before is None:
                pytree.SUPPORTED_SERIALIZED_TYPES.pop(cls, None)
            else:
                pytree.SUPPORTED_SERIALIZED_TYPES[cls] = before
                # setdefault: all classes without a name share one key, which the last class owns
                names.setdefault(before.serialized_type_name, cls)
            pytree.treespec_loads.cache_clear()


_MISSING = object()

# Without a rule, fx uses the Python pytree and compares whole specs. A rule of another library, such as that of
# transformers for `DynamicCache`, would silently flatten the inputs in a different order.


class _FoundRules(NamedTuple):
    flatten_spec: Any
    exact_match: Any


class TorchFx:
    """Registers classes in the tables of ``torch.fx._pytree``, with which a graph module flattens its inputs."""

    name = "torch_fx"

    def read(self, cls: type) -> _FoundRules | None:
        if cls not in fx_pytree.SUPPORTED_NODES:
            return None
        exact = fx_pytree.SUPPORTED_NODES_EXACT_MATCH.get(cls, _MISSING)
        return _FoundRules(fx_pytree.SUPPORTED_NODES[cls], exact)

    def write(self, recipe: Recipe) -> None:
        fx_pytree.register_pytree_flatten_spec(recipe.cls, functools.partial(_flatten_spec, recipe))

    def restore(self, recipe: Recipe, found: _FoundRules | None) -> None:
        cls, rule = recipe.cls, fx_pytree.SUPPORTED_NODES.get(recipe.cls)
        is_ours = isinstance(rule, functools.partial) and rule.func is _flatten_spec and rule.args[0] is recipe
        if cls in fx_pytree.SUPPORTED_NODES and not is_ours:
            return  # other code registered the class after us
        rules = found or _FoundRules(_MISSING, _MISSING)
        tables: tuple[dict[Any, Any], ...] = (fx_pytree.SUPPORTED_NODES, fx_pytree.SUPPORTED_NODES_EXACT_MATCH)
        for table, former in zip(tables, rules, strict=True):
            if former is _MISSING:
                table.pop(cls, None)
            else:
                table[cls] = former


def _flatten_spec(recipe: Recipe, obj: object, spec: pytree.TreeSpec) -> list[Any]:
    """Flatten an input of a program; raise an error if its class or static data differ from the program's spec."""
    if type(obj) is not recipe.cls:
        raise SpecMismatchError(
            f"The program was exported with {describe_class(recipe.cls)} among its inputs, but was called with "
            f"{describe_class(type(obj))}."
        )
    children, static = recipe.flatten(obj)
    if static != spec.context:
        raise SpecMismatchError(
            f"This {recipe.cls.__qualname__} does not have the structure the program was exported with.\n"
            f"  exported with: {spec.context}\n  called with:   {static}"
        )
    return children


# `torch.compile` imports the module, usually long after a class was registered. Before the import, torch stores
# registrations in a pending list. torch's own deregistration ignores the list: an unregistered class is registered
# again at the import, and a class that is in the list twice makes every later `torch.compile` in the process fail.

_NAMESPACE = "torch"


class _Pending(NamedTuple):
    place: int  # in torch's list of pending C++ registrations
    entry: tuple[tuple[Any, ...], dict[str, Any]]


class TorchCpp:
    """Registers classes with torch's C++ pytree (optree's namespace ``"torch"``), also before torch imports optree."""

    name = "torch_cpp"

    def read(self, cls: type) -> Any:
        """Return the entry of a class in optree, or torch's pending entry before optree is imported; else ``None``."""
        if not of_torch.cxx_pytree_exists():
            return None
        with NODE_REGISTRY_LOCK:
            if of_torch.cxx_pytree_is_imported():
                return registered(_NAMESPACE, cls)
            for place, entry in enumerate(of_torch.cxx_pytree_pending()):
                if entry[0][0] is cls:
                    return _Pending(place, entry)
            return None

    def write(self, recipe: Recipe) -> None:
        if not of_torch.cxx_pytree_exists():
            return
        with NODE_REGISTRY_LOCK:
            found = self.read(recipe.cls)
            if of_torch.cxx_pytree_is_imported():
                replace(found, _NAMESPACE, recipe.cls, lambda: _register(recipe.cls, recipe.flatten, recipe.unflatten))
            else:
                entry = (recipe.cls, recipe.flatten, recipe.unflatten), {"serialized_type_name": recipe.name}
                place = _drop_pending(recipe.cls, None)
                of_torch.cxx_pytree_pending().insert(sys.maxsize if place is None else place, entry)

    def restore(self, recipe: Recipe, found: object) -> None:
        if not of_torch.cxx_pytree_exists():
            return
        cls = recipe.cls
        with NODE_REGISTRY_LOCK:
            if of_torch.cxx_pytree_is_imported():
                current = registered(_NAMESPACE, cls)
                if current is not None and current.flatten_func is not recipe.flatten:
                    return  # other code registered the class after us
                with order_kept(found):
                    if current is not None:
                        sys.modules["optree"].unregister_pytree_node(cls, namespace=_NAMESPACE)
                    if isinstance(found, _Pending):
                        _register(*found.entry[0])
                    else:
                        register_again(found)
                return
            place = _drop_pending(cls, recipe)
            if isinstance(found, _Pending) and self.read(cls) is None:
                of_torch.cxx_pytree_pending().insert(found.place if place is None else place, found.entry)


def _register(cls: type, flatten: Flatten, unflatten: Unflatten) -> None:
    # torch's own function swaps the arguments of `unflatten` for optree
    sys.modules["torch.utils._cxx_pytree"]._private_register_pytree_node(cls, flatten, unflatten)


def _drop_pending(cls: type, recipe: Recipe | None) -> int | None:
    """Remove a class from torch's list of classes to register with optree later; return its first position."""
    pending, place = of_torch.cxx_pytree_pending(), None
    for index in reversed(range(len(pending))):
        waiting, flatten, _ = pending[index][0]
        if waiting is cls and (recipe is None or flatten is recipe.flatten):
            del pending[index]
            place = index
    return place


def registered(namespace: str, cls: type) -> Any:
    """Return optree's entry of a class in a namespace, or ``None``; optree must be imported."""
    # optree's public function also returns entries of the global namespace
    return _table().get((namespace, cls))


def register_again(found: Any) -> None:
    """Register a class with optree as in its former entry ``found``; do nothing if ``found`` is ``None``."""
    if found is not None:
        sys.modules["optree"].register_pytree_node(
            found.type,
            found.flatten_func,
            found.unflatten_func,
            path_entry_type=found.path_entry_type,
            namespace=found.namespace,
        )


def replace(found: Any, namespace: str, cls: type, register: Callable[[], object]) -> None:
    """Replace optree's entry ``found`` of a class by a call of ``register``; if the call fails, restore the entry."""
    with order_kept(found):
        if found is not None:
            sys.modules["optree"].unregister_pytree_node(cls, namespace=namespace)
        with undone_on_failure(lambda: register_again(found)):
            register()


@contextlib.contextmanager
def order_kept(found: Any) -> Iterator[None]:
    """Restore the order of optree's table of classes after a ``with`` block that registers a class again."""
    table = _table()
    order = list(table) if found is not None else []
    try:
        yield
    finally:
        if order and list(table) != order:
            for key in [key for key in order if key in table] + [key for key in table if key not in order]:
                table[key] = table.pop(key)


def _table() -> dict[Any, Any]:
    return sys.modules["optree.registry"]._NODETYPE_REGISTRY  # type: ignore[no-any-return] # a dict
