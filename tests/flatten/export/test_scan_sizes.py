"""A loop over tokens is handed the sizes of what it returns, and computes what it computed before."""

import torch
from torch._higher_order_ops.scan import scan

from yobx_flatten.export.runtimes.aotinductor import lift_sizes

SCAN = torch.ops.higher_order.scan


class Decay(torch.nn.Module):
    """A state that fades from token to token, with an output of each."""

    def forward(self, decay, added, state):
        def step(state, given):
            state = given[0] * state + given[1]
            return state, state.sum(-1)

        return scan(step, state, (decay.transpose(0, 1), added.transpose(0, 1)))


def inputs(batch, tokens):
    generator = torch.Generator().manual_seed(batch)
    return tuple(torch.rand(*shape, 4, generator=generator) for shape in ((batch, tokens), (batch, tokens), (batch,)))


def exported():
    free, tokens = torch.export.Dim.AUTO, torch.export.Dim.AUTO
    return torch.export.export(
        Decay(), inputs(2, 3), dynamic_shapes=({0: free, 1: tokens}, {0: free, 1: tokens}, {0: free})
    )


def test_the_sizes_of_outputs_are_inputs_of_the_loop():
    """AOTInductor allocates the outputs before the loop, from the sizes that it is given."""
    program = exported()
    lift_sizes(program.graph_module)
    (node,) = program.graph.find_nodes(op="call_function", target=SCAN)
    given = {str(size.meta["val"]) for size in node.args[3]}
    asked = {str(size) for value in node.meta["val"] for size in value.shape if isinstance(size, torch.SymInt)}
    assert asked == given
    body = getattr(program.graph_module, node.args[0].target)
    assert len(body.graph.find_nodes(op="placeholder")) == 1 + 2 + len(given)


def test_a_loop_with_sizes_returns_what_it_returned():
    """In other sizes than those of the example."""
    program = exported()
    expected = Decay()(*inputs(3, 5))
    lift_sizes(program.graph_module)
    for found, right in zip(program.module()(*inputs(3, 5)), expected, strict=True):
        torch.testing.assert_close(found, right)


def test_a_graph_without_loops_stays_as_it_is():
    """No node is added."""
    program = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    before = str(program.graph)
    lift_sizes(program.graph_module)
    assert str(program.graph) == before
