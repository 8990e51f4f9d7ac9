"""How many tokens sliding layers have seen: a tensor among the leaves, a number in layers, found again when lost."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.export.graph_signature import SymIntArgument
from torch.utils import _pytree as pytree
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from roundpipe_runtime.batch.splitting import split
from tests.flatten.huggingface.caches.cache_cases import made, round_trip
from tests.models import WINDOW, continued_alike, start
from yobx_flatten.errors import CacheStructureError
from yobx_flatten.huggingface.caches import layouts
from yobx_flatten.huggingface.caches.functions import flatten_dynamic_cache, unflatten_dynamic_cache


def seen(cache):
    return [layer.cumulative_length for layer in cache.layers]


def test_the_leaf_is_a_tensor_without_axes(block):
    """Of integers, on the CPU, where reading it waits for nothing; also for layers that hold nothing on the CPU."""
    for device in ("cpu", "meta"):
        leaf = pytree.tree_leaves(made("WW", length=12, device=device))[-1]
        assert (leaf.shape, leaf.dtype, leaf.device.type, leaf.item()) == ((), torch.int64, "cpu", 12)


def test_layers_count_in_a_number_again(block):
    """Eager layers branch on it; also after `tree_map(torch.Tensor.half, cache)`."""
    cache = made("WW", length=12)
    for rebuilt in (round_trip(cache), pytree.tree_map(torch.Tensor.half, cache)):
        assert seen(rebuilt) == [12, 12]
        assert [type(count) for count in seen(rebuilt)] == [int, int]


def test_leaves_of_earlier_versions_are_integers():
    """As stored inputs have them."""
    leaves, names = flatten_dynamic_cache(made("WW", length=12))
    assert seen(unflatten_dynamic_cache([*leaves[:-1], 12], names)) == [12, 12]


def test_a_tensor_without_a_value_stays_one(block):
    leaves, spec = pytree.tree_flatten(made("WW", length=12))
    fake = FakeTensorMode()
    for stand_ins in ([fake.from_tensor(leaf) for leaf in leaves], [leaf.to("meta") for leaf in leaves]):
        cache = pytree.tree_unflatten(stand_ins, spec)
        assert all(count is stand_ins[-1] for count in seen(cache))
        assert all(a is b for a, b in zip(pytree.tree_leaves(cache), stand_ins, strict=True))


def test_vmap_goes_over_several_caches(block):
    caches = [made("WW", length=12) for _ in range(3)]
    together = pytree.tree_map(lambda *leaves: torch.stack(leaves), *caches)
    counts = []

    def twice(cache):
        counts.append(seen(cache))
        return pytree.tree_map(lambda leaf: leaf * 2, cache)

    found = pytree.tree_leaves(torch.vmap(twice)(together))
    assert counts == [[12, 12]]
    assert found[0].unique().tolist() == [2]
    assert found[-1].tolist() == [24] * 3


def test_a_batch_that_is_split_leaves_the_length_whole(block):
    parts = split((torch.ones(4, 3),), {"past": made("WW", length=12, batch=4)}, None, 2)
    assert [seen(part.kwargs["past"]) for part in parts] == [[12, 12]] * 2
    assert [part.kwargs["past"].layers[0].keys.shape[0] for part in parts] == [2, 2]


class TimesSeen(torch.nn.Module):
    def forward(self, x, cache):
        return x * cache.get_seq_length()


def program_of(monkeypatch, *, earlier):
    """A program for a cache that has seen 9 tokens; of an earlier version, which flattened the number as it was."""
    with monkeypatch.context() as patched:
        if earlier:
            patched.setattr(layouts, "length_leaf", lambda seen: seen)
        shapes = {"x": None, "cache": [{}, {}, {}, {}, Dim.AUTO]}
        return torch.export.export(TimesSeen(), (torch.ones(2), made("WW", length=9)), dynamic_shapes=shapes)


@pytest.mark.parametrize("earlier", [False, True], ids=["a tensor", "an integer, as in earlier versions"])
def test_programs_that_take_either_are_called_alike(block, monkeypatch, earlier):
    program = program_of(monkeypatch, earlier=earlier)
    taken = [type(spec.arg) is SymIntArgument for spec in program.graph_signature.input_specs]
    assert taken == [False] * 5 + [earlier]
    for count in (9, 30):
        assert program.module()(torch.ones(2), made("WW", length=count)).tolist() == [count] * 2


def test_a_program_of_an_earlier_version_is_loaded(block, monkeypatch, tmp_path):
    torch.export.save(program_of(monkeypatch, earlier=True), tmp_path / "old.pt2")
    program = torch.export.load(tmp_path / "old.pt2").module()
    assert program(torch.ones(2), made("WW", length=30)).tolist() == [30, 30]


def made_by_hand(kinds, counts, length=3):
    """Layers D and W that hold `length` keys, and what each says that it has seen."""
    cache = DynamicCache()
    cache.layers = [DynamicLayer() if kind == "D" else DynamicSlidingWindowLayer(8) for kind in kinds]
    for layer, count in zip(cache.layers, counts, strict=True):
        layer.update(torch.ones(1, 2, length, 4), torch.ones(1, 2, length, 4))
        if count is not None:
            layer.cumulative_length = count
    return cache


@pytest.mark.parametrize(
    ("kinds", "counts", "expected"),
    [
        ("DW", (None, 0), [3]),
        ("WD", (0, None), [3]),
        ("DWW", (None, 0, 3), [3, 3]),
        ("WW", (0, 0), [3, 3]),
        ("WW", (9, 0), [9, 9]),
        ("WW", (0, 9), [9, 9]),
    ],
)
def test_it_has_seen_what_a_full_layer_or_another_one_has(kinds, counts, expected):
    cache = made_by_hand(kinds, counts)
    for _ in range(2):  # the second time layers of these classes are known
        rebuilt = unflatten_dynamic_cache(*flatten_dynamic_cache(cache))
        assert [layer.cumulative_length for layer in rebuilt.layers if type(layer) is not DynamicLayer] == expected
    assert [getattr(layer, "cumulative_length", None) for layer in cache.layers] == list(counts)


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_it_goes_on_as_a_model_that_filled_it(name):
    begun, other = (start(name, past=WINDOW - 3) for _ in range(2))
    for layer in other.cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length = 0
    rebuilt = unflatten_dynamic_cache(*flatten_dynamic_cache(other.cache))
    assert continued_alike(begun, rebuilt)


def test_more_keys_than_a_full_layer_holds_are_refused():
    """Nothing could have filled it so."""
    cache = made_by_hand("DW", (None, 0))
    cache.layers[1].keys = cache.layers[1].values = torch.ones(1, 2, 5, 4)
    with pytest.raises(CacheStructureError, match=r"seen different numbers of tokens: 3 and, in layers\[1\] \(W8\), 0"):
        flatten_dynamic_cache(cache)


def test_a_layer_that_holds_no_keys_has_seen_none():
    cache = made_by_hand("W", (0,))
    cache.layers[0].keys = cache.layers[0].values = torch.ones(1, 2, 0, 4)
    leaves, names = flatten_dynamic_cache(cache)
    assert (leaves[-1], names[-1]) == (0, "length")
