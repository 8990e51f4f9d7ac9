"""A program is decomposed where it has to be, and computes the same."""

from __future__ import annotations

import pytest
import torch

from yobx_flatten.export.flat_program import decompose_untranslated

ATEN = torch.ops.aten
BATCH = {0: torch.export.Dim.AUTO}


class Mixed(torch.nn.Module):
    """An operator to decompose (``__and__``), casts with and without effect, views, a chunk, an operator to keep."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)

    def forward(self, x):
        y = self.linear(x.to(torch.float32))
        first, second = y.chunk(2, dim=-1)
        mask = (first > 0) & (second > 0)
        return mask.to(torch.float32).reshape(x.shape[0] * 3), first.transpose(0, 1).contiguous(), x.to(torch.float64)


def table():
    found = dict(torch.export.default_decompositions())
    for kept in (ATEN.linear.default, ATEN.transpose.int, ATEN.contiguous.default):
        found.pop(kept, None)
    return found | {ATEN.__and__.Tensor: lambda a, b: ATEN.bitwise_and.Tensor(a, b)}


def exported(module, *args, shapes=None):
    return torch.export.export(module, args, dynamic_shapes=shapes)


def targets(program):
    return {node.target for node in program.graph.nodes if node.op == "call_function"}


def test_the_decomposed_program_computes_the_same():
    module = Mixed().eval()
    found = decompose_untranslated(exported(module, torch.randn(3, 4), shapes=(BATCH,)), table())
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        state = [found.state_dict[name] for name in found.graph_signature.parameters]
        values = torch.fx.Interpreter(found.graph_module).run(*state, x)
        for value, expected in zip(values, module(x), strict=True):
            assert torch.equal(value, expected)
            assert value.dtype == expected.dtype


def test_only_what_has_to_be_is_decomposed_in_a_copy():
    program = exported(Mixed().eval(), torch.randn(3, 4), shapes=(BATCH,))
    before = str(program.graph), str(program.graph_signature)
    found = targets(decompose_untranslated(program, table()))
    assert (str(program.graph), str(program.graph_signature)) == before
    assert ATEN.linear.default in found
    assert ATEN.bitwise_and.Tensor in found
    assert not found & {ATEN.__and__.Tensor, ATEN.to.dtype, ATEN.chunk.default, ATEN.reshape.default}


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


class InPlace(torch.nn.Module):
    def forward(self, x):
        y = x * 2
        y[:, 0].add_(1)
        return y


@pytest.mark.parametrize("module", [Counter(), InPlace()], ids=lambda module: type(module).__name__)
def test_a_program_that_writes_is_left_to_torch(module):
    """A node of it does not stand for itself."""
    assert decompose_untranslated(exported(module, torch.randn(3, 4)), table()) is None
