"""Make ``dynamic_shapes`` for nested inputs, and check ``dynamic_shapes`` before ``torch.export`` is called.

``dynamic_shapes`` has the structure of the inputs; an object of a registered class needs a *list* of its children.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import Dim

from ..core.private_names.of_torch import DimHint, get_node_type, pytree
from ..errors import DynamicShapesError, InvalidArgumentError, describe_class
from ..huggingface.cache_names import CACHE, name_in, word_in_files
from ..registry.recipe.aliases import DynamicShapes, PyTree, TransformersCache
from .walk import Node, check_no_cycles, key_name, node_of, own_children, walk

_Path = tuple[str, ...]


def dynamic_shapes(
    inputs: PyTree, overrides: Mapping[str, Any] | None = None, *, bounds: Mapping[str, int] | None = None
) -> DynamicShapes:
    """Make the ``dynamic_shapes`` argument of ``torch.export.export`` for nested inputs.

    Args:
        inputs: a tuple of positional arguments or a dict of keyword arguments, nested to any depth: tensors, numbers,
            containers, caches, registered classes.
        overrides: entries that replace the generated entries, by dotted key path: ``{"input_ids": {0: Dim("batch")}}``,
            ``{"cache.key_0": {2: Dim.DYNAMIC}}``. The entry ``None`` fixes all sizes of the inputs at this path. A path
            to the KV cache may begin with any name that transformers uses for caches. No overrides by default.
        bounds: the largest ``"batch"`` and ``"length"`` (in tokens), for runtimes that plan their memory:
            ``{"batch": 8, "length": 2048}``. Outside of caches, the batch is axis 0 and the length is axis 1. No bounds
            by default.

    Returns:
        The argument ``dynamic_shapes`` of ``torch.export.export``.
        The entry is ``Dim.AUTO`` for a dynamic axis or a token counter of a cache, ``None`` for a number, text or bool.

    Raises:
        DynamicShapesError: when a path of ``overrides`` is not among the inputs, when an override does not fit the
            input at its path, or when the example is larger than a bound.
        InvalidArgumentError: when an object contains itself, or a bound is not a size or has an unknown name.

    >>> shapes = dynamic_shapes({"x": torch.zeros(2, 3), "y": torch.zeros(4), "flag": True}, {"x": {0: Dim.DYNAMIC}})
    >>> shapes == {"x": {0: Dim.DYNAMIC}, "y": {0: Dim.AUTO}, "flag": None}
    True
    >>> dynamic_shapes({"x": torch.zeros(2, 3)}, bounds={"batch": 8})["x"][0].max
    8
    """
    check_no_cycles(inputs, "inputs", caller="dynamic_shapes")
    own, left = name_in(inputs), dict[str, Any]()
    for path, entry in (overrides or {}).items():  # the cache gets its name among the inputs
        first, dot, rest = path.partition(".")
        is_cache = own is not None and first not in inputs and word_in_files(first, inputs[own]) == CACHE
        left[f"{own}{dot}{rest}" if is_cache else path] = entry
    for name, most in (bounds or {}).items():
        if name not in _MEANINGS or type(most) is not int or most < 2:
            raise InvalidArgumentError(
                f"bounds: expected largest sizes of 2 or more for 'batch' and 'length', found {name!r}: {most!r}. To "
                'limit other axes, use overrides:\n    dynamic_shapes(inputs, {"x": {2: Dim.AUTO(max=64)}})'
            )
    written = _write(inputs, (), None, left, bounds or {})
    if left:
        known = sorted({".".join(map(key_name, place.keys)) for place in walk(inputs, own_children) if place.keys})
        raise DynamicShapesError(
            f"overrides: {sorted(left)} is not among the inputs. Key paths of inputs are:\n    {known}"
        )
    if overrides:
        check_dynamic_shapes(inputs, written)
    return written


def make_dynamic_shapes_kv_cache(cache: TransformersCache, shape_of_one: DynamicShapes) -> list[Any]:
    """Make the ``dynamic_shapes`` of one KV cache in which all keys and values have the same dynamic axes.

    Args:
        cache: a KV cache of transformers, or of a class that was registered with the argument ``axes``.
        shape_of_one: the entry for every key and value tensor, such as ``{0: "batch", 2: "length"}``.

    Returns:
        A list with one entry per child of the cache: ``shape_of_one`` for a key or value tensor, ``None`` for a counter
        tensor, ``Dim.AUTO`` for an integer counter. For an ``EncoderDecoderCache``, the result is a list of two lists.

    Raises:
        DynamicShapesError: when ``cache`` is not a cache.

    >>> from yobx_flatten import make_dynamic_cache
    >>> cache = make_dynamic_cache([(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))])
    >>> make_dynamic_shapes_kv_cache(cache, {0: "batch", 2: "length"})
    [{0: 'batch', 2: 'length'}, {0: 'batch', 2: 'length'}]
    """
    node = node_of(cache)
    if node is None or node.recipe is None or node.recipe.axes is None:
        raise DynamicShapesError(
            f"make_dynamic_shapes_kv_cache: expected a KV cache, found {describe_class(type(cache))}."
        )
    shapes: list[Any] = []
    for key, child in zip(node.keys, node.children, strict=True):
        if node_of(child) is not None:
            shapes.append(make_dynamic_shapes_kv_cache(child, shape_of_one))
        elif node.recipe.axes(key_name(key)):
            shapes.append(shape_of_one)
        else:
            shapes.append(None if isinstance(child, torch.Tensor) else Dim.AUTO)
    return shapes


def check_dynamic_shapes(inputs: PyTree, shapes: DynamicShapes) -> None:
    """Check that a ``dynamic_shapes`` specification fits the inputs.

    Args:
        inputs: a tuple or a dict, as for :func:`dynamic_shapes`.
        shapes: the ``dynamic_shapes`` specification to check.

    Raises:
        DynamicShapesError: when an entry does not fit its input; the message names the key path and a valid entry.
        InvalidArgumentError: when an object contains itself.

    >>> check_dynamic_shapes({"x": torch.zeros(2, 3)}, {"x": {5: Dim.AUTO}})
    Traceback (most recent call last):
    ...
    yobx_flatten.errors.DynamicShapesError: x: the specification names axis 5, but this tensor has shape (2, 3), \
with axes [0, 1].
    """
    check_no_cycles(inputs, "inputs", caller="check_dynamic_shapes")
    check_entries(inputs, shapes)


def without_names(shapes: DynamicShapes) -> DynamicShapes:
    """Replace names of axes in ``dynamic_shapes``, such as ``"batch"``, by ``Dim.DYNAMIC`` for ``torch.export``."""
    if isinstance(shapes, str):
        return Dim.DYNAMIC
    if isinstance(shapes, Mapping):
        return {key: without_names(below) for key, below in shapes.items()}
    if isinstance(shapes, (list, tuple)):
        below = [without_names(entry) for entry in shapes]
        return type(shapes)(*below) if hasattr(shapes, "_fields") else type(shapes)(below)
    return shapes


def with_none_below(obj: PyTree, shapes: DynamicShapes) -> DynamicShapes:
    """Replace a ``None`` for a whole container by one ``None`` for each leaf, as ``torch.export`` requires."""
    node = node_of(obj)
    if node is None or shapes is not None:
        return shapes
    return same_container(obj, node, [with_none_below(child, None) for child in node.children])


def shapes_of_leaves(inputs: PyTree, shapes: DynamicShapes) -> list[dict[int, Any] | None]:
    # shapes: a specification that fits the inputs; `None` for a container fixes all its leaves
    # returns: a dict by axis for every leaf; `None` for a fixed leaf, and for a number
    node = node_of(inputs)
    if node is None:
        entries = dict(enumerate(shapes)) if isinstance(shapes, (list, tuple)) else shapes
        return [dict(entries) if isinstance(entries, Mapping) else None]
    below = [None] * len(node.children) if shapes is None else shapes
    below = [below[key] for key in inputs] if isinstance(below, Mapping) else below
    return [leaf for child, spec in zip(node.children, below, strict=True) for leaf in shapes_of_leaves(child, spec)]


_MEANINGS = ("batch", "length")
_PLAIN = dict(enumerate(_MEANINGS))  # for a tensor without a registration


def _write(
    obj: object, path: _Path, axes: dict[int, str] | None, overrides: dict[str, Any], bounds: Mapping[str, int]
) -> DynamicShapes:
    dotted = ".".join(path)
    if path and dotted in overrides:
        return overrides.pop(dotted)
    node = node_of(obj)
    if node is not None:
        axes_of = None if node.recipe is None else node.recipe.axes
        below = []
        for name, child in zip(map(key_name, node.keys), node.children, strict=True):
            below.append(_write(child, (*path, name), None if axes_of is None else axes_of(name), overrides, bounds))
        return same_container(obj, node, below)
    if not isinstance(obj, torch.Tensor):
        # a number is a constant of the program, unless a recipe declares the number as a counter
        return Dim.AUTO if axes is not None and type(obj) is int else None
    if axes is not None and obj.dim() <= max(axes, default=-1):
        return {}  # a quantized layer has a scale and an empty tensor under the names of keys and values
    meanings = _PLAIN if axes is None else axes
    dims: dict[int, Any] = {}
    for axis in range(obj.dim()) if axes is None else axes:
        meaning = meanings.get(axis, "")
        most = bounds.get(meaning)
        # the size is not read without a bound, since a nested tensor has no shape
        if most is not None and (size := obj.shape[axis]) > most:
            raise DynamicShapesError(
                f"{_format((*path, f'axis {axis}'))}: size {size} of the example is above the bound {most} of "
                f'{meaning!r}. Pass a smaller example, or a larger bound:\n    bounds={{"{meaning}": {size}}}'
            )
        dims[axis] = Dim.AUTO if most is None else Dim.AUTO(max=max(most, 3))  # torch makes 2 to 2 a constant
    return dims


def same_container(obj: Any, node: Node, below: list[Any]) -> DynamicShapes:
    """Put the ``dynamic_shapes`` of an object's children into a container of the type that ``torch.export`` expects."""
    kind = builtin_kind(obj, node)
    if kind is None or kind is list:
        return below
    if kind in _DICTS:
        return kind(zip(obj, below, strict=True)) if kind is not defaultdict else dict(zip(obj, below, strict=True))
    if kind is deque:
        return deque(below, obj.maxlen)
    if kind is namedtuple:
        return tuple.__new__(type(obj), below)  # without the class's `__new__`, which may read the values
    return tuple(below)


_DICTS = (dict, OrderedDict, defaultdict)


def builtin_kind(obj: object, node: Node | None = None) -> Any:
    kind = get_node_type(obj)  # torch requires the same type for `dynamic_shapes`
    kind = tuple if kind is torch.Size else kind  # torch converts it to a tuple before its check
    return kind if kind in pytree.BUILTIN_TYPES and (node is None or node.recipe is None) else None


def check_entries(obj: PyTree, shapes: DynamicShapes, path: _Path = ()) -> None:
    """Raise an error if ``dynamic_shapes`` does not fit the inputs."""
    if shapes is None:
        return
    node = node_of(obj)
    if node is None:
        _check_leaf(obj, shapes, path)
        return
    names = [key_name(key) for key in node.keys]
    kind = builtin_kind(obj, node)
    if kind in _DICTS:
        if not isinstance(shapes, Mapping):
            raise _misfit(path, "a dict with the same keys as the inputs", shapes)
        missing, unknown = set(obj) - set(shapes), set(shapes) - set(obj)
        if missing or unknown:
            raise DynamicShapesError(
                f"{_format(path)}: the specification must have the keys of the inputs, {list(obj)}. Missing: "
                f"{sorted(map(str, missing))}; unknown: {sorted(map(str, unknown))}. Write None for an input of fixed "
                "size."
            )
        below = [shapes[key] for key in obj]
    else:
        cls = {namedtuple: type(obj)}.get(kind, kind)
        given = get_node_type(shapes)
        given = type(shapes) if given is namedtuple else given
        if not (isinstance(shapes, (list, tuple)) if kind is None or not path else given is cls):
            name = "list" if kind is None or not path else cls.__qualname__
            raise _misfit(path, f"a {name} with {len(names)} entries for {names}", shapes)
        if len(shapes) != len(names):
            raise DynamicShapesError(
                f"{_format(path)}: {type(obj).__qualname__} has {len(names)} children {names}, but its specification "
                f"has entries for {len(shapes)}. Write one entry per child."
            )
        below = list(shapes)
    for name, child, spec in zip(names, node.children, below, strict=True):
        check_entries(child, spec, (*path, name))


def _check_leaf(obj: object, shapes: DynamicShapes, path: _Path) -> None:
    if not isinstance(obj, torch.Tensor):
        # type(), since a bool is an int; torch has no dynamic floats
        if type(obj) is not int or not _is_dim(shapes):
            raise _misfit(path, f"None for {describe_class(obj)}, whose value is fixed in the program", shapes)
        return
    if isinstance(shapes, Mapping):
        entries = dict(shapes)
    elif obj.dim() == 0 and _is_dim(shapes):  # a counter of a cache, which earlier versions flattened to an integer
        return
    elif isinstance(shapes, (list, tuple)):
        if len(shapes) != obj.dim():
            raise _misfit(path, f"one entry for each of the {obj.dim()} axes of shape {tuple(obj.shape)}", shapes)
        entries = dict(enumerate(shapes))
    else:
        raise _misfit(path, "a dict {axis: Dim}, for a tensor", shapes)
    for axis, dim in entries.items():
        if type(axis) is not int or not 0 <= axis < obj.dim():
            raise DynamicShapesError(
                f"{_format(path)}: the specification names axis {axis!r}, but this tensor has shape "
                f"{tuple(obj.shape)}, with axes {list(range(obj.dim()))}."
            )
        if dim is not None and type(dim) is not int and not _is_dim(dim):
            raise _misfit((*path, str(axis)), "a Dim, Dim.AUTO, Dim.DYNAMIC, a name, or None", dim)
        is_dynamic = getattr(getattr(dim, "type", None), "name", None) == "DYNAMIC"
        if obj.shape[axis] in (0, 1) and (is_dynamic or isinstance(dim, (str, torch.export.Dim))):
            raise DynamicShapesError(
                f"{_format(path)}: axis {axis} should vary, but has size {obj.shape[axis]} in the example; "
                "torch.export fixes sizes 0 and 1. Pass an example of size 2 or more along this axis."
            )


def _is_dim(dim: object) -> bool:
    return isinstance(dim, (str, torch.export.Dim, DimHint)) or dim is None


def _misfit(path: _Path, expected: str, found: object) -> DynamicShapesError:
    return DynamicShapesError(f"{_format(path)}: expected {expected}, found {found!r}.")


def _format(path: _Path) -> str:
    return ".".join(path) or "the inputs"
