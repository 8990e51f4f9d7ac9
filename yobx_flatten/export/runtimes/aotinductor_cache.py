"""Let a program write the cache in place: buffers that are longer than the text, and how much of them is filled.

.. code-block:: text

    past ──> cat ──> present               buffer[:, :, seen : seen + new] <── new
     new ─────┘  └──> attention            buffer[:, :, : seen + new] ──> attention          nothing is returned

How many tokens there are is the length of one more input without contents, since code of AOTInductor reads a size only
off an axis that is that size alone.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from ...errors import FlattenError
from .growing_cache import Flat, joined, sizes_of

aten = torch.ops.aten


def with_buffers(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], presents: Mapping[str, str]
) -> tuple[ExportedProgram, list[str]]:
    """Return a program with buffers in place of inputs that come out with new tokens after them, and those inputs."""
    # program: what `flat_program` returned; it is not changed
    # presents: for each input of the cache, the output that takes its place in the next call
    # returns: a program that takes the other inputs and the buffers in the same order, and then the tensor whose length
    # is the number of tokens in them; it returns the other outputs
    sizes = sizes_of(program, inputs)
    module: Any = program.module(check_guards=False)
    graph = module.graph
    nodes = dict(zip(inputs, graph.find_nodes(op="placeholder"), strict=True))
    last = graph.output_node()
    returned = dict(zip(outputs, last.args[0], strict=True))
    cats = {name: cat for name, to in presents.items() if (cat := joined(nodes[name], returned[to])) is not None}
    # one number of tokens for all
    seen = next((sizes[name][2] for name in cats), None)
    kept = [name for name in cats if str(sizes[name][2]) == str(seen)]
    if not kept or isinstance(seen, int):
        raise FlattenError(
            "no output is its input with those of new tokens after it, since layers slide or have states."
        )
    with graph.inserting_after(nodes[inputs[-1]]):
        counter = graph.placeholder("seen")
    with graph.inserting_after(counter):
        past = graph.call_function(aten.sym_size.int, (counter, 0))
    for name in kept:
        _write_in_place(graph, nodes[name], cats[name], past)
    others = [name for name in outputs if name not in {presents[one] for one in kept}]
    last.args = (tuple(returned[name] for name in others),)
    graph.eliminate_dead_code(is_impure_node=_is_written)
    graph.set_codegen(torch.fx.graph.CodeGen())
    flat = torch.fx.GraphModule(module, graph)  # without the checks of the inputs that it had
    example = dict(zip(inputs, program.example_inputs[0], strict=True))
    filled = example[kept[0]].shape[2]
    for name in kept:
        rows, heads, _, size = example[name].shape
        example[name] = example[name].new_zeros(rows, heads, 4 * filled + 16, size)
    shapes = [{axis: Dim.AUTO for axis, size in enumerate(sizes[name]) if not isinstance(size, int)} for name in inputs]
    # of a buffer its capacity varies
    shapes = [{**of, 2: Dim.AUTO} if name in kept else of for name, of in zip(inputs, shapes, strict=True)]
    made = torch.export.export(
        Flat(flat),
        ([*example.values(), torch.zeros(filled, dtype=torch.uint8)],),
        dynamic_shapes=([*shapes, {0: Dim.AUTO}],),
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    return made, kept


def _write_in_place(graph: torch.fx.Graph, buffer: torch.fx.Node, cat: torch.fx.Node, past: torch.fx.Node) -> None:
    """Write the new tokens after those that are there, and read both where they were put together."""
    for user in list(buffer.users):
        if user.target is aten.sym_size.int and user.args[1] == 2:
            user.replace_all_uses_with(past)
            graph.erase_node(user)
    parts: Any = cat.args[0]
    new = parts[1]
    with graph.inserting_before(cat):
        total = graph.call_function(operator.add, (past, graph.call_function(aten.sym_size.int, (new, 2))))
        place = graph.call_function(aten.slice.Tensor, (buffer, 2, past, total))
        graph.call_function(aten.copy_.default, (place, new))
        both = graph.call_function(aten.slice.Tensor, (buffer, 2, 0, total))
    cat.replace_all_uses_with(both, delete_user_cb=lambda user: user.op != "output")


def _is_written(node: torch.fx.Node) -> bool:
    """Whether a node does something besides what it returns."""
    return node.is_impure() or node.target is aten.copy_.default
