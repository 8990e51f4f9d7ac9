"""Tests of roundpipe_runtime.huggingface.cutting.caches: caches that the model's own code makes and fills."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from roundpipe_runtime.errors import BatchStructureError, CutError, RoundPipeError
from roundpipe_runtime.huggingface import cut
from roundpipe_runtime.huggingface.cutting.caches import MadeCache, check_apart, entries_read, without_caches
from roundpipe_runtime.huggingface.cutting.stub import Key
from tests.runtime.huggingface.hf_small import WIDTH, Block, Toy, compare_toy, tokens


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
    """A toy with learned keys for each layer."""

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
    assert "layers.2 and layers.0 use the same entry of a cache" in str(report)


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


def test_entries_of_two_calls_must_be_apart():
    check_apart(["a", "b"], {0: frozenset({(0, 0)}), 1: frozenset({(0, 1), (1, 0)})})
    with pytest.raises(CutError, match="b and a use the same entry of a cache") as caught:
        check_apart(["a", "b"], {0: frozenset({(0, 0)}), 1: frozenset({(0, 0)})})
    assert isinstance(caught.value, RoundPipeError)


def test_outputs_lose_caches_and_nothing_else():
    cache, logits = DynamicCache(), torch.ones(1)
    assert without_caches({"logits": logits, "cache": cache}) == {"logits": logits, "cache": None}
    assert without_caches((logits, cache)) == (logits,)
    assert without_caches(logits) is logits
