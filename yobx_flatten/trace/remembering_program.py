"""A program that remembers the classes of its inputs and outputs, and refuses inputs that it was not traced for."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram

from ..errors import NotRegisteredError
from ..private_names.of_torch import FloorDiv, Max, Min, pytree
from ..registry.claims import REGISTRY
from .onnx_operators import open_supports
from .program_inputs import checking_constants, with_integers
from .trace_settings import FEW_TENSORS, PLAIN_ATTENTION, fake_tensor_cache_off


class _RememberingProgram(ExportedProgram):
    """An ``ExportedProgram`` whose errors name classes that are not registered."""

    def module(self, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        classes = _classes_of(self)
        _require_registered(classes)  # torch would derive wrong paths of guards from the inputs here
        module = super().module(*args, **kwargs)
        for hook in (checking_constants(self), with_integers(self), _renaming(self)):  # the last hook runs first
            if hook is not None:
                module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        if classes:
            module.register_forward_pre_hook(functools.partial(_require_registered, classes), prepend=True)
        return module

    def run_decompositions(self, decomp_table: dict[Any, Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        _require_registered(_classes_of(self))
        attention = torch.ops.aten.scaled_dot_product_attention.default
        with contextlib.ExitStack() as stack:
            if self.range_constraints and len(self.graph_signature.user_inputs) > FEW_TENSORS:
                stack.enter_context(fake_tensor_cache_off())
            if decomp_table is not None and attention not in decomp_table:
                stack.enter_context(PLAIN_ATTENTION)
            program = super().run_decompositions(decomp_table, *args, **kwargs)
        return _remember(without_needless_assertions(program))


def _renaming(program: ExportedProgram) -> Callable[..., Any] | None:
    """Make a hook that renames the keyword arguments of a call to the input names of the program."""
    spec = program.call_spec.in_spec
    names = [] if spec is None else spec.children()[1].context
    supports = open_supports()
    if not names or not supports:
        return None

    def rename(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if kwargs.keys() == set(names):
            return None
        for support in supports:
            kwargs = support.named_as(names, kwargs)
        return args, kwargs

    return rename


def remembering(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``ExportedProgram.__init__``, so that calls of the program name unregistered classes in their errors."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _own_specs(self)
        _remember(self)

    return __init__


def _own_specs(program: ExportedProgram) -> None:
    """Copy the static parts of a program, so that a change to an object of the caller does not change the program.

    This package's flatten functions return copies of lists. A user's flatten function may return the object's own list.
    """
    with contextlib.suppress(Exception), warnings.catch_warnings():  # objects that cannot be copied stay shared
        warnings.simplefilter("ignore", FutureWarning)  # a warning of torch 2.13 about the class of its own leaves
        copied = copy.deepcopy(program._module_call_graph)
        if copied == program._module_call_graph:  # false for a sentinel, which is compared by identity
            program._module_call_graph = copied


def _remember(program: ExportedProgram) -> ExportedProgram:
    if type(program) is ExportedProgram:
        program.__class__ = _RememberingProgram
    return program


def _classes_of(program: ExportedProgram) -> tuple[type, ...]:
    """Return the classes in a program's inputs and outputs that this package can register."""
    found: dict[type, None] = {}
    specs = [spec for spec in program.call_spec if spec is not None]
    while specs:
        spec = specs.pop()
        if spec.type is not None and REGISTRY.remedy(spec.type) is not None:
            found[spec.type] = None
        specs.extend(spec.children())
    return tuple(found)


def _require_registered(classes: tuple[type, ...], *call: Any) -> None:
    # call: the module and its arguments, where a hook of the module calls this function
    missing = [cls for cls in classes if cls not in pytree.SUPPORTED_NODES]
    if missing:
        names = ", ".join(cls.__qualname__ for cls in missing)
        raise NotRegisteredError(
            f"This program takes or returns {names}, which torch does not know how to flatten here. Call the program "
            f"where the class is registered:\n    {REGISTRY.remedy(missing[0])}"
        )


# Remove assertions that hold for all sizes, and the sizes computed only for them.


def without_needless_assertions(program: ExportedProgram) -> ExportedProgram:
    """Remove assertions that hold for all sizes, and nodes that only they read, from an exported program."""
    graph = program.graph_module.graph
    assertion = torch.ops.aten._assert_scalar.default
    asserted = {node: _expression(node.args[0]) for node in graph.nodes if node.target is assertion}
    stated = {expression for expression in asserted.values() if expression is not None}
    ranges = program.range_constraints
    needless = {
        node
        for node, one in asserted.items()
        if one is not None and (_always_holds(one) or _follows(one, stated, ranges))
    }
    if not needless:
        return program
    for node in reversed(list(graph.nodes)):  # sizes that only these assertions read come before them
        if node in needless and not node.users and (node.target is assertion or _is_number(node)):
            needless.update(node.all_input_nodes)
            graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _expression(condition: object) -> sympy.Basic | None:
    value = condition.meta.get("val") if isinstance(condition, torch.fx.Node) else None
    return value.node.expr if isinstance(value, torch.SymBool) else None


def _follows(expression: sympy.Basic, stated: Collection[sympy.Basic], ranges: Mapping[sympy.Symbol, Any]) -> bool:
    """Return whether ``n >= bound`` follows from another assertion of the form ``n // size >= count``."""
    if not (isinstance(expression, sympy.Ge) and isinstance(expression.lhs, sympy.Symbol)):
        return False
    number, bound = expression.args
    for other in stated:
        if isinstance(other, sympy.Ge) and isinstance(other.lhs, FloorDiv) and other.lhs.args[0] == number:
            size = other.lhs.args[1]
            if size in ranges and other.rhs.is_positive and bound <= other.rhs * ranges[size].lower:
                return True
    return False


def _always_holds(expression: sympy.Basic) -> bool:
    if not expression.has(Min, Max):  # other assertions state that sizes are equal
        return False
    return bool(expression.replace(lambda part: isinstance(part, (Min, Max)), _in_order) == sympy.true)


def _in_order(extreme: sympy.Expr) -> sympy.Expr:
    """Return the smallest or largest of several sizes, if it is the same for all values of the symbols."""
    for one in extreme.args:
        differences = [sympy.expand(other - one) for other in extreme.args]
        if all(d.is_nonnegative if isinstance(extreme, Min) else d.is_nonpositive for d in differences):
            return one
    return extreme


def _is_number(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, (torch.SymInt, torch.SymBool, bool, int))


# Load stored programs faster, also before their classes are imported. torch reads the types of the fields from the
# annotations of a class for each of thousands of records, and parses the sizes of each tensor with sympy, although most
# sizes repeat. So both results are cached.


# class -> the globals that its annotations were read with, and the types of its fields
_HINTS: dict[type, tuple[Any, dict[str, Any]]] = {}


def importing_classes(read: Callable[..., Any], libraries: Callable[[], Collection[str]]) -> Callable[..., Any]:
    """Return a reader of stored tree specs that first imports the modules of classes that are not registered.

    Only modules of the given libraries are imported; these libraries register their classes on import.
    """

    @functools.wraps(read)
    def json_to_treespec(schema: object) -> Any:
        for name in _names_of_classes(schema):
            # an earlier import may have registered this class
            module = name.rpartition(".")[0]
            unknown = name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE and module not in sys.modules
            if unknown and module.partition(".")[0] in libraries():
                importlib.import_module(module)
        return read(schema)

    return json_to_treespec


def _names_of_classes(schema: object) -> Iterator[str]:
    """Yield the names under which the classes of a stored tree spec are registered."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("type"), str):
            yield schema["type"]
        for child in schema.get("children_spec") or ():
            yield from _names_of_classes(child)


def remembering_hints(typing: ModuleType) -> types.SimpleNamespace:
    """Return a ``typing`` module whose ``get_type_hints`` caches by class, so that torch loads programs faster."""

    @functools.wraps(typing.get_type_hints)
    def get_type_hints(
        obj: object, globalns: dict[str, Any] | None = None, *more: Any, **options: Any
    ) -> dict[str, Any]:
        if more or options or not isinstance(obj, type):
            found: dict[str, Any] = typing.get_type_hints(obj, globalns, *more, **options)
            return found
        given_for, hints = _HINTS.get(obj, (None, None))
        if hints is None or given_for is not globalns:
            hints = typing.get_type_hints(obj, globalns)
            _HINTS[obj] = globalns, hints
        return hints

    return types.SimpleNamespace(**{**vars(typing), "get_type_hints": get_type_hints})


def remembering_expressions(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GraphModuleDeserializer._parse_sym_expr`` with a cache of parsed sizes, so that programs load faster."""
    # a second parse of the same size would not change the symbols of the program

    @functools.wraps(parse)
    def _parse_sym_expr(self: Any, expr_str: str, hint: object = None) -> Any:
        symbols = self.symbol_name_to_symbol  # a new cache for each program
        known = vars(self).get("_yobx_expressions")
        if known is None or known[0] is not symbols:
            known = self._yobx_expressions = (symbols, {})
        key = expr_str, hint
        if key not in known[1]:
            known[1][key] = parse(self, expr_str, hint)
        return known[1][key]

    return _parse_sym_expr


# Make the inputs of AOTInductor packages contiguous where the compiled code expects it.


_KEY = "yobx_flatten.contiguous"  # in the metadata of a package: 1 or 0 for each tensor among its inputs
_METADATA = "aot_inductor.metadata"


def remembering_strides(flatten_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap inductor's ``_aoti_flatten_inputs``, so that a package records which of its inputs are contiguous."""

    @functools.wraps(flatten_inputs)
    def _aoti_flatten_inputs(*args: Any, **kwargs: Any) -> Any:
        inputs, options = flatten_inputs(*args, **kwargs)
        contiguous = "".join(str(int(leaf.is_contiguous())) for leaf in inputs if isinstance(leaf, torch.Tensor))
        return inputs, {**options, _METADATA: {**options.get(_METADATA, {}), _KEY: contiguous}}

    return _aoti_flatten_inputs


def called_contiguous(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``AOTICompiledModel.__call__`` to make each input contiguous that was contiguous at compile time."""

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        contiguous = self.get_metadata().get(_KEY)
        if contiguous is None:
            return call(self, *args, **kwargs)
        return call(type(self)(_Runner(self.loader, contiguous)), *args, **kwargs)

    return __call__


class _Runner:
    """A loader of an AOTInductor package that makes inputs contiguous before it runs the package."""

    def __init__(self, loader: Any, contiguous: str) -> None:
        self._loader, self._contiguous = loader, contiguous

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def boxed_run(self, inputs: list[Any]) -> Any:
        """Run the package with contiguous inputs where its metadata require them, and empty the list of inputs."""
        wanted = self._contiguous.ljust(len(inputs), "0")[: len(inputs)]
        found = [leaf.contiguous() if one == "1" else leaf for leaf, one in zip(inputs, wanted, strict=True)]
        inputs.clear()  # like the loader, which consumes its inputs
        return self._loader.boxed_run(found)
