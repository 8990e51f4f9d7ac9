"""Check the inputs of ``torch.export`` before the trace, and check the flatten functions of a class."""

from __future__ import annotations

import dataclasses
import dis
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.export import Dim

from ..core.contents import Layouts
from ..core.private_names.of_torch import pytree
from ..errors import DynamicShapesError, FlattenError, InvalidArgumentError, NotRegisteredError, describe_class
from ..registry.claims import REGISTRY
from ..registry.recipe.aliases import DynamicShapes
from ..registry.recipe.contract import Recipe, require_class
from ..registry.recipe.roundtrip import CHECKS
from ..trace.hook import EXPORT_HOOK
from ..trees import arguments
from ..trees.shapes import check_dynamic_shapes, shapes_of_leaves
from ..trees.shapes import dynamic_shapes as write_dynamic_shapes
from ..trees.walk import class_name, find_cycle, format_cycle, format_path, leaf_places, own_children, torch_leaves
from .opaque import find_unregistered, remedy_for


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One error or warning that :func:`check_inputs` reports before an export.

    Attributes:
        severity: ``"error"`` if the export fails or the program is wrong; ``"warning"`` if the program may refuse
            inputs or fix sizes that you want to vary.
        path: the input that causes the problem, as Python code inside ``forward``.
        message: description of the problem.
        remedy: line of code that solves the problem; empty if no line is known.
        kind: the exception class that :meth:`Findings.raise_errors` raises for the problem.
    """

    severity: str
    path: str
    message: str
    remedy: str = ""
    kind: type[FlattenError] = InvalidArgumentError

    @property
    def text(self) -> str:
        """The message of the error or warning, followed by the line of code that solves the problem."""
        remedy = self.remedy.replace("\n", "\n    ")
        return f"{self.message}\n    {remedy}" if remedy else self.message

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}"


class Findings(tuple[Finding, ...]):
    """The errors and warnings of :func:`check_inputs`: ``print`` shows them, ``bool`` is false if there are none."""

    __slots__ = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The problems of severity ``"error"``: the export fails, or the exported program returns wrong values."""
        return tuple(finding for finding in self if finding.severity == "error")

    def raise_errors(self) -> None:
        """Raise an exception if :func:`check_inputs` found errors; warnings alone raise nothing.

        Raises:
            FlattenError: for the first error, an ``InvalidArgumentError``, ``NotRegisteredError`` or
                ``DynamicShapesError`` whose message lists all errors.
        """
        if self.errors:
            raise self.errors[0].kind("\n".join(finding.text for finding in self.errors))

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing found"

    def __repr__(self) -> str:
        return f"Findings({', '.join(map(repr, self))})"


def check_inputs(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: DynamicShapes = None,
) -> Findings:
    """Check the arguments of ``torch.export.export`` before the export, without running the module.

    If you export inside a ``with`` block that registers classes, call this function inside the same block.

    Args:
        module: the module to export.
        args: positional arguments; none by default.
        kwargs: keyword arguments; none by default.
        dynamic_shapes: see ``torch.export.export``; for ``"auto"`` see :func:`~yobx_flatten.export_program`.
            ``dynamic_shapes=None``, the default, makes every size static.

    Returns:
        The errors, followed by the warnings. These are errors: an argument that ``forward`` does not accept, an object
        that contains itself, an object of an unregistered class, wrong ``dynamic_shapes``, offloaded weights, and a
        tensor passed twice. These are warnings: an argument that ``forward`` never reads, a slice of a tensor, tensors
        that share memory, an input on another device than the weights, dynamic axes of size 0 or 1 or of equal sizes.

    >>> class Adds(torch.nn.Module):
    ...     def forward(self, x, y):
    ...         return x + y
    >>> x = torch.zeros(3, 3)
    >>> print(check_inputs(Adds(), (x, x)))
    error: y is the same tensor as x. torch.export treats both as one input, and the program ignores x. Pass a copy:
        y.clone()
    """
    kwargs = kwargs or {}
    can_be_walked = all(isinstance(given, kind) for given, kind in ((args, tuple), (kwargs, Mapping)))
    if can_be_walked:
        named = arguments.inputs_by_name(module, args, kwargs)
        cycles = [cycle for name, value in named.items() if (cycle := find_cycle(value, name)) is not None]
        if cycles:
            return Findings(Finding("error", one, format_cycle(one, outer), f"{one} = None") for one, outer in cycles)
    try:
        arguments.check_arguments(module, args, kwargs)
        found: list[Finding] = []
    except InvalidArgumentError as error:
        found = [Finding("error", getattr(error, "path", ""), str(error))]
        if not can_be_walked:
            return Findings(found)
    inputs = arguments.inputs_by_name(module, args, kwargs)
    leaves = [item for name, value in inputs.items() for item in torch_leaves(value, name)]
    if isinstance(module, torch.nn.Module):
        found += _names(module, kwargs, inputs)
    found += _classes(inputs, leaves)
    tensors = [(path, leaf) for path, leaf in leaves if issubclass(type(leaf), torch.Tensor) and not leaf.is_nested]
    if isinstance(module, torch.nn.Module):
        try:
            arguments.check_not_offloaded(module)
        except InvalidArgumentError as error:
            message, _, remedy = str(error).partition("\n    ")
            found.append(Finding("error", "module", message, remedy))
        for path, device, weights in arguments.on_other_devices(module, tensors):
            text, remedy = arguments.about_devices(path, device, weights), f"{path}.to({weights!r})"
            found.append(Finding("warning", path, text, remedy))
    found += _duplicates(tensors)
    found += _slices(tensors)
    if dynamic_shapes is not None:
        found += _sizes(module, inputs, dynamic_shapes)
    return Findings(sorted(found, key=lambda finding: finding.severity))


def _names(module: torch.nn.Module, kwargs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return
    forward = f"{type(module).__qualname__}.forward"
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in kwargs:
            if name not in parameters:
                hint = arguments.did_you_mean([name], parameters)
                text = f"{forward} has no parameter {name!r}; its **kwargs swallow the argument.{hint}"
                yield Finding("warning", name, text)
    inner = inspect.unwrap(module.forward)
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    if code is None or {"locals", "eval", "exec", "vars"} & set(code.co_names):
        return
    read: set[Any] = set(code.co_cellvars)  # an inner function reads these
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")):
            read.update(instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        if name not in read and name != "self" and inputs.get(name) is not None:
            yield Finding("warning", name, f"{name} is passed, but {forward} never reads it.")


def _classes(inputs: Mapping[str, Any], leaves: list[tuple[str, Any]]) -> Iterator[Finding]:
    explained = set()
    for name, value in inputs.items():
        for unregistered in find_unregistered(value, name=name):
            if unregistered.inside is None:
                explained.add(unregistered.path)
                message = str(unregistered).split("\n")[0]
                yield Finding("error", unregistered.path, message, unregistered.remedy, NotRegisteredError)
    layouts = Layouts()
    taken: tuple[type, ...] = (
        *(torch.Tensor, int, float, complex, bool, str, bytes, type(None), type(...)),
        *(torch.SymInt, torch.SymFloat, torch.SymBool, torch.ScriptObject),
        *([enum.Enum] if EXPORT_HOOK.active else []),  # register_flattening_functions replaces enum members by texts
    )
    for path, leaf in leaves:
        if path in explained or issubclass(type(leaf), taken):
            continue
        remedy = remedy_for(type(leaf), leaf, layouts, path)
        message = f"{path} is a {class_name(type(leaf))}, which torch.export does not accept. {remedy.advice}:"
        yield Finding("error", path, message, remedy.line, NotRegisteredError)


def _duplicates(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[Finding]:
    first_path: dict[int, str] = {}  # by tensor
    first_start: dict[int, str] = {}  # by address
    for path, tensor in tensors:
        if id(tensor) in first_path:
            other = first_path[id(tensor)]
            text = (
                f"{path} is the same tensor as {other}. torch.export treats both as one input, and the program ignores "
                f"{other}. Pass a copy:"
            )
            yield Finding("error", path, text, f"{path}.clone()")
            continue
        first_path[id(tensor)] = path
        try:
            start = tensor.data_ptr()
        except RuntimeError:  # of a FakeTensor or a sparse tensor
            continue
        if start and (other := first_start.setdefault(start, path)) != path:
            text = (
                f"{path} and {other} share their memory. If the module writes into one of them, the program cannot be "
                "decomposed, nor converted to ONNX. If the module writes into them, pass a copy:"
            )
            yield Finding("warning", path, text, f"{path}.clone()")


def _slices(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[Finding]:
    if EXPORT_HOOK.active:  # the block passes a contiguous copy to the trace
        return
    for path, tensor in tensors:
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            continue
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if span > tensor.numel():  # other memory is between the first and last element
            yield Finding(
                "warning",
                path,
                f"{path} is a slice of a larger tensor. The program may require the strides of this slice, and refuse "
                "other strides. Pass a contiguous example, or export inside register_flattening_functions():",
                f"{path}.contiguous()",
            )


def _sizes(module: Callable[..., Any], inputs: dict[str, Any], shapes: Any) -> Iterator[Finding]:
    try:
        if isinstance(shapes, str) and shapes == "auto":
            shapes = write_dynamic_shapes(inputs)
        else:
            shapes, assumptions = arguments.by_parameter(getattr(module, "forward", module), shapes)
            if isinstance(shapes, Mapping):
                shapes = arguments.without_specs(inputs, shapes, assumptions).shapes
            else:
                shapes = arguments.shapes_by_name(inputs, shapes)
            check_dynamic_shapes(inputs, dict(shapes))
    except DynamicShapesError as error:
        text = f"dynamic_shapes does not fit: {error}"
        yield Finding("error", str(error).partition(":")[0], text, "", DynamicShapesError)
        return
    # by size, and by name or position: axes without a name and with the same position are usually the batch
    by_size: dict[int, dict[Any, tuple[str, int]]] = {}
    for name, value in inputs.items():
        places = leaf_places(value, own_children, name)
        for place, entries in zip(places, shapes_of_leaves(value, dict(shapes)[name]), strict=True):
            if not isinstance(place.obj, torch.Tensor) or place.obj.is_nested:
                continue
            for axis, dim in (entries or {}).items():
                if dim is None or type(dim) is int or dim is Dim.STATIC:
                    continue
                path, size = format_path(name, place.keys), int(place.obj.shape[axis])
                if size in (0, 1):
                    text = (
                        f"{path} has size {size} along axis {axis}, which may vary: torch.export fixes sizes 0 and 1. "
                        "Pass an example of size 2 or more along this axis."
                    )
                    yield Finding("warning", path, text)
                named = getattr(dim, "__name__", None) if isinstance(dim, Dim) else None
                by_size.setdefault(size, {}).setdefault(named or axis, (path, axis))
    for size, different in by_size.items():
        if size > 1 and len(different) > 1:
            where = " and ".join(f"axis {axis} of {path}" for path, axis in different.values())
            text = (
                f"{where} may vary and have the same size, {size}: code that tests whether they are equal is fixed by "
                "the trace. Pass an example in which these sizes differ."
            )
            yield Finding("warning", next(iter(different.values()))[0], text)


def check_recipe(cls: type, sample: object) -> None:
    """Check the flatten functions that this package or another library registered with torch for a class.

    Args:
        cls: the class.
        sample: an instance with as many fields filled as possible, since empty fields are not checked.

    Raises:
        InvalidRegistrationError: when ``cls`` is not a class.
        NotRegisteredError: when torch does not know the class.
        InvalidArgumentError: when ``sample`` is not an instance of ``cls``, or is an instance of a subclass of ``cls``.
        RoundTripError: when a check fails. Unflattening must accept placeholders, and must not create tensors. It must
            return an object with the same children (not copies), an equal static part and equal attributes. The static
            part must be hashable and must not contain tensors. Flattening with keys must return the same children and
            static part as flattening without keys. The spec must be serializable. torch's C++ pytree, if it is in use,
            must return the same leaves as the Python pytree.

    >>> import collections
    >>> check_recipe(collections.OrderedDict, collections.OrderedDict(a=1, b=[2, 3]))
    """
    require_class(cls, "check_recipe")
    recipe = recipe_of(cls)
    if type(sample) is not cls:
        raise InvalidArgumentError(
            f"check_recipe: expected an instance of {describe_class(cls)}, found {describe_class(sample)}. A "
            "registration does not apply to subclasses."
        )
    for check in CHECKS.values():
        check(recipe, sample)


def recipe_of(cls: type) -> Recipe:
    ours = REGISTRY.recipe_in_force(cls)
    if ours is not None:
        return ours
    node = pytree.SUPPORTED_NODES.get(cls)
    if node is None:
        raise NotRegisteredError(
            f"check_recipe: torch does not know how to flatten {describe_class(cls)}. Register the class:\n"
            f"    {REGISTRY.remedy(cls) or f'register_class_flattening({cls.__qualname__}, ...)'}"
        )
    return Recipe.from_functions(cls, node.flatten_fn, node.unflatten_fn, node.flatten_with_keys_fn)
