"""Read the inputs of exported programs, check classes and constants at each call, and load programs faster."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ArgumentSpec, ConstantArgument, InputKind, SymIntArgument

from ..core.private_names.of_torch import FloorDiv, Max, Min, pytree
from ..errors import NotRegisteredError, SpecMismatchError, describe_class
from ..registry.claims import REGISTRY
from ..registry.recipe.aliases import PyTree
from .trace_settings import PLAIN_ATTENTION, fake_tensor_cache_off, open_supports


def arguments_of(program: ExportedProgram) -> list[ArgumentSpec]:
    return [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]


def traced_inputs(program: ExportedProgram) -> list[Any]:
    """Return the fake tensor or symbolic size of each input leaf of a program; ``None`` for a leaf that is constant."""
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    return [None if isinstance(arg, ConstantArgument) else values[arg.name] for arg in arguments_of(program)]


# Numbers, texts, enums and ``None`` among the inputs: a program fixes the values of its example.

_Hook = Callable[[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]
_Members = dict[int, enum.Enum]


def text_of(value: object) -> str:
    """Return the text that reports show for an input that is a constant.

    >>> import inspect
    >>> text_of(0.5), text_of("mean"), text_of(inspect._ParameterKind.KEYWORD_ONLY)
    ('0.5', "'mean'", '_ParameterKind.KEYWORD_ONLY')
    """
    return f"{type(value).__qualname__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def _is_enum(leaf: object) -> bool:
    return isinstance(leaf, enum.Enum) and not isinstance(leaf, (int, str))  # torch accepts IntEnum and StrEnum


def enums_as_texts(args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree, _Members]:
    """Replace enum members in the inputs by text, and return the replaced members by the index of their leaf."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    members = {place: leaf for place, leaf in enumerate(leaves) if _is_enum(leaf)}
    if members:
        args, kwargs = pytree.tree_unflatten([text_of(one) if _is_enum(one) else one for one in leaves], spec)
    return args, kwargs, members


def with_members(args: PyTree, kwargs: PyTree, members: _Members) -> tuple[PyTree, PyTree]:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    args, kwargs = pytree.tree_unflatten([members.get(place, leaf) for place, leaf in enumerate(leaves)], spec)
    return args, kwargs


@contextlib.contextmanager
def members_in_forward(module: torch.nn.Module, names: list[str], members: _Members) -> Iterator[None]:
    """In a ``with`` block, convert text that a trace passes to a module's ``forward`` back to enum members."""
    # names: the keyword arguments in the order of the export, which determines the numbers of the leaves
    if not members:
        yield
        return

    def put_back(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return with_members(args, {name: kwargs[name] for name in names}, members)

    with module.register_forward_pre_hook(put_back, prepend=True, with_kwargs=True):
        yield


class StoredInteger(int):
    """A cache's token counter as an integer, for programs that an earlier version of this package exported."""


def checking_inputs(program: ExportedProgram) -> _Hook | None:
    """Make a hook that refuses inputs other than a program's constants, and converts token counters to integers."""
    # returns: the hook for `register_forward_pre_hook(with_kwargs=True)`; `None` if the program needs none
    given = arguments_of(program)
    integers = [place for place, arg in enumerate(given) if isinstance(arg, SymIntArgument)]
    constants = {place: arg.value for place, arg in enumerate(given) if isinstance(arg, ConstantArgument)}
    spec = program.call_spec.in_spec
    if not (integers or constants) or spec is None or spec.num_leaves != len(given):
        return None
    return functools.partial(_check_call, list(spec.children()[1].context), integers, constants, len(given))


def _check_call(
    names: Sequence[str],
    integers: Sequence[int],
    constants: Mapping[int, Any],
    count: int,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    if torch.compiler.is_compiling():  # inside a trace, the call of the resulting program is checked instead
        if not integers:
            return None
        constants = {}
    if set(names) != set(kwargs):  # torch reports it
        return None
    call = (args, {name: kwargs[name] for name in names})
    leaves, found = pytree.tree_flatten(call)
    if len(leaves) != count:
        return None
    late = [place for place in integers if isinstance(leaves[place], torch.Tensor)]
    replaced: dict[int, Any] = {place: StoredInteger(leaves[place]) for place in late}
    for place, value in constants.items():
        leaf = leaves[place]
        if type(value) is str and _is_enum(leaf):
            leaf = replaced[place] = text_of(leaf)
        is_tensor = isinstance(leaf, torch.Tensor)
        by_identity = value is None or leaf is None or is_tensor
        if value is leaf or (not by_identity and (bool(value == leaf) or (value != value and leaf != leaf))):
            continue
        path: tuple[Any, ...] = pytree.tree_flatten_with_path(call)[0][place][0]
        part, *rest = path
        where = ("args", "kwargs")[part.idx] + pytree.keystr(tuple(rest))
        shown = f"a tensor of shape {tuple(leaf.shape)}" if is_tensor else describe_class(leaf)
        if value is None:
            raise SpecMismatchError(
                f"{where} was None when this program was exported, so the program has no such input and would ignore "
                f"{shown}. Pass None, or export again with a tensor for this input in the example."
            )
        raise SpecMismatchError(
            f"{where} was {value!r} when this program was exported, and is fixed in the program. The call passes "
            f"{shown if is_tensor else repr(leaf)}. Pass {value!r}, or export again with an example that contains "
            "the value of this call, or a tensor."
        )
    if not replaced:
        return None
    return pytree.tree_unflatten([replaced.get(place, leaf) for place, leaf in enumerate(leaves)], found)


class Flat(torch.nn.Module):
    """A module that receives a list of tensors, and passes them to a graph module as separate arguments."""

    def __init__(self, called: torch.fx.GraphModule) -> None:
        super().__init__()
        self.called = called

    def forward(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.called(*tensors)


def sizes_of(program: ExportedProgram, inputs: Sequence[str]) -> dict[str, Sequence[Any]]:
    # program: a result of `flat_program`
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    return {name: values[arg.name].shape for name, arg in zip(inputs, arguments_of(program), strict=True)}


def joined(past: torch.fx.Node, present: Any) -> torch.fx.Node | None:
    """Return the output ``present`` if its graph node appends new tokens to the cache input ``past``, else ``None``."""
    value = past.meta.get("val")
    if value is None or value.ndim != 4:
        return None
    cats = [user for user in past.users if user.target is not torch.ops.aten.sym_size.int]
    if len(cats) != 1 or cats[0] is not present or present.target is not torch.ops.aten.cat.default:
        return None
    parts: Any = present.args[0]
    axis = present.args[1] if len(present.args) > 1 else 0
    is_after = len(parts) == 2 and parts[0] is past and parts[1] is not past and axis in (2, -2)
    return present if is_after and not present.kwargs else None


class _RememberingProgram(ExportedProgram):
    """An exported program that checks its inputs, and whose errors name classes that are not registered."""

    def module(self, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        classes = _classes_of(self)
        _require_registered(classes)  # torch would derive wrong paths of guards from the inputs here
        module = super().module(*args, **kwargs)
        for hook in (checking_inputs(self), _renaming(self)):  # the last hook runs first
            if hook is not None:
                module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        if classes:
            module.register_forward_pre_hook(functools.partial(_require_registered, classes), prepend=True)
        return module

    def run_decompositions(self, decomp_table: dict[Any, Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        _require_registered(_classes_of(self))
        attention = torch.ops.aten.scaled_dot_product_attention.default
        with contextlib.ExitStack() as stack:
            count, is_dynamic = len(self.graph_signature.user_inputs), bool(self.range_constraints)
            stack.enter_context(fake_tensor_cache_off(count, is_dynamic=is_dynamic))
            if decomp_table is not None and attention not in decomp_table:
                stack.enter_context(PLAIN_ATTENTION)
            program = super().run_decompositions(decomp_table, *args, **kwargs)
        return _remember(without_needless_assertions(program))


def _renaming(program: ExportedProgram) -> Callable[..., Any] | None:
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
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # the program gets copies of the static parts, since a flatten function of the user may return the object's own
        # list, and the object may change later
        with contextlib.suppress(Exception), warnings.catch_warnings():  # objects that cannot be copied stay shared
            warnings.simplefilter("ignore", FutureWarning)  # a warning of torch 2.13 about the class of its own leaves
            copied = copy.deepcopy(self._module_call_graph)
            if copied == self._module_call_graph:  # false for a sentinel, which is compared by identity
                self._module_call_graph = copied
        _remember(self)

    return __init__


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
            f"This program takes or returns {names}, for which no registration with torch is active. Call the program "
            f"while the class is registered:\n    {REGISTRY.remedy(missing[0])}"
        )


def without_needless_assertions(program: ExportedProgram) -> ExportedProgram:
    """Remove assertions about sizes that always hold, or that follow from other assertions, from a program."""
    graph = program.graph_module.graph
    assertion = torch.ops.aten._assert_scalar.default
    asserted: dict[torch.fx.Node, sympy.Basic] = {}
    for node in graph.nodes:
        condition = node.args[0] if node.target is assertion else None
        value = condition.meta.get("val") if isinstance(condition, torch.fx.Node) else None
        if isinstance(value, torch.SymBool):
            asserted[node] = value.node.expr
    stated = {*asserted.values()}
    needless: set[torch.fx.Node] = set()
    for node, one in asserted.items():
        # other assertions than those with a minimum or maximum state that sizes are equal
        ordered = one.replace(lambda part: isinstance(part, (Min, Max)), _in_order) if one.has(Min, Max) else None
        if ordered == sympy.true or _follows(one, stated, program.range_constraints):
            needless.add(node)
    if not needless:
        return program
    numbers = torch.SymInt, torch.SymBool, bool, int
    for node in reversed(list(graph.nodes)):  # sizes that only these assertions read come before them
        is_number = node.op == "call_function" and isinstance(node.meta.get("val"), numbers)
        if node in needless and not node.users and (node.target is assertion or is_number):
            needless.update(node.all_input_nodes)
            graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _follows(expression: sympy.Basic, stated: Collection[sympy.Basic], ranges: Mapping[sympy.Symbol, Any]) -> bool:
    """Return whether the assertion ``n >= bound`` is implied by a stated assertion ``n // size >= count``."""
    if not (isinstance(expression, sympy.Ge) and isinstance(expression.lhs, sympy.Symbol)):
        return False
    number, bound = expression.args
    for other in stated:
        if isinstance(other, sympy.Ge) and isinstance(other.lhs, FloorDiv) and other.lhs.args[0] == number:
            size = other.lhs.args[1]
            if size in ranges and other.rhs.is_positive and bound <= other.rhs * ranges[size].lower:
                return True
    return False


def _in_order(extreme: sympy.Expr) -> sympy.Expr:
    """Simplify a ``Min`` or ``Max`` to one argument if this argument is the smallest or largest for all sizes."""
    for one in extreme.args:
        differences = [sympy.expand(other - one) for other in extreme.args]
        if all(d.is_nonnegative if isinstance(extreme, Min) else d.is_nonpositive for d in differences):
            return one
    return extreme


# Load stored programs faster, also before their classes are imported. torch reads the types of the fields from the
# annotations of a class for each of thousands of records, and parses the sizes of each tensor with sympy, although most
# sizes repeat. So both results are cached.

# class -> the globals that its annotations were read with, and the types of its fields
_HINTS: dict[type, tuple[Any, dict[str, Any]]] = {}


def importing_classes(read: Callable[..., Any], libraries: Callable[[], Collection[str]]) -> Callable[..., Any]:
    """Wrap a reader of stored tree specs, so that it first imports the library classes that a spec names."""

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
    if isinstance(schema, Mapping):
        if isinstance(schema.get("type"), str):
            yield schema["type"]
        for child in schema.get("children_spec") or ():
            yield from _names_of_classes(child)


def remembering_hints(typing: ModuleType) -> types.SimpleNamespace:
    """Return a ``typing`` module whose ``get_type_hints`` caches by class, so that torch loads programs faster."""

    @functools.wraps(typing.get_type_hints)
    def get_type_hints(obj: object, globalns: Any = None, *more: Any, **options: Any) -> Any:
        if more or options or not isinstance(obj, type):
            return typing.get_type_hints(obj, globalns, *more, **options)
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
        wanted = self._contiguous.ljust(len(inputs), "0")[: len(inputs)]
        found = [leaf.contiguous() if one == "1" else leaf for leaf, one in zip(inputs, wanted, strict=True)]
        inputs.clear()  # like the loader, which consumes its inputs
        return self._loader.boxed_run(found)
