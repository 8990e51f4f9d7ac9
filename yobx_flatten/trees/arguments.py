"""Check the arguments of ``export_program`` and ``export_onnx``, and convert specifications of their sizes.

The specifications of ``torch.fx.experimental.dynamic_spec`` are converted to ``dynamic_shapes``. torch 2.15 itself
converts a ``ShapeVar`` to an unbacked size, with which few models can be traced.
"""

# B = ShapeVar("batch", max=64)
# ParamsSpec({                                       {
#     "x": TensorSpec([B, STATIC]),          -->         "x": {0: Dim.DYNAMIC(max=64)},
#     "y": TensorSpec([B * 2, STATIC]),                  "y": {0: Dim.DYNAMIC},
#     "n": IntVar("steps", min=1),                       "n": Dim.DYNAMIC,
# })                                                 }   and every size with its expression: B, B * 2, steps

from __future__ import annotations

import contextlib
import difflib
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.export import Dim

from ..errors import DynamicShapesError, InvalidArgumentError, NotRegisteredError, describe_class
from ..registry.recipe.aliases import DynamicShapes
from ..trace.adapted_shapes import attached_spec, elements_of, opened_spec, spec_classes
from .shapes import builtin_kind, same_container
from .walk import Node, check_no_cycles, class_name, key_name, node_of, torch_leaves

if TYPE_CHECKING:
    import sympy

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_EXAMPLE = '\n    args=(x,), kwargs={"y": y}'


def check_arguments(module: object, args: object, kwargs: object) -> None:
    """Raise an error if ``module`` is not a module, or if ``forward`` or ``torch.export`` refuses the arguments."""
    owner = getattr(module, "__self__", None)
    if inspect.ismethod(module) and isinstance(owner, torch.nn.Module):
        name, kind = module.__name__, type(owner).__qualname__
        raise InvalidArgumentError(
            f"module: expected a torch.nn.Module, found the method {name!r} of {kind}. Record a call of the method, "
            f"and export the recording:\n    with record_calls(model, method={name!r}) as calls: model.{name}(...)\n"
            "    export_onnx(calls.module(), kwargs=calls.example(), path=...)"
        )
    if not isinstance(module, torch.nn.Module):
        hint = instance_hint(module)
        if isinstance(module, str):
            hint = f" A model by its name or folder is for:\n    export_folder({module!r}, folder)"
        raise InvalidArgumentError(f"module: expected a torch.nn.Module, found {describe_class(module)}.{hint}")
    if not isinstance(args, tuple):
        raise InvalidArgumentError(
            f"args: expected a tuple of positional arguments, found {describe_class(args)}.{_EXAMPLE}"
        )
    if not isinstance(kwargs, Mapping | None):
        raise InvalidArgumentError(
            f"kwargs: expected a dict of keyword arguments, found {describe_class(kwargs)}.{_EXAMPLE}"
        )
    for name, value in inputs_by_name(module, args, kwargs).items():
        check_no_cycles(value, name)
        for path, leaf in torch_leaves(value, name):
            if not issubclass(type(leaf), torch.Tensor) or not (leaf.is_nested or leaf.layout in _SPARSE):
                continue
            kind, cure = "sparse", f"it dense:\n    {path}.to_dense()"
            if leaf.is_nested:
                kind = "nested"
                cure = f"its rows padded to one length, and a mask:\n    torch.nested.to_padded_tensor({path}, 0.0)"
            refused = InvalidArgumentError(
                f"{path} is a {kind} tensor, which torch.export does not accept. Pass {cure}"
            )
            refused.path = path  # type: ignore[attr-defined] # for check_inputs
            raise refused
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # a scripted module has no signature to check
        return
    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        unknown = [name for name in kwargs or {} if name not in signature.parameters]
        raise InvalidArgumentError(
            f"{type(module).__qualname__}.forward cannot be called with these args and kwargs: {error}. Its parameters "
            f"are {', '.join(signature.parameters)}.{did_you_mean(unknown, signature.parameters)}"
        ) from None


def instance_hint(given: object) -> str:
    """If ``given`` is a class, return a sentence for an error message on how to make an instance; else ``""``."""
    how = ".from_pretrained(FOLDER)" if hasattr(given, "from_pretrained") else "(...)"
    return f" Make an instance: {given.__qualname__}{how}." if isinstance(given, type) else ""


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    names = list(known)
    close = [match for name in unknown for match in difflib.get_close_matches(name, names, n=1)]
    return f" Did you mean {', '.join(map(repr, close))}?" if close else ""


def inputs_by_name(module: object, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all inputs of a module by the parameter names of its ``forward``, in the order of the parameters."""
    # returns: the inputs by name; under `args` and `kwargs` if the names of `forward` are unknown or do not fit
    kwargs, bound = kwargs or {}, None
    if isinstance(module, torch.nn.Module):
        with contextlib.suppress(TypeError, ValueError):
            bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    if bound is None:
        return {**({"args": args} if args else {}), **({"kwargs": dict(kwargs)} if kwargs else {})}
    swallowed = {p.name for p in bound.signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD}
    named = {name: value for name, value in bound.arguments.items() if name not in swallowed}
    return {**named, **{name: value for name, value in kwargs.items() if name not in named}}


def shapes_by_name(inputs: Mapping[str, Any], shapes: DynamicShapes) -> dict[str, Any]:
    """Return the ``dynamic_shapes`` of every input by name; inputs without an entry get ``None``."""
    # shapes: a dict by parameter name, or a list in the order of the inputs
    if isinstance(shapes, (tuple, list)):
        if len(shapes) > len(inputs):
            raise DynamicShapesError(
                f"dynamic_shapes: found {len(shapes)} entries for {len(inputs)} inputs, {list(inputs)}. Write one "
                "entry per input, None for an input of fixed size."
            )
        shapes = dict(zip(inputs, shapes, strict=False))
    if not isinstance(shapes, Mapping):
        raise DynamicShapesError(
            f'dynamic_shapes: expected "auto", None, or a dict with the keys {list(inputs)}, found '
            f"{describe_class(shapes)}."
        )
    missing = [name for name, value in inputs.items() if name not in shapes and node_of(value) is not None]
    if missing:
        raise DynamicShapesError(
            f"dynamic_shapes: each input that contains tensors needs an entry. Missing: {missing}. The entry None "
            "fixes the sizes of an input:\n"
            f"    {missing[0]!r}: None"
        )
    return {**dict.fromkeys(inputs), **shapes}


def check_no_modules(inputs: Mapping[str, Any]) -> None:
    """Raise a clear error for inputs that contain a module, where torch would report "expected 0 shapes, got 1"."""
    for name, value in inputs.items():
        for path, leaf in torch_leaves(value, name):
            if isinstance(leaf, torch.nn.Module):
                cls = type(leaf).__qualname__
                raise NotRegisteredError(
                    f"{path} is a module ({class_name(type(leaf))}), which cannot be an input. Assign it to an "
                    "attribute of the module that uses it:\n    self.part = part\nor, if it holds only tensors, "
                    "register its class with the names of the tensors:\n"
                    f"    register({cls}, children=['x'])"
                )


def has_no_data(module: torch.nn.Module, leaves: Iterable[Any], brought: Collection[str] = ()) -> str:
    """Return a text that names a weight or input without data (fake or on ``meta``); ``""`` if all have data."""
    # brought: names of weights that are loaded when a layer is called; none by default
    from ..core.private_names.of_torch import FakeTensor

    state = (*module.named_parameters(), *module.named_buffers())
    weights = [(name, tensor) for name, tensor in state if name not in brought]
    for name, tensor in [*weights, *(("an input", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))]:
        if isinstance(tensor, FakeTensor):
            return f"{name} is a FakeTensor, which has no data"
        if tensor.is_meta:
            return f"{name} is on the device meta and has no data"
    return ""


def check_not_offloaded(module: torch.nn.Module) -> None:
    """Refuse a module with weights offloaded by the library accelerate, which ``torch.export`` would not find."""
    for name, part in module.named_modules():
        hook = getattr(part, "_hf_hook", None)
        if any(getattr(one, "offload", False) for one in (hook, *getattr(hook, "hooks", ()))):
            raise InvalidArgumentError(
                f"The weights of {name or 'the module'} ({type(part).__qualname__}) are offloaded by accelerate, which "
                "loads them when the layer is called, so torch.export finds no weights. Call export_program, which "
                "loads them. Or load the model without device_map, or load the weights first:\n"
                "    accelerate.hooks.remove_hook_from_module(module, recurse=True)"
            )


def on_other_devices(module: torch.nn.Module, tensors: Iterable[tuple[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the inputs on a different device than the weights, as (path, input's device, weights' device)."""
    # several devices are valid if hooks of accelerate move the inputs, and a 0-d tensor may be on the CPU
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) != 1 or any(hasattr(part, "_hf_hook") for part in module.modules()):
        return []
    (device,) = devices
    return [
        (path, str(tensor.device), str(device))
        for path, tensor in tensors
        if tensor.device != device and not (tensor.dim() == 0 and tensor.device.type == "cpu")
    ]


def about_devices(path: str, found: str, weights: str) -> str:
    return f"{path} is on {found}, the weights are on {weights}. The trace fails unless forward moves it. Move it:"


# -- specifications of torch.fx.experimental.dynamic_spec --------------------------------------------------------------


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
        f"dynamic_shapes was given, but {type(module).__qualname__}.forward declares its shapes with "
        '@dynamic_spec(...). Remove the decorator, or use the declared shapes:\n    dynamic_shapes="auto"'
    )


def by_parameter(forward: Callable[..., Any], shapes: DynamicShapes) -> tuple[Any, tuple[Any, ...]]:
    """Return the entries of torch's ``ShapesSpec`` or ``ParamsSpec`` by input name, and its assumptions about sizes."""
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
                    f"{size.place} is {size.value} in the example, but {found.place} is {found.value}. Both have the "
                    f"name {_name(size.expression)}, and sizes with the same name must be equal. Rename one of them."
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
            wrong = "does not hold" if value is True else f"is {found_value}, but the size is {value}"
            raise DynamicShapesError(f"{place}: in the example, with the sizes {named}, {_name(expression)} {wrong}.")
    return Stated(written, tuple(writing.sizes), assumptions)


class _Writing:
    def __init__(self, classes: types.ModuleType) -> None:
        self.classes, self.leaves = classes, 0
        self.sizes: list[Size] = []

    def write(self, obj: object, spec: DynamicShapes, path: tuple[str, ...]) -> DynamicShapes:
        """Convert the specification of one input to ``dynamic_shapes``."""
        node = node_of(obj)
        if node is None:
            self.leaves += 1
            place, kind = ".".join(path), describe_class(type(obj))
            if isinstance(spec, self.classes.TensorSpec):
                if not isinstance(obj, torch.Tensor):
                    raise DynamicShapesError(
                        f"{place}: found a TensorSpec for {kind}, which is not a tensor. Write None to fix the value."
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
                    raise DynamicShapesError(f"{place}: the entry {_kind(spec)} is for an integer, found {kind}.{hint}")
                return self.of_size(obj, spec, place, None)
            if isinstance(spec, (self.classes.DictSpec, self.classes.SeqSpec, self.classes.ObjectSpec)):
                raise DynamicShapesError(
                    f"{place}: found a {type(spec).__name__} for {kind}, which has no children. Write "
                    f"{'a TensorSpec or ' if isinstance(obj, torch.Tensor) else ''}None."
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
        """Return the entries of ``spec`` for the children of an input; ``None`` if ``spec`` does not list children."""
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
            fitting = "a DictSpec with entries for the keys"
        elif isinstance(obj, (list, tuple)):
            fitting = "a SeqSpec with entries for the elements"
        else:
            fitting = "an ObjectSpec with entries for the children"
        return DynamicShapesError(
            f"{place}: expected {fitting} {names} of {describe_class(type(obj))}, found {_kind(spec)}."
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
            raise DynamicShapesError(f"{place} must be {spec} by the specification, but is {size} in the example.")
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
