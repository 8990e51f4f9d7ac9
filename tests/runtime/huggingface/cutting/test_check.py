"""Tests of roundpipe_runtime.huggingface.cutting.check."""

import pytest
import torch
from torch import nn

from roundpipe_runtime.huggingface import CutError, cut
from roundpipe_runtime.huggingface.cutting import check
from roundpipe_runtime.huggingface.cutting.check import check_equivalence, objective
from tests.runtime.huggingface.hf_small import Block, Toy, tokens

pytestmark = pytest.mark.slow


@pytest.fixture(params=["small", "large"], autouse=True)
def size(request, monkeypatch):
    """Each test sees every gradient kept whole, and digested as that of a large model."""
    if request.param == "large":
        monkeypatch.setattr(check, "_SMALL", 0)
        monkeypatch.setattr(check, "_WHOLE", 0)
    return request.param


class Piece(nn.Module):
    def __init__(self, module, function):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args):
        return self.function(self.module, *args)


def pieces_of(model):
    first = Piece(model.embed, lambda embed, ids: embed(ids))
    layers = [Piece(layer, lambda layer, x: layer(x)) for layer in model.layers]
    return [first, *layers, Piece(model.head, lambda head, x: head(x))]


def test_outputs_are_compared_by_name():
    """A model may set entries in another order than that of their class, in which an output is built again."""
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Late(Toy):
        def forward(self, input_ids):
            return late(super().forward(input_ids))

    def late(x):
        made = outputs.BaseModelOutputWithPooling(last_hidden_state=x, hidden_states=(2 * x[:, :1],))
        made.pooler_output = x[:, 0]  # before the hidden states, among the fields of the class
        return made

    model = Late().double()
    assert list(model(tokens(2))) == ["last_hidden_state", "hidden_states", "pooler_output"]
    pieces = pieces_of(model)
    pieces[-1] = Piece(model.head, lambda head, x: late(head(x)))
    assert check_equivalence(model, pieces, (tokens(2),), {}).outputs == 0.0
    pieces[-1] = Piece(model.head, lambda head, x: outputs.BaseModelOutputWithPooling(head(x)))
    with pytest.raises(CutError, match="outputs differ by inf"):
        check_equivalence(model, pieces, (tokens(2),), {})


def test_a_missing_gradient_is_refused():
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
    with pytest.raises(CutError, match="No output of the model requires a gradient"):
        objective({"n": torch.arange(3)}, None)


def wrong_output(scale, wrong):
    return lambda layer, x: layer(x) + scale * wrong(layer(x))


def wrong_gradient(scale, wrong):
    def call(layer, x):
        out = layer(x)
        bad = scale * wrong(out)
        return out + bad - bad.detach()

    return call


MISTAKES = {
    "couples rows": lambda out: out.flip(0),
    "couples positions": lambda out: out.cumsum(1),
    "scales": lambda out: out,
    "forgets a row": lambda out: torch.cat([-out[:1], torch.zeros_like(out[1:])]),
    "mixes features": lambda out: out.roll(1, -1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("layer", [1, 3], ids=["first", "last"])
@pytest.mark.parametrize("plant", [wrong_output, wrong_gradient])
def test_a_layer_that_does_something_else_is_found(mistake, layer, plant):
    model = Toy().double()
    pieces = pieces_of(model)
    pieces[layer].function = plant(1e-3, MISTAKES[mistake])
    with pytest.raises(CutError, match=r"outputs differ by .* and gradients by .* 1e-06 for .* 1e-05 for") as caught:
        check_equivalence(model, pieces, (tokens(2),), {})
    assert caught.value.reason == "values"


def test_one_wrong_number_of_one_gradient_is_found():
    model = Toy().double()
    pieces = pieces_of(model)

    def call(layer, x):
        bad = layer.linear.weight[3, 5] * 1e-2
        return layer(x) + bad - bad.detach()

    pieces[3].function = call
    with pytest.raises(CutError, match=r"outputs differ by 0.0e\+00 and gradients by .* \(layers.2.linear.weight\)"):
        check_equivalence(model, pieces, (tokens(2),), {})


class Counting(Block):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Keeping(Block):
    """A layer that goes back into what another layer has kept on itself."""

    kept = None

    def forward(self, x):
        other, Keeping.kept = Keeping.kept, x * self.linear.weight.sum()
        return super().forward(x) + (0.0 if other is None else other)


@pytest.mark.parametrize("leaking", [Counting, Keeping])
@pytest.mark.parametrize("place", [0, 2])
def test_a_layer_that_leaks_state_is_found(leaking, place):
    layers = nn.ModuleList([Block(), Block(), Block()])
    layers[place] = leaking()
    layers[1] = leaking()
    Keeping.kept = None
    report = cut(Toy(layers).double(), {"input_ids": tokens(2)}).report
    Keeping.kept = None
    assert report.is_whole
    assert report.refused[-1][0] in ("values", "structure")


class Tied(Toy):
    """The head is the embedding, and one block is called twice."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight
        self.layers[2] = self.layers[0]


def test_parameters_that_several_pieces_use_are_summed():
    model = Tied().double()
    found = check_equivalence(model, pieces_of(model), (tokens(2),), {})
    assert (found.outputs, found.parameters) == (0.0, 6)
    assert all(p.grad is None for p in model.parameters())
    assert found.gradients < 1e-12
    assert model.head.weight is model.embed.weight
    pieces = pieces_of(model)
    pieces[-1].function = lambda head, x: nn.functional.linear(x, head.weight.detach(), head.bias)
    with pytest.raises(CutError, match=r"embed.weight"):
        check_equivalence(model, pieces, (tokens(2),), {})


def test_hooks_of_parameters_are_called_with_the_whole_gradient():
    model = Tied().double()
    seen = []
    model.embed.weight.register_hook(lambda gradient: seen.append(gradient) or gradient.clamp(max=1e-4))
    found = check_equivalence(model, pieces_of(model), (tokens(2),), {})
    assert len(seen) == 2
    assert torch.allclose(*seen)
    assert found.gradients < 1e-12


def test_nothing_of_the_check_stays_behind():
    model = Tied().double()
    model.layers[1].linear.weight.requires_grad_(False)
    model.head.bias.grad = torch.ones_like(model.head.bias)
    places = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    check_equivalence(model, pieces_of(model), (tokens(2),), {})
    assert places == {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["head.bias"]
    assert (model.head.bias.grad == 1).all()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_no_two_large_gradients_are_there_at_once(size, monkeypatch):
    """Each is forgotten before the next layer goes back, and no parameter is copied."""
    model = Toy().double()
    held = []
    plain = check.digest

    def watched(gradient, **options):
        held.append(sum(p.grad is not None for p in model.parameters()))
        return plain(gradient, **options)

    monkeypatch.setattr(check, "digest", watched)
    check_equivalence(model, pieces_of(model), (tokens(2),), {})
    assert len(held) == 18 + 4  # gradients, and outputs, of model and pieces
    assert max(held) == 1
