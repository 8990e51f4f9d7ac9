"""Tests of roundpipe_runtime.huggingface.check."""

import pytest
import torch
from torch import nn

from roundpipe_runtime.huggingface import CutError
from roundpipe_runtime.huggingface.check import check_equivalence, objective, tolerance

from .hf_small import Toy, tokens


class Piece(nn.Module):
    """A piece that runs a function with a module."""

    def __init__(self, module, function):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args):
        return self.function(self.module, *args)


def pieces_of(model, scale=1.0):
    first = Piece(model.embed, lambda embed, ids: embed(ids))
    layers = [Piece(layer, lambda layer, x: layer(x)) for layer in model.layers]
    return [first, *layers, Piece(model.head, lambda head, x: head(x * scale))]


def test_equal_pieces_have_no_error():
    """Outputs and all gradients are compared, and their number is reported."""
    model = Toy().double()
    found = check_equivalence(model, pieces_of(model), (tokens(2),), {})
    assert (found.outputs, found.gradients, found.parameters) == (0.0, 0.0, 9)
    assert all(p.grad is None for p in model.parameters())


def test_a_wrong_number_is_refused():
    """Another output, by a thousandth."""
    model = Toy().double()
    with pytest.raises(CutError, match=r"outputs differ by .* at most 1e-06 and 1e-05 are rounding") as caught:
        check_equivalence(model, pieces_of(model, 1.001), (tokens(2),), {})
    assert caught.value.reason == "values"


def test_a_missing_gradient_is_refused():
    """The same outputs, but nothing flows through the second layer."""
    model = Toy().double()
    pieces = pieces_of(model)
    pieces[2].function = lambda layer, x: x + (layer(x) - x).detach()
    with pytest.raises(CutError, match="gradients by inf"):
        check_equivalence(model, pieces, (tokens(2),), {})


def test_the_objective_reaches_every_number():
    """A change of any number of the outputs changes it; NaN and infinite ones are left out."""
    outputs = {"a": torch.zeros(3, requires_grad=True), "n": torch.arange(3), "b": torch.full((2,), -torch.inf)}
    objective(outputs, None).backward()
    assert (outputs["a"].grad != 0).all()
    with pytest.raises(CutError, match="Nothing that the model returns requires a gradient"):
        objective({"n": torch.arange(3)}, None)


def test_rounding_depends_on_the_dtype():
    """1e-6 for float32 and float64, 3 % for bfloat16."""
    model = nn.Linear(2, 2)
    assert tolerance(model) == tolerance(model.double()) == 1e-6
    assert tolerance(model.bfloat16()) == pytest.approx(4 * 2**-7)
