"""Tests of roundpipe_runtime.huggingface.cutting.call_log."""

from torch import nn

from roundpipe_runtime.huggingface.cutting.call_log import candidates, observe
from tests.runtime.huggingface.hf_small import Block, Toy, tokens


def test_the_outermost_lists_are_found_the_largest_first():
    """Experts within a layer are part of it; lists of one element or without parameters are no layers."""

    class Layer(Block):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    model = nn.ModuleDict(
        {
            "small": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
            "layers": nn.ModuleList([Layer(), Layer()]),
            "single": nn.ModuleList([nn.Linear(99, 99)]),
            "acts": nn.ModuleList([nn.ReLU(), nn.ReLU()]),
        }
    )
    assert [found.path for found in candidates(model)] == ["layers", "small"]
    assert list(candidates(model)[0].layers) == ["layers.0", "layers.1"]


def test_calls_are_observed_in_order():
    """The order of the forward counts, not that of the list; a layer may be called twice."""

    class Backward(Toy):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            for number in (2, 0, 0):
                x = self.layers[number](x)
            return x

    model = Backward()
    layers = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    calls, result = observe(layers, lambda: model(tokens()))
    assert [call.layer for call in calls] == ["layers.2", "layers.0", "layers.0"]
    assert result.shape == (5, 6, 8)
    assert not any(layer._forward_hooks for layer in model.layers)


def test_a_form_says_which_outputs_are_like_an_input():
    """A tensor of the shape of an argument can be told before the layer runs; others, and `None`, are noted as such."""

    class Layer(Block):
        def forward(self, x):
            return x + 1, x.sum(), None

    model = Toy(nn.ModuleList([Layer(), Layer()]))
    model.between = lambda number, layer, x: layer(x)[0]
    calls, _ = observe({"0": model.layers[0]}, lambda: model(tokens()))
    assert calls[0].form.leaves == (0, -1, (None,))


def test_sequential_counts_when_its_children_are_alike_and_made_of_parts():
    """A stack of equal blocks in an `nn.Sequential` is a list of layers; the two matrices of a network are none."""
    model = nn.ModuleDict({"stack": nn.Sequential(Block(), Block()), "mlp": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    assert [found.path for found in candidates(model)] == ["stack"]
