"""Store the weights of products as a product of one row reads them.

.. code-block:: text

    (outputs, inputs)    torch.nn.Linear: each output is a product of the row and a line of the weight
    (inputs, outputs)    here: the lines of the weight are added one after another, each times an entry of the row
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram

aten = torch.ops.aten


def transposed_weights(program: ExportedProgram) -> ExportedProgram:
    """Return a program whose weights of products in float32 have their axes exchanged; the graph is changed."""
    # a head that is also a table is looked up in the same memory, which is in the file once
    state = dict(program.state_dict)
    for names in _shared(program):
        targets = [program.graph_signature.inputs_to_parameters[node.name] for node in names]
        weight = state[targets[0]]
        readers = {_reads(user, node) for node in names for user in node.users}
        if weight.dim() != 2 or weight.dtype != torch.float32 or "product" not in readers or "" in readers:
            continue
        state |= dict.fromkeys(targets, torch.nn.Parameter(weight.detach().t().contiguous(), requires_grad=False))
        for node in names:
            _exchange(program.graph, node)
    program.graph_module.recompile()
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=program.graph_signature,
        state_dict=state,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _shared(program: ExportedProgram) -> Iterator[list[torch.fx.Node]]:
    """The inputs of a graph that are parameters; those that are the same tensor together."""
    found: dict[tuple[int, torch.Size], list[torch.fx.Node]] = {}
    targets = program.graph_signature.inputs_to_parameters
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in targets:
            weight = program.state_dict[targets[node.name]]
            found.setdefault((weight.data_ptr(), weight.shape), []).append(node)
    yield from found.values()


def _reads(user: torch.fx.Node, weight: torch.fx.Node) -> str:
    """What a node does with a weight; nothing that is known, by default."""
    if user.target is aten.linear.default and user.args[1] is weight:
        return "product"
    return "table" if user.target is aten.embedding.default and user.args[0] is weight else ""


def _exchange(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Let a graph take a weight with its axes exchanged, and exchange them."""
    value = node.meta["val"]
    with graph.inserting_after(node):
        turned = graph.call_function(aten.permute.default, (node, [1, 0]))
    node.replace_all_uses_with(turned, delete_user_cb=lambda user: user is not turned)
    turned.meta = {**node.meta, "val": value}
    node.meta["val"] = value.new_empty(*reversed(value.shape))
