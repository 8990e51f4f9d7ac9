"""Models whose forward was replaced, and caches that a model makes for its layers."""

import functools
import types

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from roundpipe_runtime.errors import BatchStructureError
from roundpipe_runtime.huggingface import cut
from roundpipe_runtime.huggingface.cutting.caches import MadeCache, entries_read, without_caches
from roundpipe_runtime.huggingface.cutting.stub import Key, rebind_functions
from tests.runtime.huggingface.hf_small import (
    WIDTH,
    Block,
    Toy,
    compare_toy,
    hf_batch,
    hf_model,
    tokens,
    worst_gradient,
    wrapped,
)


class Attends(Block):
    """A layer that adds the mean of the keys that a cache has for it, and writes its own ones."""

    def __init__(self, number, reads=None):
        super().__init__()
        self.number = number
        self.reads = number if reads is None else reads

    def forward(self, x, cache):
        states = x.unsqueeze(1)
        cache.update(states, states, self.number)
        return super().forward(x + cache.layers[self.reads].keys.mean(2))


class Prefixed(Toy):
    def __init__(self, reads=(None, None, None)):
        super().__init__(nn.ModuleList([Attends(number, other) for number, other in enumerate(reads)]))
        self.prefix = nn.Parameter(torch.randn(3, 2, WIDTH))

    def forward(self, input_ids):
        x, cache = self.embed(input_ids), DynamicCache()
        for number, prefix in enumerate(self.prefix):
            rows = prefix.expand(len(x), 1, 2, WIDTH)
            cache.update(rows, rows * 2, number)
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(x)


def test_learned_keys_get_the_gradients_of_the_layers():
    found = compare_toy(Prefixed())
    assert list(found.layers) == ["layers.0", "layers.1", "layers.2"]
    assert found.program.cache_reads == {place: frozenset({(0, place)}) for place in range(3)}


def test_a_layer_that_reads_what_another_has_written_is_refused():
    report = cut(Prefixed((None, None, 0)), {"input_ids": tokens(2)}, check=False).report
    assert report.is_whole
    assert "layers.2 and layers.0 use the same keys and values" in str(report)


def test_a_layer_gets_the_entries_that_it_read_before():
    cache = DynamicCache()
    for number in range(2):
        cache.update(torch.full((1, 1, 2, 3), float(number)), torch.ones(1, 1, 2, 3), number)
    values = {}

    def named(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        values[Key(-1, len(values))] = leaf
        return Key(-1, len(values) - 1)

    made = MadeCache.of(cache, named, frozenset({(0, 1)}))
    assert made.keys() == values.keys()
    built = made.build(values)
    assert torch.equal(built.layers[1].keys, torch.ones(1, 1, 2, 3))
    built.update(torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 1, 3), 1)
    assert built.layers[1].keys.shape[2] == 3
    assert cache.layers[1].keys.shape[2] == 2
    assert entries_read(((built,), {})) == {(0, 1)}
    with pytest.raises(BatchStructureError, match="reads entry 0 of the cache"):
        built.get_seq_length(0)


def test_outputs_lose_caches_and_nothing_else():
    cache, logits = DynamicCache(), torch.ones(1)
    assert without_caches({"logits": logits, "cache": cache}) == {"logits": logits, "cache": None}
    assert without_caches((logits, cache)) == (logits,)
    assert without_caches(logits) is logits


def in_a_closure(model):
    """A function whose closure holds the former forward, a method of the model."""
    original = model.forward

    def forward(*args, scale=1.0, **kwargs):
        return original(*args, **kwargs) * scale

    model.forward = forward


def as_a_method(model):
    """A method of the model that calls the former forward, as the heads of TRL are."""
    original = model.forward

    def forward(self, *args, scale=1.0, **kwargs):
        return original(*args, **kwargs) * scale

    model.forward = types.MethodType(forward, model)


def twice(model):
    in_a_closure(model)
    as_a_method(model)


def of_the_module(model):
    """A function whose closure holds the model itself, and calls its class."""

    @functools.wraps(model.forward)
    def forward(*args, scale=1.0, **kwargs):
        return type(model).forward(model, *args, **kwargs) * scale

    model.forward = forward


@pytest.mark.parametrize("replace", [in_a_closure, as_a_method, twice, of_the_module])
def test_a_model_with_a_replaced_forward_is_cut(replace):
    model, plain = Toy(), Toy()
    replace(model)
    replace(plain)
    pipeline = wrapped(model, example={"input_ids": tokens(2)})
    assert len(pipeline.cut.layers) == 3
    batch = {"input_ids": tokens(), "scale": 0.5}
    expected = plain(**batch)
    expected.square().sum().backward()
    found = pipeline(**batch)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    assert worst_gradient(model, plain) < 1e-6


def test_a_forward_that_is_replaced_later_counts():
    model, plain = hf_model("llama"), hf_model("llama")
    plain.load_state_dict(model.state_dict())
    pipeline, batch = wrapped(model), hf_batch()
    before = pipeline(**batch).logits
    for one in (model, plain):

        def forward(self, *args, halves=False, **kwargs):
            output = type(self).forward(self, *args, **kwargs)
            output.logits = output.logits / 2 if halves else output.logits
            return output

        one.forward = types.MethodType(forward, one)
    torch.testing.assert_close(pipeline(**batch, halves=True).logits, plain(**batch, halves=True).logits)
    torch.testing.assert_close(pipeline(**batch).logits, before)
    prompt = {"input_ids": batch["input_ids"][:, :4], "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(pipeline.generate(**prompt), plain.generate(**prompt))


def test_a_forward_that_calls_another_model_stays():
    """A function that holds no module of the model is kept as it is, and so is what it counts."""
    model = Toy()
    calls = 0

    def forward(input_ids):
        nonlocal calls
        calls += 1
        return input_ids

    model.head.forward = forward
    rebind_functions(model, {})
    assert model.head.forward is forward
    made = cut(Toy(), {"input_ids": tokens(2)})
    assert not made.report.is_whole
    assert calls == 0
