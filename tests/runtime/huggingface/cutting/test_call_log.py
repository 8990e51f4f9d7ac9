"""Tests of huggingface.cutting.call_log and .cut_state: layers that are found, and what passes between pieces."""

import types
from collections import UserDict

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe_runtime.huggingface import cut
from roundpipe_runtime.huggingface.cutting import cut_plan
from roundpipe_runtime.huggingface.cutting.call_log import (
    CallLog,
    CallSpec,
    Tree,
    box_content,
    candidates,
    fill_box,
    is_box,
    live,
    observe,
)
from roundpipe_runtime.huggingface.cutting.cut_plan import begin, device_of
from roundpipe_runtime.huggingface.cutting.stub import Key
from roundpipe_runtime.huggingface.loss.call_options import CALL_OPTIONS, CallOptions
from tests.runtime.huggingface.hf_small import Block, Toy, hf_model, tokens

from ..hf_small import hf_batch

A, B, C = Key(-1, 0), Key(0, 0), Key(-1, 1)


def tree(*leaves):
    return Tree(pytree.tree_structure([0] * len(leaves)), leaves)


def test_values_live_until_their_last_use():
    call_log = CallLog().record({0: CallSpec(tree(A)), 2: CallSpec(tree(B, C))})
    values = {A: torch.ones(1), B: torch.ones(2), C: torch.ones(3), Key(2, 0): torch.ones(4)}
    assert set(live(values, call_log, 0, frozenset())) == {B, C}
    assert set(live(values, call_log, 2, frozenset({A}))) == {A}
    assert set(live(values, call_log.made(2, tree(None), tree(Key(2, 0))), 2, frozenset())) == {Key(2, 0)}


def test_boxes_are_what_layers_could_write():
    shared = UserDict({"a": 1})
    assert is_box(shared)
    assert is_box([])
    assert not is_box((1,))
    assert not is_box(torch.ones(1))
    assert box_content(shared) == {"a": 1}
    fill_box(shared, {"b": 2})
    assert dict(shared) == {"b": 2}
    held = [1]
    fill_box(held, [2, 3])
    assert held == [2, 3]


def test_the_outermost_lists_are_found_the_largest_first():
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


def test_a_state_begins_with_the_arguments_of_the_model():
    model, options = hf_model("llama").eval(), CallOptions(loss_only=True)
    torch.manual_seed(11)
    state = begin((), {"input_ids": tokens(), "output_attentions": True, CALL_OPTIONS: options}, model)
    assert state.call[1].keys() == {"input_ids", "output_attentions"}
    assert (state.options, state.seed, state.call_log.keep) == (options, 11, "extras")


def test_noise_starts_again():
    """Code that runs again in a later phase draws the numbers of the first phase."""
    model = Toy()
    torch.manual_seed(3)
    state = begin((tokens(),), {}, model)
    first = torch.rand(4)
    state.restart_noise()
    assert torch.equal(torch.rand(4), first)


def test_a_piece_leaves_its_state_alone():
    """The engine calls a piece with the same state again to recompute it, and gets the same result."""
    made = cut(hf_model("llama"))
    batch = hf_batch()
    with torch.no_grad():
        state = made.pieces[0](**batch, use_cache=False)
        before = pytree.tree_flatten(state)
        calls = dict(state.call_log.results)
        results = [made.pieces[1](state) for _ in range(2)]
    after = pytree.tree_flatten(state)
    assert (after[1], state.call_log.results) == (before[1], calls)
    assert all(one is other for one, other in zip(after[0], before[0], strict=True))
    one, other = (result.values[Key(0, 0)] for result in results)
    assert one is not other
    assert torch.equal(one, other)


def test_the_device_of_a_call_is_that_of_its_tensors():
    """The first tensor tells it, however deep; a call without one runs on the host."""
    assert device_of(((), {"x": [None, torch.ones(1, device="meta")]})) == torch.device("meta")
    assert device_of(((), {"n": 3})) == torch.device("cpu")


def test_later_phases_draw_the_same_numbers_on_the_device_and_on_the_host(monkeypatch):
    """transformers draws on the CPU which layers it drops, wherever the batch is."""
    seeds = []
    generator = types.SimpleNamespace(manual_seed=seeds.append, initial_seed=lambda: 7)
    monkeypatch.setattr(cut_plan, "_generator", lambda call: generator)
    outside = torch.get_rng_state()
    try:
        state = begin((torch.ones(1),), {}, torch.nn.Identity())
        state.restart_noise()
        drawn = torch.rand(3)
    finally:
        torch.set_rng_state(outside)
    assert seeds == [7]
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
