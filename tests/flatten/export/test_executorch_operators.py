"""Operators that ExecuTorch has no kernel for, written out: the program computes the same without them."""

import pytest
import torch

from tests.modules import module_class
from yobx_flatten.export.runtimes.executorch import grouped_product, written_out

moe = pytest.importorskip("transformers.integrations.moe")
if not hasattr(getattr(torch.ops, "transformers", None), "grouped_mm_fallback"):
    pytest.skip("this version of transformers has no grouped product", allow_module_level=True)


class Experts(torch.nn.Module):
    """Rows sorted by expert, multiplied in groups, and put back: what transformers' mixtures do."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.weight = torch.nn.Parameter(torch.randn(4, 5, 6))

    def forward(self, rows, expert):
        order = torch.argsort(expert, stable=True)
        counts = torch.histc(expert.float(), bins=4, min=0, max=3)
        ends = counts.cumsum(0).to(torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback(rows[order], self.weight, ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return product[back]


def test_a_mixture_without_its_operators_computes_the_same():
    rows, experts = torch.randn(7, 5), torch.tensor([3, 0, 1, 0, 3, 3, 1])
    dynamic = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Experts(), (rows, experts), dynamic_shapes=(dynamic, dynamic)).run_decompositions({})
    found = written_out(program)
    names = {str(node.target) for node in found.graph.nodes}
    assert [n for n in names if any(word in n for word in ("grouped_mm", "sort", "histc", "empty"))] == []
    for count in (2, 7, 12):
        given = torch.randn(count, 5), torch.arange(count) % 3
        with torch.no_grad():
            torch.testing.assert_close(found.module()(*given), Experts()(*given))


def test_a_program_without_them_stays_as_it_is():
    program = torch.export.export(torch.nn.Linear(3, 2), (torch.zeros(4, 3),))
    assert written_out(program) is program


def test_rows_after_the_last_expert_are_zeros():
    rows, weight, ends = torch.randn(6, 5), torch.randn(3, 5, 4), torch.tensor([2, 2, 5], dtype=torch.int32)
    expected = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
    torch.testing.assert_close(grouped_product(rows, weight, ends), expected)


def test_the_inverse_of_erf_is_computed_without_its_operator():
    """From -1 to 1, where it is infinite; Gemma 3n cuts its activations off with it."""

    cut = module_class("Cut", lambda self, x: torch.erfinv(x))()
    program = written_out(
        torch.export.export(cut, (torch.zeros(3, 3),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    )
    assert [node for node in program.graph.nodes if "erfinv" in str(node.target)] == []
    given = torch.cat([torch.linspace(-1, 1, 21), torch.tensor([0.99, 0.9999, -0.99999, 1e-7, 0.0, -1e-3])]).view(9, 3)
    torch.testing.assert_close(program.module()(given), torch.erfinv(given), atol=1e-6, rtol=2e-6)


def test_memory_is_filled_before_it_is_written_to():
    """ExecuTorch would take its sizes from the example: A.X K2 puts keys together in it, and fits no longer cache."""

    class Joined(torch.nn.Module):
        def forward(self, x, y):
            found = x.new_empty(x.shape[0], 5)
            found[:, :3], found[:, 3:] = x, y
            return found + torch.empty(x.shape[0], 5, dtype=x.dtype).zero_()

    rows = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Joined(), (torch.ones(2, 3), torch.ones(2, 2)), dynamic_shapes=(rows, rows))
    found = written_out(program)
    assert [node for node in found.graph.nodes if "empty" in str(node.target)] == []
    given = torch.randn(7, 3), torch.randn(7, 2)
    torch.testing.assert_close(found.module()(*given), torch.cat(given, dim=1))
