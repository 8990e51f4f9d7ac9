"""Compile a program to an AOTInductor package, which contains machine code for the processor of this machine."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import pathlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from ...core.private_names.of_torch import aot_compile, cpp_kernels
from ...errors import FlattenError, ReplayError
from ...errors.failures import result_or
from ...registry.patches import AttributePatch
from ...runners.aotinductor_runner import IN_PLACE
from ...runners.signature import KEY, Signature, place_of_sizes
from ...trace.program import Flat, joined, sizes_of
from ..flat_program import changed_program, flat_program, quietly, signature_of
from ..traced import Traced


def write_package(traced: Traced, path: pathlib.Path, *, in_place: bool = False) -> list[str]:
    """Compile a program with AOTInductor; return the names of the cache inputs that its calls update in place."""
    program = flat_program(traced.program)
    signature = signature_of(traced)
    # compiled code does not check sizes, so sizes of 0 that an operator refuses are refused before the call
    smallest = {**dict.fromkeys(refused_when_empty(program, signature), 1), **signature.smallest}
    signature = dataclasses.replace(signature, smallest=smallest)
    kept: list[str] = []
    if in_place:
        program, kept = with_buffers(program, traced.input_names, traced.output_names, traced.presents)
    program = transposed_weights(program)
    lift_sizes(program.graph_module)
    try:
        _compile(program, signature, path, kept)
    except ValueError as error:
        if "Cannot view a tensor" not in str(error):
            raise
        # in torch 2.13, a compiled `cat` of transposed tensors has other strides than in eager mode (GPT-NeoX Japanese)
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        program.graph_module.recompile()
        _compile(program, signature, path, kept)
    return kept


def _compile(program: ExportedProgram, signature: Signature, path: pathlib.Path, kept: Sequence[str]) -> None:
    written = {IN_PLACE: ",".join(kept)} if kept else {}
    with quietly("torch._inductor"), whole_tails():
        metadata = {"aot_inductor.metadata": {KEY: signature.to_json(), **written}}
        aot_compile(program, package_path=str(path), inductor_configs=metadata)


aten = torch.ops.aten


def with_buffers(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], presents: Mapping[str, str]
) -> tuple[ExportedProgram, list[str]]:
    """Return a program in which growing cache inputs are buffers, and the names of the inputs that became buffers."""
    # program: what `flat_program` returned; it is not changed
    # presents: for each cache input, the output that becomes this input of the next call
    # returns: a program with the same inputs and a last input whose length is the number of tokens in the buffers. It
    # returns no cache that is in a buffer.
    sizes = sizes_of(program, inputs)
    module: Any = program.module(check_guards=False)
    graph = module.graph
    nodes = dict(zip(inputs, graph.find_nodes(op="placeholder"), strict=True))
    last = graph.output_node()
    returned = dict(zip(outputs, last.args[0], strict=True))
    cats = {name: cat for name, to in presents.items() if (cat := joined(nodes[name], returned[to])) is not None}
    # only inputs with the same number of tokens as the first one
    seen = next((sizes[name][2] for name in cats), None)
    kept = [name for name in cats if str(sizes[name][2]) == str(seen)]
    if not kept or isinstance(seen, int):
        raise FlattenError(
            "no cache grows: each layer has a sliding window, a recurrent state or a cache of constant length."
        )
    with graph.inserting_after(nodes[inputs[-1]]):
        counter = graph.placeholder("seen")
    with graph.inserting_after(counter):
        past = graph.call_function(aten.sym_size.int, (counter, 0))
    for name in kept:  # instead of a concatenation with new tokens, write into the cache in place, and read the cache
        for user in list(nodes[name].users):
            if user.target is aten.sym_size.int and user.args[1] == 2:
                user.replace_all_uses_with(past)
                graph.erase_node(user)
        joint: Any = cats[name]
        with graph.inserting_before(joint):
            new = joint.args[0][1]
            total = graph.call_function(operator.add, (past, graph.call_function(aten.sym_size.int, (new, 2))))
            place = graph.call_function(aten.slice.Tensor, (nodes[name], 2, past, total))
            graph.call_function(aten.copy_.default, (place, new))
            both = graph.call_function(aten.slice.Tensor, (nodes[name], 2, 0, total))
        joint.replace_all_uses_with(both, delete_user_cb=lambda user: user.op != "output")
    others = [name for name in outputs if name not in {presents[one] for one in kept}]
    last.args = (tuple(returned[name] for name in others),)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or node.target is aten.copy_.default)
    graph.set_codegen(torch.fx.graph.CodeGen())
    flat = torch.fx.GraphModule(module, graph)  # without the input checks of `module`
    example = dict(zip(inputs, program.example_inputs[0], strict=True))
    filled = example[kept[0]].shape[2]
    for name in kept:
        rows, heads, _, size = example[name].shape
        example[name] = example[name].new_zeros(rows, heads, 4 * filled + 16, size)
    shapes = [{axis: Dim.AUTO for axis, size in enumerate(sizes[name]) if not isinstance(size, int)} for name in inputs]
    given, dynamic = [*example.values(), torch.zeros(filled, dtype=torch.uint8)], [*shapes, {0: Dim.AUTO}]
    made = torch.export.export(
        Flat(flat), (given,), dynamic_shapes=(dynamic,), prefer_deferred_runtime_asserts_over_guards=True
    )
    return made, kept


def transposed_weights(program: ExportedProgram) -> ExportedProgram:
    """Return a program that stores float32 weights of matrix products transposed; the graph is changed in place."""
    # a product with a single row is faster with transposed weights
    state, graph, targets = dict(program.state_dict), program.graph, program.graph_signature.inputs_to_parameters
    tied: dict[tuple[int, torch.Size], list[torch.fx.Node]] = {}  # all inputs for one tensor
    for node in graph.find_nodes(op="placeholder"):
        if node.name in targets:
            weight = state[targets[node.name]]
            tied.setdefault((weight.data_ptr(), weight.shape), []).append(node)
    for nodes in tied.values():
        names = [targets[node.name] for node in nodes]
        weight = state[names[0]]
        users = [(user, node) for node in nodes for user in node.users]
        products = sum(user.target is aten.linear.default and user.args[1] is node for user, node in users)
        tables = sum(user.target is aten.embedding.default and user.args[0] is node for user, node in users)
        if weight.dim() != 2 or weight.dtype != torch.float32 or not products or products + tables < len(users):
            continue
        state |= dict.fromkeys(names, torch.nn.Parameter(weight.detach().t().contiguous(), requires_grad=False))
        for node in nodes:
            value = node.meta["val"]
            with graph.inserting_after(node):
                turned = graph.call_function(aten.permute.default, (node, [1, 0]))
            node.replace_all_uses_with(turned, delete_user_cb=functools.partial(operator.is_not, turned))
            turned.meta = {**node.meta, "val": value}
            node.meta["val"] = value.new_empty(*reversed(value.shape))
    program.graph_module.recompile()
    return changed_program(program, program.graph_module, state_dict=state)


def lift_sizes(module: GraphModule) -> None:
    """Add the output sizes of each ``scan`` operator to the inputs of the operator."""
    changed = False  # the sizes are needed because AOTInductor allocates outputs first
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
        body, start, given, others = node.args
        symbols = {
            symbol
            for value in node.meta["val"]
            for size in (*value.shape, *value.stride())
            if isinstance(size, torch.SymInt)
            for symbol in size.node.expr.free_symbols
        }
        step: Any = getattr(module, body.target)
        lifted = []
        axes = ((one, axis, size) for one in (*start, *given) for axis, size in enumerate(one.meta["val"].shape))
        for source, axis, size in axes:
            if not isinstance(size, torch.SymInt) or size.node.expr not in symbols:
                continue
            symbols.discard(size.node.expr)
            with module.graph.inserting_before(node):
                found = module.graph.call_function(torch.ops.aten.sym_size.int, (source, axis))
            found.meta["val"] = size
            lifted.append(found)
            first = next(one for one in step.graph.nodes if one.op != "placeholder")
            with step.graph.inserting_before(first):
                step.graph.placeholder(f"size_{len(lifted)}").meta["val"] = size
        if lifted:
            node.args = (body, start, given, (*others, *lifted))
            step.recompile()
            changed = True
    if changed:
        module.recompile()


_Shapes = Mapping[str, tuple[int, ...]]


def refused_when_empty(program: ExportedProgram, signature: Signature) -> list[str]:
    """Return the names of sizes that may not be 0, according to runs of the program with fake tensors."""
    # program: what `flat_program` returned
    example = {row[0]: tuple(leaf.shape) for row, leaf in zip(signature.inputs, program.example_inputs[0], strict=True)}
    given = {name: example[leaf][axis] for name, (leaf, axis) in place_of_sizes(signature).items()}
    calls = {name: _call_without(name, given, signature, example) for name in given}
    refused = [name for name, call in calls.items() if call is not None and not _runs(program, call)]
    return refused if refused and _runs(program, example) else []


def _call_without(empty: str, given: Mapping[str, int], signature: Signature, example: _Shapes) -> _Shapes | None:
    """Return shapes of inputs for a call in which the size named ``empty`` is 0; ``None`` if none is found."""
    sizes = {**given, empty: 0}
    likely = {first + sign * second for first in sizes.values() for second in sizes.values() for sign in (1, -1)}
    others = [{name: other} for name in sizes if name != empty for other in sorted(likely) if other > 0]
    for changed in ({}, *others):
        near = {**sizes, **changed}
        shapes = {}
        for name, _, axes in signature.inputs:
            sums = [
                sum(factor * near.get(part, 1) for part, factor in axis.items()) if isinstance(axis, Mapping) else axis
                for axis in axes
            ]
            shapes[name] = tuple(one if size is None else size for size, one in zip(sums, example[name], strict=True))
        try:
            signature.check_sizes(shapes, ReplayError, "")
        except FlattenError:
            continue
        return shapes
    return None


def _runs(program: ExportedProgram, shapes: _Shapes) -> bool:
    """Return whether a program runs without an error on fake tensors with the given shapes."""
    # imported here because the import takes half a second
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from ...core.private_names.of_torch import FakeTensorMode

    values = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    weights = [tuple(value.shape) for value in values[: len(values) - len(shapes)]]
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with quietly("torch._subclasses.fake_tensor", logging.CRITICAL), torch.no_grad(), mode:
        pairs = zip(values, [*weights, *shapes.values()], strict=True)
        given = [torch.empty(shape, dtype=value.dtype, device=value.device) for value, shape in pairs]
        run = functools.partial(torch.fx.Interpreter(program.graph_module).run, *given)
        return not isinstance(result_or(run, lambda error: error), Exception)  # operators raise many classes of errors


@functools.cache  # several threads share one patch
def whole_tails() -> AbstractContextManager[None]:
    """Return a context manager that corrects inductor, whose CPU reductions can write past the end of their output."""
    kernels, name = cpp_kernels(), "aggregate_reduction_buffers"
    if kernels is None or name not in vars(kernels):
        return nullcontext()  # another version of torch; the replay shows whether the file is right
    aggregate: Callable[..., None] = vars(kernels)[name]

    @functools.wraps(aggregate)
    def aggregate_reduction_buffers(self: Any, is_inner_only: bool, outer: Any) -> None:
        if outer is not None and not outer.is_reduction:
            # torch checks only the next inner loop, but any inner loop may be the reduction
            loops = self.loop_nest.loops
            inside = loops[next(i for i, loop in enumerate(loops) if loop.var == outer.var) + 1 :]
            is_inner_only = is_inner_only or any(loop.is_reduction for loop in inside)
        aggregate(self, is_inner_only, outer)

    return AttributePatch(kernels, name, aggregate_reduction_buffers)
