"""Register classes in the pytree tables of torch, optree and JAX, and restore the earlier entries of the tables.

torch has three tables: ``torch.utils._pytree``, ``torch.fx._pytree`` and ``torch.utils._cxx_pytree``. torch's own
``_deregister_pytree_node`` cannot restore an earlier registration, and fails for some pairs of classes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

from ..core.private_names import of_torch
from ..core.private_names.of_torch import NODE_REGISTRY_LOCK, fx_pytree, pytree, register_python_node, serialised_node
from ..errors import AlreadyRegisteredError, SpecMismatchError, describe_class
from ..errors.failures import result_or, undone_on_failure
from .patches import LOCK, ImportHook
from .recipe.aliases import Static
from .recipe.contract import Flatten, Recipe, Unflatten, hashable, original
from .recipe.static_codec import dump_static, load_static

NAMESPACE = "yobx_flatten"  # in optree

logger = logging.getLogger("yobx_flatten")


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


_FX_TABLES: tuple[dict[Any, Any], ...] = (fx_pytree.SUPPORTED_NODES, fx_pytree.SUPPORTED_NODES_EXACT_MATCH)


class TorchFx:
    """Registers classes in the tables of ``torch.fx._pytree``, with which a graph module flattens its inputs."""

    name = "torch_fx"

    def read(self, cls: type) -> list[Any] | None:
        return [table.get(cls, _MISSING) for table in _FX_TABLES] if cls in fx_pytree.SUPPORTED_NODES else None

    def write(self, recipe: Recipe) -> None:
        fx_pytree.register_pytree_flatten_spec(recipe.cls, functools.partial(_flatten_spec, recipe))

    def restore(self, recipe: Recipe, found: list[Any] | None) -> None:
        cls, rule = recipe.cls, fx_pytree.SUPPORTED_NODES.get(recipe.cls)
        is_ours = isinstance(rule, functools.partial) and rule.func is _flatten_spec and rule.args[0] is recipe
        if cls in fx_pytree.SUPPORTED_NODES and not is_ours:
            return  # other code registered the class after us
        for table, former in zip(_FX_TABLES, found or [_MISSING, _MISSING], strict=True):
            if former is _MISSING:
                table.pop(cls, None)
            else:
                table[cls] = former


def _flatten_spec(recipe: Recipe, obj: object, spec: pytree.TreeSpec) -> list[Any]:
    """Flatten an input of a program; raise an error if its class or static data differ from the program's spec."""
    if type(obj) is not recipe.cls:
        raise SpecMismatchError(
            f"The program was exported with {describe_class(recipe.cls)} among its inputs, but this call "
            f"passes {describe_class(type(obj))} instead."
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

_OF_TORCH = "torch"  # a namespace of optree


class _Pending(NamedTuple):
    place: int  # in torch's list of pending C++ registrations
    entry: tuple[tuple[Any, ...], dict[str, Any]]


class TorchCpp:
    """Registers classes with torch's C++ pytree, which is the namespace ``"torch"`` of optree."""

    name = "torch_cpp"

    def read(self, cls: type) -> Any:
        """Return the entry of a class in torch's C++ pytree, or ``None`` if the class is not registered."""
        if not of_torch.cxx_pytree_exists():
            return None
        with NODE_REGISTRY_LOCK:
            if of_torch.cxx_pytree_is_imported():
                return _registered(_OF_TORCH, cls)
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
                _replace(found, _OF_TORCH, recipe.cls, lambda: _register(recipe.cls, recipe.flatten, recipe.unflatten))
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
                current = _registered(_OF_TORCH, cls)
                if current is not None and current.flatten_func is not recipe.flatten:
                    return  # other code registered the class after us
                _replace(current, _OF_TORCH, cls, functools.partial(_register_again, found))
                return
            place = _drop_pending(cls, recipe)
            if isinstance(found, _Pending) and self.read(cls) is None:
                of_torch.cxx_pytree_pending().insert(found.place if place is None else place, found.entry)


def _register(cls: type, flatten: Flatten, unflatten: Unflatten) -> None:
    # torch's own function swaps the arguments of `unflatten` for optree
    sys.modules["torch.utils._cxx_pytree"]._private_register_pytree_node(cls, flatten, unflatten)


def _drop_pending(cls: type, recipe: Recipe | None) -> int | None:
    """Remove a class from torch's list of pending registrations, and return its position in the list."""
    pending, place = of_torch.cxx_pytree_pending(), None
    for index in reversed(range(len(pending))):
        waiting, flatten, _ = pending[index][0]
        if waiting is cls and (recipe is None or flatten is recipe.flatten):
            del pending[index]
            place = index
    return place


def _registered(namespace: str, cls: type) -> Any:
    """Return optree's entry of a class in a namespace, or ``None``; optree must be imported."""
    # optree's public function also returns entries of the global namespace
    return _table().get((namespace, cls))


def _register_again(found: Any) -> None:
    """Register a class with optree as in its former entry ``found``; do nothing if ``found`` is ``None``."""
    if isinstance(found, _Pending):
        _register(*found.entry[0])
    elif found is not None:
        sys.modules["optree"].register_pytree_node(
            found.type,
            found.flatten_func,
            found.unflatten_func,
            path_entry_type=found.path_entry_type,
            namespace=found.namespace,
        )


def _replace(current: Any, namespace: str, cls: type, register: Callable[[], object]) -> None:
    """Replace optree's entry of a class by a call of ``register``; if the call fails, restore the entry ``current``."""
    table = _table()
    order = list(table) if current is not None else []
    try:
        if current is not None:
            sys.modules["optree"].unregister_pytree_node(cls, namespace=namespace)
        with undone_on_failure(functools.partial(_register_again, current)):
            register()
    finally:
        # a class that is registered again keeps its position in optree's table
        now = list(table)
        if (namespace, cls) in order and (namespace, cls) in table and now != order:
            for key in dict.fromkeys([*order, *now]):
                if key in table:
                    table[key] = table.pop(key)


def _table() -> dict[Any, Any]:
    return sys.modules["optree.registry"]._NODETYPE_REGISTRY  # type: ignore[no-any-return] # a dict


# Register classes with optree and JAX, at once or, if the library is not imported yet, right after its import.


class _Optional:
    """Registers classes with a library that may be imported later; until its import, the classes are stored here."""

    # a method holds the lock from the check of the library until the change is done, so that no other thread imports
    # the library between the two

    name: str

    def __init__(self) -> None:
        self._recipes: dict[type, Recipe] = {}  # until the import
        self._hook = ImportHook(self.name.__eq__, self._imported)
        self._there = False

    def read(self, cls: type) -> Any:
        with LOCK:
            return self._read(cls) if self._is_there() else self._recipes.get(cls)

    def write(self, recipe: Recipe) -> None:
        with LOCK:
            if self._is_there():
                self._write(recipe)
                return
            if not self._recipes:
                self._hook.install()
            self._recipes[recipe.cls] = recipe

    def restore(self, recipe: Recipe, found: object) -> None:
        with LOCK:
            if self._is_there():
                self._restore(recipe, found)
            elif self._recipes.get(recipe.cls) is recipe:
                del self._recipes[recipe.cls]
                if not self._recipes:
                    self._hook.remove()

    def _is_there(self) -> bool:
        """Return whether the library is imported; if so, register the classes whose registration was deferred."""
        # no import and no wait for an import: the importing thread may wait for our lock
        if not self._there:
            module = sys.modules.get(self.name)
            # importlib sets `_initializing` while a module is being imported
            if module is None or getattr(module.__spec__, "_initializing", False):
                return False
            self._imported(module)
        return True

    def _imported(self, module: ModuleType) -> None:
        with LOCK:
            self._there = True
            self._hook.remove()
            recipes, self._recipes = self._recipes, {}
            for recipe in recipes.values():
                # an error must not break the import of the library
                result_or(functools.partial(self._write, recipe), functools.partial(_log_refusal, module, recipe))

    # read and change the registry of the imported library

    def _read(self, cls: type) -> Any: ...

    def _write(self, recipe: Recipe) -> None: ...

    def _restore(self, recipe: Recipe, found: object) -> None: ...


def _log_refusal(module: ModuleType, recipe: Recipe, error: Exception) -> None:
    logger.error("%s did not accept %s", module.__name__, recipe.cls, exc_info=error)


class Optree(_Optional):
    """Registers classes in optree's namespace ``"yobx_flatten"``."""

    name = "optree"

    def _read(self, cls: type) -> Any:
        return _registered(NAMESPACE, cls)

    def _write(self, recipe: Recipe) -> None:
        optree = sys.modules["optree"]

        def register() -> None:
            optree.register_pytree_node(
                recipe.cls,
                functools.partial(_flatten if recipe.has_keys else _flatten_by_position, recipe),
                lambda static, children: recipe.unflatten(list(children), static),
                path_entry_type=_entry_type() if recipe.has_keys else optree.FlattenedEntry,
                namespace=NAMESPACE,
            )

        _replace(_registered(NAMESPACE, recipe.cls), NAMESPACE, recipe.cls, register)

    def _restore(self, recipe: Recipe, found: object) -> None:
        current = _registered(NAMESPACE, recipe.cls)
        function: Any = getattr(current, "flatten_func", None)
        is_partial = isinstance(function, functools.partial)
        is_ours = is_partial and function.func in (_flatten, _flatten_by_position) and function.args[0] is recipe
        if current is not None and not is_ours:
            return  # other code registered the class after us
        _replace(current, NAMESPACE, recipe.cls, functools.partial(_register_again, found))


def _flatten(recipe: Recipe, obj: object) -> tuple[list[Any], Any, list[Any]]:
    pairs, static = recipe.flatten_with_keys(obj)
    return [child for _, child in pairs], static, [_entry(key) for key, _ in pairs]


def _flatten_by_position(recipe: Recipe, obj: object) -> tuple[list[Any], Any]:
    return recipe.flatten(obj)


class _Attribute(str):
    """Entry of an optree path for a child that is an attribute; it is shown as the attribute's name."""

    __slots__ = ()


class _Index(int):
    """Entry of an optree path for a child in a sequence; it is shown as the child's index."""


def _entry(key: pytree.KeyEntry) -> Any:
    if isinstance(key, pytree.GetAttrKey):
        return _Attribute(key.name)
    if isinstance(key, pytree.SequenceKey):
        return _Index(key.idx)
    return key.key if isinstance(key, pytree.MappingKey) else key


@functools.cache
def _entry_type() -> Any:
    """Return a class whose constructor creates optree's path entry for an attribute, an index or a key."""
    optree = sys.modules["optree"]

    class KeyedEntry(optree.PyTreeEntry):  # type: ignore[misc,name-defined] # optree counts as untyped
        def __new__(cls, entry: object, type: type, kind: Any) -> Any:
            if isinstance(entry, _Attribute):
                return optree.GetAttrEntry(str(entry), type, kind)
            if isinstance(entry, _Index):
                return optree.SequenceEntry(int(entry), type, kind)
            return optree.MappingEntry(entry, type, kind)

    return KeyedEntry


# JAX cannot remove or replace the registration of a class, because compiled functions rely on the registration
# (https://github.com/jax-ml/jax/issues/21666). So the functions that are registered with JAX look up the recipe:
#
#     registered                      JAX uses the recipe
#     unregistered                    JAX continues to use the last recipe, so that compiled functions still work
#     registered again, same recipe   nothing is compiled again
#     registered again, new recipe    JAX uses the new recipe and compiles functions again; earlier tree definitions
#                                     continue to use the earlier recipe


class Jax(_Optional):
    """Registers classes in JAX's pytree registry."""

    name = "jax"

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[type, _Node] = {}  # entries are never removed, as in JAX

    def _read(self, cls: type) -> Any:
        if (node := self._nodes.get(cls)) is not None:
            return node.in_force
        tree_util = sys.modules["jax"].tree_util
        if hasattr(tree_util, "is_tree_node"):
            is_node = tree_util.is_tree_node(cls)
        else:  # older versions of JAX have no public function for this
            is_node = cls in sys.modules["jax._src.tree_util"]._registry
        return "registered with JAX by other code" if is_node else None

    def _write(self, recipe: Recipe) -> None:
        if (node := self._nodes.get(recipe.cls)) is not None:
            node.put(recipe)
            return
        node = _Node(recipe)
        try:
            sys.modules["jax"].tree_util.register_pytree_with_keys(
                recipe.cls, node.flatten_with_keys, node.unflatten, node.flatten
            )
        except ValueError as error:
            raise AlreadyRegisteredError(
                f"{describe_class(recipe.cls)} was registered with JAX by other code, and JAX cannot replace a "
                f"registration ({error}). Leave JAX out: backends=('torch',)"
            ) from error
        self._nodes[recipe.cls] = node

    def _restore(self, recipe: Recipe, found: object) -> None:
        node = self._nodes.get(recipe.cls)
        if node is not None and node.in_force is recipe:
            node.in_force = None  # JAX, which cannot unregister a class, continues to call its functions


class _Node:
    """Functions registered with JAX for one class, which call the flatten functions that the user registered last."""

    def __init__(self, recipe: Recipe) -> None:
        self.in_force: Recipe | None = recipe
        self._recipes = [recipe]
        self._current = (0, recipe)  # one tuple, so that another thread never reads a number with a different recipe

    def put(self, recipe: Recipe) -> None:
        same = (i for i, known in enumerate(self._recipes) if known.same_functions(recipe))
        number = next(same, len(self._recipes))
        self._recipes[number : number + 1] = [recipe]
        self._current, self.in_force = (number, recipe), recipe

    def flatten(self, obj: object) -> tuple[list[Any], Any]:
        number, recipe = self._current
        children, static = recipe.flatten(obj)
        return children, _aux(number, static)

    def flatten_with_keys(self, obj: object) -> tuple[list[tuple[Any, Any]], Any]:
        number, recipe = self._current
        pairs, static = recipe.flatten_with_keys(obj)
        return [(_jax_key(key), child) for key, child in pairs], _aux(number, static)

    def unflatten(self, aux: Static, children: Iterable[Any]) -> Any:
        number, static = (aux.number, aux.static) if type(aux) is _Later else (0, aux)
        return self._recipes[number].unflatten(list(children), original(static))


@dataclasses.dataclass(frozen=True, slots=True)
class _Later:
    """Static data of an instance, with the index of the recipe by which the instance was flattened."""

    number: int
    static: Any


def _aux(number: int, static: Static) -> Any:
    aux = hashable(static)
    return _Later(number, aux) if number else aux


def _jax_key(key: pytree.KeyEntry) -> Any:
    tree_util = sys.modules["jax"].tree_util
    if isinstance(key, pytree.GetAttrKey):
        return tree_util.GetAttrKey(key.name)
    if isinstance(key, pytree.SequenceKey):
        return tree_util.SequenceKey(key.idx)
    return tree_util.DictKey(key.key) if isinstance(key, pytree.MappingKey) else key
