"""Flatten a cache layer without a ``LayerKind``: tensors and token counters are leaves, other attributes are static.

A *template* describes the value of every attribute of a cache layer. A template is static data: it does not depend on
the batch, the tokens seen, the dtype or the device, and can be stored as JSON.
"""

# entry of a template   value of the attribute
# `["tensor"]`          a leaf
# `["number"]`          also a leaf: an integer that counts (`entry_count`, `_seen_tokens`)
# `["length"]`          the number of tokens that all layers of a cache have seen; the cache provides it
# `["same", i]`         the same tensor object as leaf `i` (models that store one tensor as keys and values)
# `["dtype", i]`        the dtype of leaf `i`; likewise `["device", i]`
# `["shape", i, axis]`  a size of leaf `i` (static layers note their batch size)
# `["dict", [...]]`     pairs of key and template; likewise `["list", [...]]`, `["tuple", [...]]`
# `["object", c, {}]`   an object of class `c` of the same library, by its attributes
# `["fixed", value]`    any other value, in the form of :mod:`yobx_flatten.registry.recipe.static_codec`

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch

from ...errors import CacheStructureError, StaticDataError, describe_class
from ...registry.recipe.aliases import Length
from ...registry.recipe.static_codec import dump_static, import_known, load_static

Template = dict[str, list[Any]]

# counts that are equal in all layers of a cache
LENGTHS = {"cumulative_length", "cumulative_length_int"}

# The counters of caches; other integers are fixed by configuration.
_COUNTS = re.compile(r"count|seen|offset|accepted|(^|_)position(_|$)|num_tokens|cumulative|prefill_length")
_FIXED = re.compile(r"max|kernel|window|size|rate|layers|states$")

# Facts that static layers store about their own tensors.
SIZES = {
    "batch_size": ("keys", 0),
    "max_batch_size": ("keys", 0),
    "num_heads": ("keys", 1),
    "head_dim": ("keys", -1),
    "k_head_dim": ("keys", -1),
    "v_head_dim": ("values", -1),
}

# attributes that are made again when they are needed
DROPPED = {"_sliding_window_tensor", "prefetch_stream"}


def read_state(held: dict[str, Any], *, in_cache: bool = False) -> tuple[Template, list[Any]]:
    """Split the attributes of an object into a template (static data) and leaves (tensors and counters)."""
    leaves: list[Any] = []
    waiting: list[tuple[str, Any]] = []
    template: Template = {}
    for name, value in held.items():
        if name in DROPPED:
            continue
        template[name] = []  # keeps the order of the attributes
        if isinstance(value, (torch.dtype, torch.device)) or name in SIZES:  # compared with the leaves below
            waiting.append((name, value))
            continue
        # a static layer counts in its own tensor; in a trace, other layers also count in tensors
        is_position = isinstance(value, torch.Tensor) and name == "cumulative_length" and "max_cache_len" in held
        counts = in_cache and name in LENGTHS and not is_position
        template[name] = ["length"] if counts else _read(value, name, leaves)
    paths = leaf_paths(template) if waiting else []
    for name, value in waiting:
        template[name] = _read_like(name, value, leaves, paths)
    return template, leaves


def _read(value: Any, name: str, leaves: list[Any]) -> list[Any]:
    if isinstance(value, torch.Tensor):
        for index, leaf in enumerate(leaves):
            if leaf is value:
                return ["same", index]
        leaves.append(value)
        return ["tensor"]
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) and _counts(name):
        leaves.append(value)
        return ["number"]
    if type(value) is dict and _holds_leaves(value.values(), name):
        return ["dict", [[dump_static(key), _read(x, name, leaves)] for key, x in value.items()]]
    if type(value) in (list, tuple) and _holds_leaves(value, name):
        return [type(value).__name__, [_read(x, name, leaves) for x in value]]
    if _is_part(value):
        cls = type(value)
        below = {attribute: _read(x, attribute, leaves) for attribute, x in vars(value).items()}
        return ["object", f"{cls.__module__}:{cls.__qualname__}", below]
    try:
        return ["fixed", dump_static(value)]
    except StaticDataError:
        raise StaticDataError(
            f"The attribute {name!r} holds {describe_class(value)}, which is not a tensor and cannot be stored. "
            "Register the class with your own functions:\n"
            "    register_class_flattening(cls, f_flatten, f_unflatten, f_flatten_with_keys)"
        ) from None


def _is_part(value: object) -> bool:
    cls = type(value)
    return _names_a_part(cls.__module__, cls.__qualname__) and hasattr(value, "__dict__")


def _names_a_part(module: str, name: str) -> bool:
    of_quanto = module.startswith("optimum.quanto.") and "Optimizer" in name
    return of_quanto or (module.startswith("transformers.") and "Cache" in name)


def _counts(name: str) -> bool:
    return bool(_COUNTS.search(name)) and not _FIXED.search(name)


def _holds_leaves(values: Iterable[Any], name: str) -> bool:
    return any(
        isinstance(x, torch.Tensor)
        or (type(x) in (int, torch.SymInt) and _counts(name))
        or (type(x) is dict and _holds_leaves(x.values(), name))
        or (type(x) in (list, tuple) and _holds_leaves(x, name))
        or _is_part(x)
        for x in values
    )


def _read_like(name: str, value: object, leaves: list[Any], paths: list[str]) -> list[Any]:
    """Return the template entry of a dtype, a device or a size: a reference to a leaf with this value, or the value."""
    if name in SIZES:
        path, axis = SIZES[name]
        index = paths.index(path) if path in paths else None
        fits = index is not None and leaves[index].dim() > 1 and leaves[index].shape[axis] is not None
        return ["shape", index, axis] if fits else ["fixed", dump_static(value)]
    kind = "dtype" if isinstance(value, torch.dtype) else "device"
    # `indexer_dtype` belongs to `indexer_keys`; otherwise prefer the model's tensors to counters
    prefix = name.removesuffix(f"_{kind}")
    named = [index for index, path in enumerate(paths) if path.startswith(prefix)] if prefix != name else []
    is_floating = [isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves]
    order = [*named, *sorted(range(len(leaves)), key=lambda index: not is_floating[index])]
    for index in order:
        if isinstance(leaves[index], torch.Tensor) and getattr(leaves[index], kind) == value:
            return [kind, index]
    return ["fixed", dump_static(value)]


def leaf_paths(template: Template) -> list[str]:
    """Return the names of a cache layer's leaves, such as ``keys`` and ``conv_states.0``, in their order."""
    return [path for path, _ in _leaves_of(template.items())]


def lengths_of(template: Template) -> list[str]:
    return [name for name, entry in template.items() if entry == ["length"]]


def _leaves_of(entries: Iterable[tuple[Any, list[Any]]], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, entry in entries:
        if entry and entry[0] in ("tensor", "number"):
            yield f"{prefix}{key}", entry[0]
        yield from _leaves_of(_parts(entry), f"{prefix}{key}.")


def _parts(entry: list[Any]) -> Iterable[tuple[Any, list[Any]]]:
    match entry:
        case ["dict", pairs]:
            return [(load_static(key), below) for key, below in pairs]
        case ["list" | "tuple", items]:
            return enumerate(items)
        case ["object", _, held]:
            return held.items()  # type: ignore[no-any-return] # a dict
    return ()


def follow_state(template: Template, held: dict[str, Any]) -> list[Any]:
    """Return the leaves of an object that was rebuilt from a template. Leaves may be placeholders of torch."""
    leaves: list[Any] = []

    def walk(entry: list[Any], value: Any) -> None:
        if entry[0] in ("tensor", "number"):
            leaves.append(value)
        for key, below in _parts(entry):
            walk(below, getattr(value, key) if entry[0] == "object" else value[key])

    for name, entry in template.items():
        walk(entry, held.get(name))
    return leaves


class StateBuilder:
    def __init__(self, template: Template) -> None:
        self.template = template
        types = {"tensor": torch.Tensor, "number": (int, torch.SymInt)}
        self.leaf_types: list[Any] = [types[kind] for _, kind in _leaves_of(template.items())]  # for `isinstance`
        self._plain: dict[str, Any] = dict.fromkeys(template)  # each name at its position
        self._leaves: list[tuple[str, int]] = []
        self._made: list[tuple[str, _Make]] = []
        self._late: list[tuple[str, list[Any]]] = []
        counter = itertools.count()
        for name, entry in template.items():
            kind = entry[0]
            if kind in ("tensor", "number"):
                self._leaves.append((name, next(counter)))
            elif kind in ("dtype", "device", "shape"):
                self._late.append((name, entry))
            elif kind == "fixed" and isinstance(entry[1], (str, int, float, type(None))):
                self._plain[name] = load_static(entry[1])
            else:
                self._made.append((name, _maker(entry, counter)))

    def build(self, leaves: Iterator[Any], length: Length) -> tuple[dict[str, Any], list[Any], bool]:
        """Return an object's attributes, the leaves used for them, and whether none of them is a placeholder."""
        used = list(itertools.islice(leaves, len(self.leaf_types)))
        held = self._plain.copy()
        for name, index in self._leaves:
            held[name] = used[index]
        for name, make in self._made:
            held[name] = make(used, length)
        for name, (kind, index, *axes) in self._late:
            leaf = used[index]
            if isinstance(leaf, torch.Tensor) and kind != "shape":
                held[name] = getattr(leaf, kind)
            elif isinstance(leaf, torch.Tensor):
                # a tensor may temporarily be replaced by its sum
                held[name] = leaf.shape[axes[0]] if leaf.dim() > max(axes[0], ~axes[0]) else None
        return held, used, all(map(isinstance, used, self.leaf_types))


_Make: TypeAlias = Callable[[list[Any], Length], Any]  # from all leaves, and the number of tokens seen


def _maker(entry: list[Any], counter: Iterator[int]) -> _Make:
    kind = entry[0]
    if kind in ("tensor", "number", "same"):
        index = entry[1] if kind == "same" else next(counter)
        return lambda used, length: used[index]
    if kind == "length":
        return lambda used, length: length
    if kind == "dict":
        keys = [key for key, _ in _parts(entry)]
        if all(below == ["tensor"] for _, below in entry[1]):
            first = next(counter)
            behind = first + 1 + sum(1 for _ in itertools.islice(counter, len(keys) - 1))
            return lambda used, length: dict(zip(keys, used[first:behind], strict=True))
        values = [_maker(below, counter) for _, below in entry[1]]
        return lambda used, length: dict(zip(keys, [make(used, length) for make in values], strict=True))
    if kind in ("list", "tuple"):
        items = [_maker(below, counter) for below in entry[1]]
        of_kind: Any = list if kind == "list" else tuple
        return lambda used, length: of_kind([make(used, length) for make in items])
    if kind == "object":
        attributes = {name: _maker(below, counter) for name, below in entry[2].items()}

        def make_object(used: list[Any], length: Length) -> Any:
            obj: Any = object.__new__(part_class(entry[1]))
            obj.__dict__.update({name: make(used, length) for name, make in attributes.items()})
            return obj

        return make_object
    value = load_static(entry[1])
    if type(value) is dict and all(type(one) in (bool, int, float, str, type(None)) for one in value.values()):
        return lambda used, length: value.copy()
    return lambda used, length: load_static(entry[1])


def layer_class(name: object) -> type:
    import transformers.cache_utils as cache_utils

    names = ("CacheLayerMixin", "LinearAttentionCacheLayerMixin")
    bases = tuple(base for base in (getattr(cache_utils, base, None) for base in names) if base is not None)
    found = _class_named(name)
    # the placeholder for a missing layer derives from neither class
    of_library = found is not None and found.__module__ == cache_utils.__name__ and found.__name__.endswith("Layer")
    if found is None or not (of_library or issubclass(found, bases)):
        raise CacheStructureError(
            f"The leaf names of a cache contain {name!r}, which is not a known class of cache layers. "
            f"If {name!r} is a class of cache layers, import its module first."
        )
    return found


def part_class(name: object) -> type:
    found = _class_named(name)
    module, _, qualified = str(name).partition(":")
    if found is None or not _names_a_part(module, qualified):
        raise CacheStructureError(
            f"The stored cache contains {name!r}, but only cache classes in transformers and Quanto can be rebuilt."
        )
    return found


def _class_named(name: object) -> type | None:
    if not isinstance(name, str):
        return None
    module, _, qualified = name.partition(":")
    import_known(module)
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if isinstance(found, (type(sys), type)) else None
    borne = isinstance(found, type) and f"{found.__module__}:{found.__qualname__}" == name
    return found if borne and not hasattr(found, "__del__") else None
