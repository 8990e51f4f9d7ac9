"""A picture of every pytree registry of the process, and the difference of two pictures.

Functions compare by identity and keys by order, because "as it was before" means both: a class that was taken out and
put back stands at the end of its table.

Two changes are the right of whoever imports a module, and are no difference:

* torch, transformers, diffusers and roundpipe_runtime register classes of their own for good while the module that
  defines them is imported, and transformers an output when one is first made, if its module was imported in a trace;
* the first import of ``torch.utils._cxx_pytree`` moves what was pending into optree's namespace ``"torch"``, and the
  first import of optree what waited for it into our own namespace.

JAX forgets no class. What is compared there is the recipe of ours that it follows.
"""

import functools
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx._pytree as fx_pytree
import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree

PENDING = "torch.utils._pytree._cxx_pytree_pending_imports"
OPTREE = "optree.registry._NODETYPE_REGISTRY"
WAITING = "recipes that wait for optree"
JAX = "recipes that JAX follows, or will"


@dataclass(frozen=True)
class Entry:
    """One line of a table: its key, the class it is about, and everything stored, function by function."""

    key: Any
    cls: type
    parts: tuple[Any, ...]

    def same(self, other: "Entry") -> bool:
        """Tell whether both lines hold the same objects; strings may be equal copies."""
        return len(self.parts) == len(other.parts) and all(
            mine is theirs or (isinstance(mine, str) and mine == theirs)
            for mine, theirs in zip(self.parts, other.parts, strict=True)
        )


# Of a table: its keys, and what is stored under each.
_Held = tuple[tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class Snapshot:
    """All tables at one moment, the settings beside them, and which modules were loaded."""

    held: Mapping[str, _Held]
    settings: Mapping[str, object]
    modules: frozenset[str]

    @functools.cached_property
    def tables(self) -> Mapping[str, tuple[Entry, ...]]:
        """The lines of each table. They are made when something differs: a picture is taken twice for every test."""
        return {name: tuple(_ENTRIES[name](*held)) for name, held in self.held.items()}

    def holds_what(self, other: "Snapshot") -> bool:
        """Tell whether all tables and settings hold the same objects in the same order."""
        return self.settings == other.settings and all(
            len(mine) == len(theirs) and all(map(operator.is_, mine, theirs))
            for name, held in self.held.items()
            for mine, theirs in zip(held, other.held[name], strict=True)
        )


def take() -> Snapshot:
    """Return the state of every registry now; imports nothing that is not there yet."""
    return Snapshot(
        held={
            "torch.utils._pytree.SUPPORTED_NODES": _held(pytree.SUPPORTED_NODES),
            "torch.utils._pytree.SUPPORTED_SERIALIZED_TYPES": _held(pytree.SUPPORTED_SERIALIZED_TYPES),
            "torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE": _held(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE),
            # A set has no order of its own: sorted, so that only what it holds can differ.
            "torch.utils._pytree.CONSTANT_NODES": (tuple(sorted(pytree.CONSTANT_NODES, key=_class_name)), ()),
            PENDING: ((), tuple(pytree._cxx_pytree_pending_imports)),
            OPTREE: _held(getattr(sys.modules.get("optree.registry"), "_NODETYPE_REGISTRY", {})),
            WAITING: _held(_recipes("optree", lambda backend: backend._recipes)),
            JAX: _held(_recipes("jax", _followed_by_jax)),
            "torch.fx._pytree.SUPPORTED_NODES": _held(fx_pytree.SUPPORTED_NODES),
            "torch.fx._pytree.SUPPORTED_NODES_EXACT_MATCH": _held(fx_pytree.SUPPORTED_NODES_EXACT_MATCH),
        },
        settings={
            "torch.fx.experimental._config.use_duck_shape": fx_config.use_duck_shape,
            "kernels of the attention": dict(torch.ops.aten.scaled_dot_product_attention.default.py_kernels),
            "torch._dynamo.config.fake_tensor_cache_enabled": getattr(
                sys.modules.get("torch._dynamo.config"), "fake_tensor_cache_enabled", True
            ),
        },
        modules=frozenset(sys.modules),
    )


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """Return one sentence per change that somebody has to answer for; an empty list when there is none."""
    if before.holds_what(after):
        return []
    imported = after.modules - before.modules
    found = []
    for name, old in _after_first_imports(before, after).items():
        # By key, so that this covers the one key that all classes without a serialised name share.
        excused = {entry.key for entry in after.tables[name] if _registered_by_its_import(entry.cls, imported)}
        first = {entry.key for entry in after.tables[name] if _registered_by_its_first_object(entry.cls)}
        excused |= first - {entry.key for entry in old}
        was = {entry.key: entry for entry in old if entry.key not in excused}
        now = {entry.key: entry for entry in after.tables[name] if entry.key not in excused}
        found += [f"{name}: {change}" for change in _table_changes(was, now)]
    for name, value in before.settings.items():
        if after.settings[name] != value:
            found.append(f"{name}: was {value!r}, is {after.settings[name]!r}")
    return found


def changes_since(before: Snapshot) -> list[str]:
    return differences(before, take())


def _held(table: Mapping[Any, Any]) -> _Held:
    return tuple(table), tuple(table.values())


def _recipes(library: str, held: Callable[[Any], Mapping[type, Any]]) -> Mapping[type, Any]:
    registry = sys.modules.get("yobx_flatten.registry.claims")
    if registry is None:
        return {}
    (backend,) = registry.REGISTRY._libraries[library]
    return held(backend)


def _followed_by_jax(backend: Any) -> Mapping[type, Any]:
    in_force = {cls: node.in_force for cls, node in backend._nodes.items() if node.in_force is not None}
    return {**backend._recipes, **in_force}


def _node_entries(keys: Iterable[type], nodes: Iterable[Any]) -> Iterable[Entry]:
    return (Entry(cls, cls, tuple(node)) for cls, node in zip(keys, nodes, strict=True))


def _function_entries(keys: Iterable[type], functions: Iterable[Any]) -> Iterable[Entry]:
    return (Entry(cls, cls, (function,)) for cls, function in zip(keys, functions, strict=True))


def _pending_entries(nothing: Iterable[Any], pending: Iterable[Any]) -> Iterable[Entry]:
    # Nothing forbids two entries of one class (it makes the later import fail): the count keeps them apart.
    seen: Counter[type] = Counter()
    for (cls, *functions), options in pending:
        yield Entry((cls, seen[cls]), cls, (*functions, *options.values()))
        seen[cls] += 1


def _optree_entries(keys: Iterable[Any], nodes: Iterable[Any]) -> Iterable[Entry]:
    for key, node in zip(keys, nodes, strict=True):
        cls = key[1] if isinstance(key, tuple) else key
        yield Entry(key, cls, (node.type, node.flatten_func, node.unflatten_func, node.path_entry_type))


_ENTRIES: Mapping[str, Callable[..., Iterable[Entry]]] = {
    "torch.utils._pytree.SUPPORTED_NODES": _node_entries,
    "torch.utils._pytree.SUPPORTED_SERIALIZED_TYPES": _node_entries,
    "torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE": lambda names, classes: map(
        Entry, names, classes, ((cls,) for cls in classes)
    ),
    "torch.utils._pytree.CONSTANT_NODES": lambda classes, nothing: (Entry(cls, cls, ()) for cls in classes),
    PENDING: _pending_entries,
    OPTREE: _optree_entries,
    WAITING: _function_entries,
    JAX: _function_entries,
    "torch.fx._pytree.SUPPORTED_NODES": _function_entries,
    "torch.fx._pytree.SUPPORTED_NODES_EXACT_MATCH": _function_entries,
}


def _after_first_imports(before: Snapshot, after: Snapshot) -> dict[str, tuple[Entry, ...]]:
    """Return the tables of `before` as the libraries imported since then leave them, if nobody else does anything."""
    tables = dict(before.tables)
    imported = after.modules - before.modules
    if "optree.registry" in imported:
        # Its own classes are not in a namespace.
        tables[OPTREE] = tuple(entry for entry in after.tables[OPTREE] if not isinstance(entry.key, tuple))
        tables[OPTREE] += tuple(_delivered(entry, after.tables[OPTREE]) for entry in before.tables[WAITING])
        tables[WAITING] = ()
    if "torch.utils._cxx_pytree" in imported:
        arrived = {entry.key: entry for entry in after.tables[OPTREE]}
        tables[OPTREE] += tuple(
            _moved(entry, arrived)
            for entry in before.tables[PENDING]
            # torch leaves these out: optree knows them by itself.
            if not sys.modules["optree"].is_structseq_class(entry.cls)
        )
        tables[PENDING] = ()
    return tables


def _moved(pending: Entry, arrived: Mapping[Any, Entry]) -> Entry:
    """Return a pending entry as it looks in optree, where torch wraps its unflatten function at each import."""
    key = ("torch", pending.cls)
    flatten = pending.parts[0]
    if key in arrived and arrived[key].parts[1] is flatten:
        return arrived[key]
    return Entry(key, pending.cls, (pending.cls, flatten))


def _delivered(waiting: Entry, arrived: Iterable[Entry]) -> Entry:
    """Return a recipe that waited as it looks in optree, where our functions are bound to it."""
    key = ("yobx_flatten", waiting.cls)
    (recipe,) = waiting.parts
    for entry in arrived:
        if entry.key == key and entry.parts[1].args == (recipe,):
            return entry
    return Entry(key, waiting.cls, (waiting.cls, recipe))


def _registered_by_its_import(cls: type, imported: frozenset[str]) -> bool:
    """Tell whether the class came with a newly imported module of a library that registers on import."""
    library = cls.__module__.partition(".")[0]
    if (
        library == "transformers" and cls.__qualname__ == _OUTPUT_BASES[library]
    ):  # when one is first made, as pipelines do
        return True
    return cls.__module__ in imported and (
        library in ("torch", "roundpipe_runtime") or (library in _OUTPUT_BASES and _is_output(cls, library))
    )


def _registered_by_its_first_object(cls: type) -> bool:
    """Tell whether transformers registered an output: one whose module was imported in a trace waits for an object."""
    node = pytree.SUPPORTED_NODES.get(cls)
    of_transformers = cls.__module__.startswith("transformers.") and _is_output(cls, "transformers")
    return of_transformers and getattr(node, "flatten_fn", cls).__module__ == "transformers.utils.generic"


_OUTPUT_BASES = {"transformers": "ModelOutput", "diffusers": "BaseOutput"}


def _is_output(cls: type, library: str) -> bool:
    # By name: the library may not be there, and asking must not import it. transformers < 5.17 registers the base, too.
    return any(
        base.__qualname__ == _OUTPUT_BASES[library] and base.__module__.startswith(f"{library}.")
        for base in cls.__mro__
    )


def _table_changes(was: Mapping[Any, Entry], now: Mapping[Any, Entry]) -> Iterable[str]:
    for key, entry in now.items():
        if key not in was:
            yield f"{_class_name(entry.cls)} was added"
        elif not entry.same(was[key]):
            yield f"{_class_name(entry.cls)} has other functions"
    for key, entry in was.items():
        if key not in now:
            yield f"{_class_name(entry.cls)} was removed"
    if was.keys() == now.keys() and list(was) != list(now):
        first = next(key for key, other in zip(was, now, strict=True) if key != other)
        yield f"the order of the keys changed from {_class_name(was[first].cls)} on"


def _class_name(cls: type) -> str:
    # A few keys are functions that stand for a family (`collections.namedtuple`); some keys are None's type.
    return f"{getattr(cls, '__module__', '?')}.{getattr(cls, '__qualname__', cls)}"
