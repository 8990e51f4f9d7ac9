"""Convert an ``ExportedProgram``, without a new trace, to a program that takes and returns a flat list of tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature, InputKind, OutputKind
from torch.fx.experimental.proxy_tensor import make_fx

from ..core.private_names.of_torch import OpOverload, enable_python_dispatcher, pytree
from ..errors import InvalidArgumentError, is_installed
from ..runners.signature import Signature, Size
from ..trace.program import arguments_of
from . import stated_sizes
from .traced import Traced


def flat_program(program: ExportedProgram) -> ExportedProgram:
    """Return a copy of a program that takes and returns flat lists of tensors, without constant inputs and outputs."""
    module, signature = copy.deepcopy(program.graph_module), program.graph_signature
    inputs, outputs = [], []
    for entry, node in zip(signature.input_specs, module.graph.find_nodes(op="placeholder"), strict=True):
        if entry.kind is InputKind.USER_INPUT and isinstance(entry.arg, ConstantArgument):
            module.graph.erase_node(node)
        else:  # a copied graph renames nodes whose name is a Python builtin (`input`)
            inputs.append(replace(entry, arg=replace(entry.arg, name=node.name)))
    given = [entry.arg.name for entry in inputs if entry.kind is InputKind.USER_INPUT]
    for node in module.graph.find_nodes(op="placeholder"):
        reached, written = {node}, False
        for user in module.graph.nodes:  # in order: views of views come after their base
            if user.op != "call_function" or not isinstance(user.target, OpOverload):
                continue
            for argument, value in zip(user.target._schema.arguments, user.args, strict=False):
                if argument.alias_info is not None and value in reached:
                    reached.add(user)
                    written |= argument.alias_info.is_write
        if written and node.name in given:  # write to a copy of the input; a program may write to its own buffers
            with module.graph.inserting_after(node):
                copied = module.graph.call_function(torch.ops.aten.clone.default, (node,))
            copied.meta = dict(node.meta)
            node.replace_all_uses_with(copied, delete_user_cb=functools.partial(operator.is_not, copied))
    last = module.graph.output_node()
    kept = []
    for result, value in zip(signature.output_specs, last.args[0], strict=True):
        if not (result.kind is OutputKind.USER_OUTPUT and isinstance(result.arg, ConstantArgument)):
            moved = isinstance(value, torch.fx.Node) and value.name != result.arg.name  # a copy of an input
            outputs.append(replace(result, arg=replace(result.arg, name=value.name)) if moved else result)
            kept.append(value)
    last.args = (tuple(kept),)
    module.recompile()
    example = pytree.tree_leaves(program.example_inputs)
    pairs = zip(arguments_of(program), example, strict=True)
    tensors = tuple(leaf for argument, leaf in pairs if not isinstance(argument, ConstantArgument))
    returned = sum(result.kind is OutputKind.USER_OUTPUT for result in outputs)
    call = copy.copy(program.module_call_graph[0])
    call.signature = copy.copy(call.signature)
    assert call.signature is not None
    call.signature.in_spec = pytree.tree_structure((tuple(range(len(tensors))), {}))
    call.signature.out_spec = pytree.tree_structure(tuple(range(returned)))
    call.signature.forward_arg_names = given
    signature = ExportGraphSignature(inputs, outputs)
    parts: dict[str, Any] = {"graph_signature": signature, "module_call_graph": [call], "example_inputs": (tensors, {})}
    return changed_program(program, module, **parts)


def changed_program(program: ExportedProgram, module: torch.fx.GraphModule, **parts: Any) -> ExportedProgram:
    names = ("graph_signature", "state_dict", "range_constraints", "module_call_graph")
    kept = {name: getattr(program, name) for name in (*names, "example_inputs", "constants", "verifiers")}
    return ExportedProgram(root=module, graph=module.graph, **{**kept, **parts})


@contextlib.contextmanager
def quietly(library: str, level: int = logging.ERROR) -> Iterator[None]:
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def signature_of(traced: Traced, versions: Sequence[str] = ()) -> Signature:
    # versions: libraries, in addition to torch and transformers, whose versions are stored
    program = traced.program
    by_argument = names_by_argument(traced)
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    counted: dict[tuple[str, int], Size] = {**_counted(program, by_argument), **traced.unasserted}
    inputs = []
    for argument, name in by_argument.items():
        value = values[argument]
        if not isinstance(value, torch.Tensor):
            raise InvalidArgumentError(
                f"The input {name} is a Python number that varies between calls, but runtimes other than torch accept "
                "only tensors. Pass a 0-d tensor, or make the number constant: set its entry in dynamic_shapes to None."
            )
        sizes = tuple(counted.get((name, axis), _size(size)) for axis, size in enumerate(value.shape))
        inputs.append((name, value.dtype, sizes))
    ranges = {str(symbol): found for symbol, found in program.range_constraints.items()}
    largest = {name: int(found.upper) for name, found in ranges.items() if _is_finite(found.upper)}
    # a trace assumes at least 2 for every dynamic size, although the code does not require it
    smallest = {name: int(found.lower) for name, found in ranges.items() if _is_finite(found.lower) and found.lower > 2}
    libraries = filter(is_installed, ("torch", "transformers", *versions))
    made_by = {name: importlib.metadata.version(name).split("+")[0] for name in libraries}
    alone = {name for _, _, sizes in inputs for size in sizes if isinstance(size, Mapping) for name in size if name}
    rows: dict[str, int] = {}  # number of rows of the embedding table that an input indexes
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        table, given = node.args[:2]
        while _name(given) in _SAME_VALUES:  # tokens may be reshaped on their way to the table
            given = given.args[0]
        count = table.meta["val"].shape[0]
        if given.name in by_argument and isinstance(count, int):
            name = by_argument[given.name]
            rows[name] = min(count, rows.get(name, count))
    relations = stated_sizes.relations_in_program(program, alone)
    return Signature(inputs, traced.output_names, largest, smallest, made_by, rows, traced.kept, relations)


def names_by_argument(traced: Traced) -> dict[str, str]:
    arguments = [arg.name for arg in arguments_of(traced.program) if not isinstance(arg, ConstantArgument)]
    return dict(zip(arguments, traced.input_names, strict=True))


_SAME_VALUES = ("view", "reshape", "alias", "detach", "contiguous", "clone", "slice", "unsqueeze", "squeeze")
_SAME_AXES = ("to", "pad", "alias", "detach", "contiguous", "clone")


def _counted(program: ExportedProgram, names: Mapping[str, str]) -> dict[tuple[str, int], Size]:
    """For each input axis that the program indexes with ``arange(n)``, return ``n``, by input name and axis."""
    # A mask is indexed with the row numbers of the tokens. With too few rows torch fails, but OpenVINO returns values.
    found: dict[tuple[str, int], Size] = {}
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor):
        read, places = node.all_input_nodes[0], node.args[1]
        inputs = [origin for origin in _origins(read) if origin.name in names]
        for axis, place in enumerate(places):
            if not isinstance(place, torch.fx.Node):
                continue
            entries = place.meta["val"].numel()
            while _name(place) in (*_SAME_VALUES, *_SAME_AXES):  # a reshaped range still has the same entries
                place = place.args[0]
            count = place.meta["val"].shape[0] if place.target is torch.ops.aten.arange.default else None
            if str(count) != str(entries):  # not a whole range that starts at 0
                continue
            for origin in inputs:
                own, same = origin.meta["val"].shape[axis], read.meta["val"].shape[axis]
                # only a size that is a single symbol: of an expression it is unknown which input is too short
                if isinstance(own, torch.SymInt) and own.node.expr.is_Symbol and str(own) == str(same):
                    found[names[origin.name], axis] = _size(count)
    return found


def _origins(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Follow an fx node back through copies, casts and concatenations, and yield the nodes at their start."""
    name = _name(node)
    if name != "cat" and name not in _SAME_AXES:
        yield node
        return
    for part in node.all_input_nodes if name == "cat" else node.all_input_nodes[:1]:
        yield from _origins(part)


def _name(node: torch.fx.Node) -> str:
    """Return the name of a node's operator without its overload; ``""`` if the node calls no operator."""
    target = node.target
    return target._schema.name.rpartition("::")[2] if isinstance(target, OpOverload) else ""


def _size(size: Any) -> Size:
    """Return a symbolic size as a sum of multiples of symbols; ``None`` for any other expression."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression: Any = size.node.expr
    if expression.is_Integer:
        return int(expression)
    factors: Mapping[Any, Any] = expression.as_coefficients_dict()
    if any(not (key.is_Symbol or key == 1) or not factor.is_Integer for key, factor in factors.items()):
        return None
    return {str(key) if key.is_Symbol else "": int(factor) for key, factor in factors.items()}


def _is_finite(bound: Any) -> bool:
    return bool(getattr(bound, "is_Integer", isinstance(bound, int))) and abs(int(bound)) < 2**31


_ATEN = torch.ops.aten
_ASSERTIONS = {_ATEN._assert_async.default, _ATEN._assert_async.msg, _ATEN._assert_scalar.default}
_ASSERTIONS |= {_ATEN.sym_constrain_range_for_size.default, _ATEN._assert_tensor_metadata.default}
_CASTS = {_ATEN.to.dtype, _ATEN.to.device, _ATEN.to.dtype_layout, _ATEN.to.other, _ATEN.type_as.default}


# Decompose only the operators that have no translation, one by one.
#
# `ExportedProgram.run_decompositions` always traces the whole program again, which takes as long as the first trace.
# In a program that writes to no tensor, each node depends only on its arguments: a node that has to be decomposed is
# traced alone, and all other nodes are copied.


def decompose_untranslated(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]]) -> ExportedProgram | None:
    """Decompose a program as ``run_decompositions(table)`` does, and drop assertions and redundant casts."""
    # returns: `None` for a program that has to be traced again as a whole, because it has branches, or writes to its
    # inputs or state
    try:
        from ..core.private_names.of_torch import check_valid_to_preserve, is_composite
    except ImportError:  # the installed torch lacks these private functions
        return None

    def is_kept(target: Any) -> bool:
        if target in table:
            return False
        # torch decomposes operators that may return their argument, even translated ones: the translations are untested
        return target is _ATEN.contiguous.default or not is_composite(target) or bool(check_valid_to_preserve(target))

    signature = program.graph_signature
    writes = signature.buffers_to_mutate or signature.user_inputs_to_mutate
    writes = writes or getattr(signature, "parameters_to_mutate", None)
    branches = [part for part in program.graph_module.modules() if part is not program.graph_module]
    if writes or branches or not all(map(_stands_alone, program.graph.nodes)):
        return None
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, Any] = {}
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.target in _ASSERTIONS:
                continue
            done = _converted(node, graph, copied, table, is_kept)
            if done is None:
                return None
            if node.op == "placeholder":
                done.name = node.name  # a copy renames a node whose name is a Python builtin
            copied[node] = done
    graph.eliminate_dead_code()
    result = copy.copy(program)
    named = {node.name: done.name for node, done in copied.items() if isinstance(done, torch.fx.Node)}
    result._graph_signature = copy.copy(signature)
    specs = []
    for spec in signature.output_specs:
        name = "" if isinstance(spec.arg, ConstantArgument) else getattr(spec.arg, "name", "")
        specs.append(replace(spec, arg=replace(spec.arg, name=named[name])) if name in named else spec)
    result._graph_signature.output_specs = specs
    result._graph_module = torch.fx.GraphModule(program.graph_module, graph)
    result._graph_module.meta.update(program.graph_module.meta)
    return result


def _stands_alone(node: torch.fx.Node) -> bool:
    """Return whether an fx node only depends on its arguments and does not write to a tensor."""
    if node.op in ("placeholder", "output"):
        return True
    # a new trace of the program replaces these operators, and functions of torch.vmap and torch.func, by others
    replaced = {_ATEN.sym_numel.default, _ATEN.sym_stride.int, _ATEN.sym_storage_offset.default}
    is_replaced = node.target in replaced or getattr(node.target, "__module__", "").startswith("torch._functorch.")
    if node.op != "call_function" or is_replaced:
        return False
    schema = getattr(node.target, "_schema", None)
    return node.target in _ASSERTIONS or schema is None or not schema.is_mutable


def _converted(
    node: torch.fx.Node,
    graph: torch.fx.Graph,
    copied: dict[torch.fx.Node, Any],
    table: Mapping[Any, Callable[..., Any]],
    is_kept: Callable[[Any], bool],
) -> Any:
    """Copy an fx node into the new graph, or decompose it; return ``None`` if the node cannot be decomposed."""
    target = node.target
    if target in _CASTS:
        given, found = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr] # the tensor, a node
        if given.dtype == found.dtype and given.layout == found.layout:
            return copied[node.args[0]]  # type: ignore[index] # the tensor, a node
    if target is _ATEN.reshape.default:
        # only the ONNX translation of `view` accepts sizes of 0
        copy_of = graph.node_copy(node, copied.__getitem__)
        copy_of.target = _ATEN.view.default
        return copy_of
    if target is operator.getitem and not isinstance(copied[node.args[0]], torch.fx.Node):  # type: ignore[index] # a node
        return copied[node.args[0]][node.args[1]]  # type: ignore[index] # of an operator that was decomposed
    if not isinstance(target, OpOverload) or is_kept(target):
        return graph.node_copy(node, copied.__getitem__)
    # decompose: trace the node alone
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]
    values = [leaves[place].meta.get("val") for place in places]
    if any(value is None for value in values) or "val" not in node.meta:
        return None
    modes = {value.fake_mode for value in pytree.tree_leaves((values, node.meta["val"])) if hasattr(value, "fake_mode")}
    if len(modes) != 1:
        return None

    def call(*given: Any) -> Any:
        filled = list(leaves)
        for place, value in zip(places, given, strict=True):
            filled[place] = value
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return target(*args, **kwargs)

    with modes.pop(), enable_python_dispatcher():
        traced = make_fx(call, decomposition_table=dict(table), _allow_non_fake_inputs=True)(*values)
    inner: dict[torch.fx.Node, Any] = {}
    unread = iter(places)
    for part in traced.graph.nodes:
        if part.op == "placeholder":
            inner[part] = copied[leaves[next(unread)]]
        elif part.op == "output":
            return torch.fx.node.map_arg(part.args[0], inner.__getitem__)
        elif part.op != "call_function" or not _stands_alone(part):
            return None  # a constant, or an operator that writes to a tensor
        elif part.target not in _ASSERTIONS:
            inner[part] = graph.node_copy(part, inner.__getitem__)
            inner[part].meta = {**node.meta, **part.meta}
    return None
