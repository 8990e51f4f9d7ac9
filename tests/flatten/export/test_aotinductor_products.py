"""Weights of products have their axes exchanged in a program for AOTInductor: same numbers, and each weight once."""

import pytest
import torch

from yobx_flatten.export.runtimes.aotinductor import transposed_weights


class Tied(torch.nn.Module):
    """A table that is also the head, a product with a bias, and a weight that is read in another way too."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 6)
        self.product = torch.nn.Linear(6, 5)
        self.scaled = torch.nn.Linear(5, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        hidden = self.scaled(self.product(self.table(ids)).relu()) * self.scaled.weight.sum()
        return self.head(hidden)


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Tied().eval()


def _changed(module):
    program = torch.export.export(module, (torch.tensor([[1, 2, 3]]),), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    return program, transposed_weights(program)


def test_the_numbers_are_those_of_the_module(module):
    """For another number of tokens also; the table is looked up in the head's memory."""
    _, made = _changed(module)
    ids = torch.tensor([[4, 0, 10, 7, 7]])
    torch.testing.assert_close(made.module()(ids), module(ids), atol=1e-6, rtol=0)


def test_a_weight_that_only_products_and_a_table_read_is_exchanged(module):
    """The tied one is one tensor under both names; one that is summed up stays, and so do those of the caller."""
    program, made = _changed(module)
    shapes = {name: tuple(weight.shape) for name, weight in made.state_dict.items() if weight.dim() == 2}
    assert {name: shape for name, shape in shapes.items() if name.startswith(("product", "scaled"))} == {
        "product.weight": (6, 5),
        "scaled.weight": (6, 5),
    }
    tied = [
        made.state_dict[name] for name in made.graph_signature.parameters if name in ("table.weight", "head.weight")
    ]
    assert {tuple(weight.shape) for weight in tied} == {(6, 11)}
    assert len({weight.data_ptr() for weight in tied}) == 1
    assert module.product.weight.shape == (5, 6)
    assert program.state_dict["product.weight"].shape == (5, 6)


def test_other_types_stay_as_they_are(module):
    """Only products in float32 are exchanged, as only those were measured."""
    _, made = _changed(module.double())
    assert made.state_dict["product.weight"].shape == (5, 6)
