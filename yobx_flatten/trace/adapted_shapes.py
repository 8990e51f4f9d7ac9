"""Adapt ``dynamic_shapes`` that were written for other libraries or earlier versions, which flatten caches differently.

``torch.export`` requires one entry of ``dynamic_shapes`` for each tensor into which a cache is flattened, in the same
order. If the token counter of a cache is an integer, its entry is dynamic if an axis of the cache is dynamic.
``dynamic_shapes`` in an unknown form are returned unchanged, and torch reports their errors.
"""

# n layers:
# [keys 0, values 0, keys 1, ...]                     2n entries: the counter of sliding layers is missing
# [keys 0, values 0, ..., Dim.AUTO]                   earlier versions of this package: the counter is an integer
# [[keys 0, ...], [values 0, ...]]                    transformers' executorch registration; also as a dict
# [entry of each tensor, by its attributes]           transformers' exporters of 5.16 and 5.17
# ShapesCollection                                    entries by tensor; the counter has no entry

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.export import Dim, ShapesCollection

from ..core.private_names.of_torch import GetAttrKey, pytree
from ..errors import DynamicShapesError, describe_class
from ..registry.claims import REGISTRY
from ..registry.recipe.aliases import DynamicShapes, TransformersCache
from ..registry.recipe.contract import Recipe


def adapted_shapes(
    module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None, shapes: DynamicShapes
) -> DynamicShapes:
    from ..core.private_names.of_torch import combine_args

    by_tensor = isinstance(shapes, ShapesCollection)
    if by_tensor:
        shapes = shapes.dynamic_shapes(module, args, kwargs)
    if not isinstance(shapes, (dict, tuple, list)):
        return shapes
    try:
        named = combine_args(module, args, kwargs)
    except TypeError:  # torch reports arguments that do not fit
        return shapes
    return _Adapting(by_tensor).adapt(dict(named), shapes)


class _Adapting:
    def __init__(self, by_tensor: bool) -> None:
        self.by_tensor = by_tensor

    def adapt(self, obj: object, shapes: DynamicShapes) -> DynamicShapes:
        if shapes is None or isinstance(obj, torch.Tensor):
            return shapes
        recipe = REGISTRY.recipe_in_force(type(obj))
        if recipe is not None and recipe.axes is not None:
            entries = self.entries_of(obj, shapes, recipe)
            rows = recipe.flatten_with_keys(obj)[0] if isinstance(entries, list) else []
            if not isinstance(entries, list) or len(rows) != len(entries):
                return entries
            # `Dim.AUTO` is dropped from axes that never vary, such as heads
            return [
                _fixed(entry, recipe.axes(str(getattr(key, "key", key)))) if isinstance(child, torch.Tensor) else entry
                for (key, child), entry in zip(rows, entries, strict=True)
            ]
        if isinstance(obj, Mapping) and isinstance(shapes, dict):
            return {name: self.adapt(obj[name], below) if name in obj else below for name, below in shapes.items()}
        if isinstance(obj, Mapping) and type(obj) not in pytree.SUPPORTED_NODES and isinstance(shapes, (tuple, list)):
            children = list(obj.values())  # the arguments, in order
        elif isinstance(obj, (tuple, list)):
            children = list(obj)
        elif type(obj) in pytree.SUPPORTED_NODES:
            children = pytree.SUPPORTED_NODES[type(obj)].flatten_fn(obj)[0]
        else:
            return shapes
        if not isinstance(shapes, (tuple, list)) or len(children) != len(shapes):
            return shapes
        below = [self.adapt(child, entry) for child, entry in zip(children, shapes, strict=True)]
        return below if type(shapes) is list else tuple(below) if type(shapes) is tuple else type(shapes)(*below)

    def entries_of(self, cache: TransformersCache, shapes: DynamicShapes, recipe: Recipe) -> DynamicShapes:
        """Convert ``dynamic_shapes`` of a cache to a list with one entry for each child of the cache."""
        children = recipe.flatten(cache)[0]
        if type(shapes) is type(cache):  # torch puts the entries of a collection into a cache
            shapes = recipe.flatten(shapes)[0]
        if isinstance(shapes, (list, tuple)):
            if len(shapes) == len(children) and all(map(_fits, children, shapes)):
                entries = [self.adapt(*pair) for pair in zip(children, shapes, strict=True)]
                varies = self.by_tensor and any(map(_varies, entries))
                return [
                    _entry_of_count(child, varies) if _counts(child) and (entry is None or _is_tensor(child)) else entry
                    for child, entry in zip(children, entries, strict=True)
                ]
            if len(shapes) == len(children) - 1 and _counts(children[-1]) and all(map(_fits, children, shapes)):
                return [*shapes, _entry_of_count(children[-1], any(map(_varies, shapes)))]
        by_tensor = _by_parts(cache, shapes) or _by_tensor(list(_tensors_of(cache)), shapes)
        return shapes if by_tensor is None else self.written(children, by_tensor)

    def written(self, children: list[Any], by_tensor: dict[int, Any]) -> list[Any]:
        """Return a list with the ``dynamic_shapes`` of each child of a cache."""
        varies = any(map(_varies, by_tensor.values()))
        entries: list[Any] = []
        for child in children:
            recipe = REGISTRY.recipe_in_force(type(child))
            if recipe is not None:
                entries.append(self.written(recipe.flatten(child)[0], by_tensor))
            else:
                entries.append(_entry_of_count(child, varies) if _counts(child) else by_tensor.get(id(child)))
        return entries


def _fixed(entry: DynamicShapes, axes: Mapping[int, str] | None) -> DynamicShapes:
    """Remove ``Dim.AUTO`` from the ``dynamic_shapes`` of a tensor, for axes that have the same size in all calls."""
    if axes is None or not isinstance(entry, (dict, list, tuple)) or hasattr(entry, "_fields"):
        return entry
    dims = dict(entry) if isinstance(entry, dict) else dict(enumerate(entry))
    # a trace with deferred assertions would make a symbol for each axis, and compare products of symbols
    kept = {axis: None if axis not in axes and dim is Dim.AUTO else dim for axis, dim in dims.items()}
    return kept if isinstance(entry, dict) else type(entry)(kept.values())


def _counts(child: object) -> bool:
    """Return whether a child of a cache is a token counter: a tensor without axes, or an integer."""
    return type(child) is int or _is_tensor(child)


def _is_tensor(child: object) -> bool:
    return isinstance(child, torch.Tensor) and child.dim() == 0


def _entry_of_count(child: object, varies: bool) -> DynamicShapes:
    return Dim.AUTO if varies and type(child) is int else None


def _fits(child: object, entry: DynamicShapes) -> bool:
    if entry is None or (_is_tensor(child) and not _is_container(entry)):  # a counter, an integer in earlier versions
        return True
    if isinstance(child, torch.Tensor):
        if isinstance(entry, dict):
            return all(type(axis) is int and axis < child.dim() for axis in entry)
        return isinstance(entry, (list, tuple)) and len(entry) == child.dim() and not any(map(_is_container, entry))
    return _is_container(entry) if type(child) is not int else not _is_container(entry)


def _is_container(entry: DynamicShapes) -> bool:
    return not isinstance(entry, (str, int)) and entry is not None and "Dim" not in type(entry).__name__


def _varies(entry: DynamicShapes) -> bool:
    axes = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, (list, tuple)) else [entry]
    return any(axis is not None and axis != Dim.STATIC and type(axis) is not int for axis in axes)


def _by_parts(cache: TransformersCache, shapes: DynamicShapes) -> dict[int, Any] | None:
    """Read ``dynamic_shapes`` that consist of a list for the keys and a list for the values of a cache."""
    parts = list(shapes.values()) if isinstance(shapes, dict) else shapes
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return None
    layers = [layer for layer in getattr(cache, "layers", ()) if getattr(layer, "keys", None) is not None]
    keys = _by_tensor([layer.keys for layer in layers], parts[0])
    values = None if keys is None else _by_tensor([layer.values for layer in layers], parts[1])
    return None if keys is None or values is None else keys | values


def _by_tensor(tensors: Sequence[torch.Tensor], entries: DynamicShapes) -> dict[int, Any] | None:
    if not isinstance(entries, (list, tuple)) or len(entries) != len(tensors) or not all(map(_fits, tensors, entries)):
        return None
    return dict(zip(map(id, tensors), entries, strict=True))


def _tensors_of(obj: object, inside: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        yield obj
        return
    items: list[Any] = []
    if isinstance(obj, (list, tuple, set, frozenset)):
        items = list(obj)
    elif isinstance(obj, dict):
        items = list(obj.values())
    elif hasattr(obj, "__dict__") and not isinstance(obj, (type, FunctionType, MethodType)):
        items = list(vars(obj).values())
    if id(obj) not in inside:  # an object may refer to itself
        for item in items:
            yield from _tensors_of(item, (*inside, id(obj)))


# Read the specifications of `torch.fx.experimental.dynamic_spec`. torch 2.13 has these classes, and `torch.export`
# accepts them since 2.15. Only this file reads private attributes of these classes. If an attribute is missing, see how
# `torch.fx.experimental._spec_binding` reads a specification.

_CLASSES = ("DictSpec", "IntVar", "ObjectSpec", "ParamsSpec", "SeqSpec", "ShapesSpec", "TensorSpec")
_ATTACHED = "_dynamic_spec"


def spec_classes() -> types.ModuleType | None:
    module = sys.modules.get("torch.fx.experimental.dynamic_spec")
    return module if all(hasattr(module, name) for name in _CLASSES) else None


def opened_spec(spec: DynamicShapes) -> tuple[Any, tuple[Any, ...]]:
    """Split torch's ``ShapesSpec`` or ``ParamsSpec`` into entries by parameter name, and assumptions about sizes."""
    classes, assumptions = spec_classes(), ()
    if classes is not None and isinstance(spec, classes.ShapesSpec):
        assumptions = tuple(one.node.expr for one in spec.assumptions)
        spec = classes.ParamsSpec() if spec._params is None else spec._params
    if classes is not None and isinstance(spec, classes.ParamsSpec):
        rest = {"*args": spec._varargs, "**kwargs": spec._varkw}
        spec = {**spec._named_args, **{key: entry for key, entry in rest.items() if entry is not None}}
    return spec, assumptions


def elements_of(spec: DynamicShapes) -> list[Any]:
    return list(spec._entries)


def attached_spec(forward: Callable[..., Any]) -> DynamicShapes:
    return getattr(forward, _ATTACHED, None)


def forget_attached(forward: Callable[..., Any]) -> None:
    vars(forward).pop(_ATTACHED, None)


def refuse_specs_of_keys(
    module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None, spec: DynamicShapes
) -> None:
    """Raise an error if ``torch.export`` would not find entries of a ``ShapesSpec`` for the children of an input."""
    # `torch.export` looks up the entries of an `ObjectSpec` by attribute name, and the children of caches have keys
    from ..core.private_names.of_torch import combine_args  # imports much

    classes = spec_classes()
    if classes is None or not isinstance(spec, (classes.ShapesSpec, classes.ParamsSpec)):
        return
    try:
        inputs = combine_args(module, args, kwargs)
    except TypeError:  # torch reports arguments that do not fit
        return
    containers = (classes.ObjectSpec, classes.DictSpec, classes.SeqSpec)
    for name, entry in opened_spec(spec)[0].items():
        found = inputs.get(name)
        recipe = REGISTRY.recipe_in_force(type(found)) if isinstance(entry, containers) else None
        if recipe is None:
            continue
        keys = [key for key, _ in recipe.flatten_with_keys(found)[0]]
        if not all(isinstance(key, GetAttrKey) for key in keys):
            raise DynamicShapesError(
                f"{name}: torch.export does not support {type(entry).__name__} for {describe_class(type(found))}, "
                f"whose children are {[getattr(key, 'key', str(key)) for key in keys]}. export_program supports it:\n"
                "    export_program(module, args, kwargs, dynamic_shapes=spec)"
            )
