"""Convert specifications of ``torch.fx.experimental.dynamic_spec`` to ``dynamic_shapes``.

torch 2.15 itself converts a ``ShapeVar`` to an unbacked size, with which few models can be traced.
"""

# B = ShapeVar("batch", max=64)
# ParamsSpec({                                       {
#     "x": TensorSpec([B, STATIC]),          -->         "x": {0: Dim.DYNAMIC(max=64)},
#     "y": TensorSpec([B * 2, STATIC]),                  "y": {0: Dim.DYNAMIC},
#     "n": IntVar("steps", min=1),                       "n": Dim.DYNAMIC,
# })                                                 }   and every size with its expression: B, B * 2, steps

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.export import Dim

from ..errors import DynamicShapesError, describe_class
from ..registry.recipe.aliases import DynamicShapes
from ..trace.adapted_shapes import attached_spec, elements_of, opened_spec, spec_classes
from .shapes import builtin_kind, same_container
from .walk import Node, key_name, node_of

if TYPE_CHECKING:
    import sympy


class Size(NamedTuple):
    """One dynamic size of a ``torch.fx.experimental.dynamic_spec`` specification, and its value in the example."""

    leaf: int  # the number of the leaf, in the order of the inputs
    axis: int | None  # the axis; `None` for a number
    path: str  # the place, for messages
    value: int  # its value in the example
    expression: Any  # its expression, in sympy's symbols
    variable: Any  # the variable, if the expression is a single variable

    @property
    def place(self) -> str:
        return self.path if self.axis is None else f"{self.path}: axis {self.axis}"


class Stated(NamedTuple):
    """A specification of ``torch.fx.experimental.dynamic_spec``, converted to ``dynamic_shapes``."""

    shapes: dict[str, Any]  # entries by parameter name
    sizes: tuple[Size, ...]  # the sizes that vary
    assumptions: tuple[Any, ...]  # constraints on the sizes, each a sympy expression


def with_attached(module: torch.nn.Module, forward: Callable[..., Any], shapes: DynamicShapes) -> DynamicShapes:
    """Return ``shapes``, or, if ``shapes`` is ``"auto"``, the shapes that ``@dynamic_spec`` attached to ``forward``."""
    attached = attached_spec(forward)
    if attached is None or shapes is None:
        return shapes
    if isinstance(shapes, str) and shapes == "auto":
        return attached
    raise DynamicShapesError(
        f"dynamic_shapes: {type(module).__qualname__}.forward declares its shapes with @dynamic_spec(...). Remove the "
        'decorator, or use the shapes in its arguments:\n    dynamic_shapes="auto"'
    )


def by_parameter(forward: Callable[..., Any], shapes: DynamicShapes) -> tuple[Any, tuple[Any, ...]]:
    """Return entries by input name, and assumptions about sizes, of a ``ShapesSpec`` or ``ParamsSpec`` of torch."""
    # shapes: a `ShapesSpec`, a `ParamsSpec`, or a dict of the same form; any other value is returned unchanged. The
    # entries `"*args"` and `"**kwargs"` are replaced by entries with the names of the inputs.
    shapes, assumptions = opened_spec(shapes)
    if not isinstance(shapes, Mapping):
        return shapes, assumptions
    named = dict(shapes)
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # a scripted module has no signature
        return named, assumptions
    rest = {p.kind: p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if "*args" in named and inspect.Parameter.VAR_POSITIONAL in rest:
        entries, classes = named.pop("*args"), spec_classes()
        named[rest[inspect.Parameter.VAR_POSITIONAL]] = tuple(entries) if classes is None else classes.SeqSpec(entries)
    swallowing = rest.get(inspect.Parameter.VAR_KEYWORD)
    for key in ("**kwargs", swallowing):
        if key in named and swallowing is not None and isinstance(named[key], Mapping):
            named |= named.pop(key)
    return named, assumptions


def without_specs(inputs: Mapping[str, Any], shapes: Mapping[str, Any], assumptions: tuple[Any, ...] = ()) -> Stated:
    """Convert ``TensorSpec``, ``IntVar`` and similar entries to ``dynamic_shapes``; other entries stay unchanged."""
    classes = spec_classes()
    if classes is None:  # this torch has no such classes
        return Stated(dict(shapes), (), ())
    writing = _Writing(classes)
    written = {name: writing.write(value, shapes.get(name), (name,)) for name, value in inputs.items()}
    # `check_dynamic_shapes` refuses missing and unknown entries
    written = {name: written.get(name, entry) for name, entry in shapes.items()}
    first: dict[Any, Size] = {}
    for size in writing.sizes:
        if size.variable is not None:
            _check_range(size)
            found = first.setdefault(size.expression, size)
            if found.value != size.value:
                raise DynamicShapesError(
                    f"{size.place} ({_name(size.expression)}) is {size.value} in the example, but {found.place} is "
                    f"{found.value} under that name. Sizes with one name must be equal: rename one of them."
                )
    values = {symbol: size.value for symbol, size in first.items()}
    stated = [(size.place, size.expression, size.value) for size in writing.sizes]
    for place, expression, value in [*stated, *(("assumptions", one, True) for one in assumptions)]:
        unknown = sorted(_name(symbol) for symbol in expression.free_symbols - values.keys())
        if unknown:
            raise DynamicShapesError(
                f"{place}: {_name(expression)} depends on {unknown}, which is not the size of any axis."
            )
        found_value = expression.subs(values)
        if found_value != value:
            named = {_name(symbol): value for symbol, value in values.items() if symbol in expression.free_symbols}
            wrong = "does not hold" if value is True else f"is {found_value}, but the size is {value},"
            raise DynamicShapesError(f"{place}: {_name(expression)} {wrong} in the example, where sizes are {named}.")
    return Stated(written, tuple(writing.sizes), assumptions)


class _Writing:
    def __init__(self, classes: types.ModuleType) -> None:
        self.classes, self.leaves = classes, 0
        self.sizes: list[Size] = []

    def write(self, obj: object, spec: DynamicShapes, path: tuple[str, ...]) -> DynamicShapes:
        """Convert the specification of one input to ``dynamic_shapes``, and count the leaves of the input."""
        node = node_of(obj)
        if node is None:
            self.leaves += 1
            place = ".".join(path)
            if isinstance(spec, self.classes.TensorSpec):
                if not isinstance(obj, torch.Tensor):
                    raise DynamicShapesError(
                        f"{place}: found a TensorSpec for {describe_class(type(obj))}, which is not a tensor."
                    )
                if len(spec) != obj.dim():
                    raise DynamicShapesError(
                        f"{place}: expected one entry for each of the {obj.dim()} axes of shape {tuple(obj.shape)}, "
                        f"found {len(spec)} in the TensorSpec."
                    )
                dims = {axis: self.of_size(size, spec[axis], place, axis) for axis, size in enumerate(obj.shape)}
                return {axis: dim for axis, dim in dims.items() if dim is not None}
            if isinstance(spec, torch.SymInt) or (type(spec) is int and not isinstance(obj, torch.Tensor)):
                if type(obj) is not int:
                    hint = " Remove it: the size is fixed." if isinstance(obj, torch.Tensor) and not obj.dim() else ""
                    raise DynamicShapesError(
                        f"{place}: {_kind(spec)} is for an integer, found {describe_class(type(obj))}.{hint}"
                    )
                return self.of_size(obj, spec, place, None)
            if isinstance(spec, (self.classes.DictSpec, self.classes.SeqSpec, self.classes.ObjectSpec)):
                raise DynamicShapesError(
                    f"{place}: found a {type(spec).__name__} for {describe_class(type(obj))}, which has no children."
                )
            return spec
        names = [key_name(key) for key in node.keys]
        found = self.entries(obj, node, names, spec, path)
        entries = [None] * len(names) if found is None else found
        children = zip(node.children, entries, names, strict=True)
        below = [self.write(child, entry, (*path, name)) for child, entry, name in children]
        untouched = all(one is entry for one, entry in zip(below, entries, strict=True))
        # an entry of dynamic_shapes keeps its class; `check_dynamic_shapes` refuses a wrong class
        is_spec = isinstance(spec, (self.classes.SeqSpec, self.classes.DictSpec, self.classes.ObjectSpec))
        return spec if found is None or (untouched and not is_spec) else same_container(obj, node, below)

    def entries(
        self, obj: object, node: Node, names: list[str], spec: DynamicShapes, path: tuple[str, ...]
    ) -> list[Any] | None:
        """Return a specification's entries for the children of an input; ``None`` if it lists no children."""
        place, kind = ".".join(path), builtin_kind(obj, node)
        keys: list[Any] = list(obj) if isinstance(obj, Mapping) and kind is not None else names
        if isinstance(spec, self.classes.SeqSpec):
            entries = elements_of(spec)
            if not isinstance(obj, (list, tuple)):
                raise self.misfit(place, names, obj, spec)
            if len(entries) > len(names):
                raise DynamicShapesError(f"{place}: the SeqSpec has {len(entries)} entries for {len(names)} elements.")
            return entries + [None] * (len(names) - len(entries))
        if isinstance(spec, (self.classes.DictSpec, self.classes.ObjectSpec)):
            if isinstance(obj, (list, tuple)) and not hasattr(obj, "_fields"):
                raise self.misfit(place, names, obj, spec)
            keys = list(getattr(obj, "_fields", keys))
            given = dict(spec.items())
            unknown = [key for key in given if key not in keys]
            if unknown:
                raise DynamicShapesError(
                    f"{place}: the {type(spec).__name__} has the entries {unknown}, which are not children of "
                    f"{describe_class(type(obj))}. Its children are {keys}; children left out have fixed sizes."
                )
            return [given.get(key) for key in keys]
        if isinstance(spec, (self.classes.TensorSpec, torch.SymInt)):
            raise self.misfit(place, names, obj, spec)
        if isinstance(spec, (list, tuple)) and len(spec) == len(names):  # dynamic_shapes, or specifications in them
            return list(spec)
        if isinstance(spec, Mapping) and kind is not None and set(spec) == set(keys):
            return [spec[key] for key in keys]
        return None

    def misfit(self, place: str, names: list[str], obj: object, spec: DynamicShapes) -> DynamicShapesError:
        if isinstance(obj, Mapping):
            fitting = "a DictSpec by its keys"
        elif isinstance(obj, (list, tuple)):
            fitting = "a SeqSpec"
        else:
            fitting = "an ObjectSpec by the names of its children"
        return DynamicShapesError(
            f"{place}: expected {fitting}, {names}, for {describe_class(type(obj))}, found {_kind(spec)}."
        )

    def of_size(self, size: int, spec: DynamicShapes, path: str, axis: int | None) -> DynamicShapes:
        if spec is None:
            return None
        if isinstance(spec, torch.SymInt):
            variable = spec if isinstance(spec, self.classes.IntVar) else None
            found = Size(self.leaves - 1, axis, path, size, spec.node.expr, variable)
            self.sizes.append(found)
            if axis is None or variable is None:
                return Dim.DYNAMIC
            _check_range(found)
            least = variable.min if variable.min is not None and variable.min > 2 else None
            return Dim.DYNAMIC if least is variable.max is None else Dim.DYNAMIC(min=least, max=variable.max)
        if spec != size:
            place = path if axis is None else f"{path}: axis {axis}"
            raise DynamicShapesError(f"{place} should be {spec}, but is {size} in the example.")
        return None


def _check_range(size: Size) -> None:
    least, most = size.variable.min, size.variable.max
    if (least is not None and size.value < least) or (most is not None and size.value > most):
        limits = [f"at least {least}"] * (least is not None) + [f"at most {most}"] * (most is not None)
        raise DynamicShapesError(
            f"{size.place} is {size.value} in the example, but {_name(size.expression)} must be {', '.join(limits)}."
        )


def _kind(spec: DynamicShapes) -> str:
    return type(spec).__name__ if not isinstance(spec, torch.SymInt) else _name(spec.node.expr)


def _name(expression: sympy.Basic) -> str:
    """Return a sympy expression as text, without the numbers that distinguish symbols of the same name."""
    text = str(expression)
    for symbol in sorted(map(str, expression.free_symbols), key=len, reverse=True):
        text = text.replace(symbol, symbol.partition("#")[0])
    return text
