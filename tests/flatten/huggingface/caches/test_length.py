"""How many tokens sliding layers have seen: the tensor that states it, and the names of the leaves of a cache."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.export.graph_signature import SymIntArgument
from torch.utils import _pytree as pytree
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from roundpipe_runtime.batch.splitting import split
from tests.flatten.huggingface.caches.cache_cases import HAS_POSITION, made, round_trip, states
from tests.models import WINDOW, continued_alike, start
from tests.modules import module_class
from yobx_flatten import flatten_dynamic_cache, flatten_static_cache, unflatten_dynamic_cache, unflatten_static_cache
from yobx_flatten.errors import CacheStructureError, UnsupportedLayerError
from yobx_flatten.huggingface.caches import layouts


def seen(cache):
    return [layer.cumulative_length for layer in cache.layers]


def test_the_leaf_is_a_tensor_without_axes_and_layers_count_in_a_number_again(block):
    """Of integers, on the CPU, where reading it waits for nothing; also after `tree_map(torch.Tensor.half, cache)`."""
    for device in ("cpu", "meta"):
        leaf = pytree.tree_leaves(made("WW", length=12, device=device))[-1]
        assert (leaf.shape, leaf.dtype, leaf.device.type, leaf.item()) == ((), torch.int64, "cpu", 12)
    cache = made("WW", length=12)
    leaves, names = flatten_dynamic_cache(cache)
    earlier = unflatten_dynamic_cache([*leaves[:-1], 12], names)
    for rebuilt in (round_trip(cache), pytree.tree_map(torch.Tensor.half, cache), earlier):
        assert seen(rebuilt) == [12, 12]
        assert [type(count) for count in seen(rebuilt)] == [int, int]


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


TimesSeen = module_class("TimesSeen", lambda self, x, cache: x * cache.get_seq_length())


@pytest.mark.parametrize("earlier", [False, True], ids=["a tensor", "an integer, as in earlier versions"])
def test_programs_that_take_either_are_stored_and_called_alike(block, monkeypatch, tmp_path, earlier):
    with monkeypatch.context() as patched:
        if earlier:
            patched.setattr(layouts, "length_leaf", lambda seen: seen)
        shapes = {"x": None, "cache": [{}, {}, {}, {}, Dim.AUTO]}
        program = torch.export.export(TimesSeen(), (torch.ones(2), made("WW", length=9)), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "stored.pt2")
    taken = [type(spec.arg) is SymIntArgument for spec in program.graph_signature.input_specs]
    assert taken == [False] * 5 + [earlier]
    for one in (program, torch.export.load(tmp_path / "stored.pt2")):
        for count in (9, 30):
            assert one.module()(torch.ones(2), made("WW", length=count)).tolist() == [count] * 2


def made_by_hand(kinds, counts, length=3):
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
    assert continued_alike(begun, unflatten_dynamic_cache(*flatten_dynamic_cache(other.cache)))


def test_more_keys_than_a_full_layer_holds_are_refused_and_a_layer_without_keys_has_seen_none():
    cache = made_by_hand("DW", (None, 0))
    cache.layers[1].keys = cache.layers[1].values = torch.ones(1, 2, 5, 4)
    with pytest.raises(CacheStructureError, match=r"seen different numbers of tokens: 3 and, in layers\[1\] \(W8\), 0"):
        flatten_dynamic_cache(cache)
    cache = made_by_hand("W", (0,))
    cache.layers[0].keys = cache.layers[0].values = torch.ones(1, 2, 0, 4)
    leaves, names = flatten_dynamic_cache(cache)
    assert (leaves[-1], names[-1]) == (0, "length")


# of static layers, the tensor that they count with
POSITIONS = ["position_S16_0", "position_X8_1", "position_S16_1"] if HAS_POSITION else []


@pytest.mark.parametrize(
    ("layout", "expected", "length"),
    [
        ("DDD", ["key_0", "value_0", "key_1", "value_1", "key_2", "value_2"], []),
        ("DWD", ["key_D_0", "value_D_0", "key_W8_1", "value_W8_1", "key_D_2", "value_D_2"], []),
        ("WW", ["key_W8_0", "value_W8_0", "key_W8_1", "value_W8_1"], ["length"]),
        ("SX", ["key_S16_0", "value_S16_0", *POSITIONS[:1], "key_X8_1", "value_X8_1", *POSITIONS[1:2]], ["length"]),
        ("SS", ["key_S16_0", "value_S16_0", *POSITIONS[:1], "key_S16_1", "value_S16_1", *POSITIONS[2:]], []),
    ],
)
def test_names_state_the_kinds_of_layers_where_there_are_several(layout, expected, length):
    """No shape of a leaf says how many tokens sliding layers alone saw: one integer leaf does, the last."""
    flatten = flatten_static_cache if "S" in layout else flatten_dynamic_cache
    leaves, names = flatten(made(layout, length=12))
    assert names == [*expected, *length]
    counts = [leaf for leaf, name in zip(leaves, names, strict=True) if name.startswith(("position_S", "length"))]
    assert [int(count) for count in counts] == [12] * len(counts)
    assert [tuple(leaf.shape) for leaf in leaves[:2]] == [(2, 2, {"D": 12, "W": 7, "S": 16}[layout[0]], 4)] * 2


def test_layers_that_hold_nothing_keep_their_place():
    """Left out, they would shift every later layer to another layer's tensors."""
    cache = made("WDW")
    cache.layers[0] = cache_utils.DynamicSlidingWindowLayer(WINDOW)
    cache.layers[2] = cache_utils.DynamicSlidingWindowLayer(WINDOW)
    leaves, names = flatten_dynamic_cache(cache)
    assert names == ["none_W8_0", "key_D_1", "value_D_1", "none_W8_2"]
    rebuilt = unflatten_dynamic_cache(leaves, names)
    assert [layer.keys for layer in rebuilt.layers] == [None, leaves[0], None]
    assert [type(layer).__name__ for layer in rebuilt.layers] == [type(x).__name__ for x in cache.layers]


def test_the_window_and_the_room_of_a_layer_are_those_of_its_keys():
    leaves = [torch.randn(1, 2, length, 4) for length in (6, 6, 5, 5)]
    cache = unflatten_dynamic_cache(iter(leaves), ["key_D_0", "value_D_0", "key_W_1", "value_W_1"])
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, DynamicSlidingWindowLayer]
    assert cache.layers[1].sliding_window == 5
    assert [cache.layers[1].keys is leaves[2], cache.layers[1].values is leaves[3]] == [True, True]
    assert flatten_dynamic_cache(cache)[1][:4] == ["key_D_0", "value_D_0", "key_W5_1", "value_W5_1"]
    (static,) = unflatten_static_cache(leaves[:2], ["key_S_0", "value_S_0"]).layers
    assert (type(static), static.max_cache_len) == (StaticLayer, 6)
    with pytest.raises(UnsupportedLayerError, match="a layer of kind 'W'"):
        unflatten_dynamic_cache([object(), object()], ["key_W_0", "value_W_0"])


HAS_WINDOW_TENSOR = "_sliding_window_tensor" in vars(DynamicSlidingWindowLayer(8))
has_window_tensor = pytest.mark.skipif(
    not HAS_WINDOW_TENSOR, reason="transformers < 5.0 keeps no tensor beside a window"
)


def fresh(window):
    return [*states(), 3], [f"key_W{window}_0", f"value_W{window}_0", "length"]


def windows(cache):
    return [None if window is None else window.item() for _, _, window in cache]


@has_window_tensor
def test_a_window_that_nobody_has_seen_is_among_what_a_cache_gathers():
    """DDP gathers a cache by its items and makes another of them: of sliding layers, not of full ones."""
    cache = unflatten_dynamic_cache(*fresh(1009))
    assert windows(cache) == [1009]
    own = DynamicCache()
    own.layers = [DynamicSlidingWindowLayer(1009)]
    own.update(*states(), 0)
    try:
        DynamicCache(list(own))
    except IndexError:
        pytest.skip("5.0 gathers no sliding layers, its own neither: it takes the first item of a tensor without axes")
    gathered = DynamicCache(list(cache))
    assert [(type(layer), layer.sliding_window) for layer in gathered.layers] == [(DynamicSlidingWindowLayer, 1009)]


@has_window_tensor
def test_one_ordinary_tensor_serves_all_layers_of_a_window():
    """It is kept for later, where a tensor made in inference mode would be refused by autograd."""
    leaves = [*states(), *states()]
    names = [f"{part}_W1013_{layer}" for layer in range(2) for part in ("key", "value")]
    with torch.inference_mode():
        unflatten_dynamic_cache([*leaves, 3], [*names, "length"])
    layers = unflatten_dynamic_cache([*leaves, 3], [*names, "length"]).layers
    assert layers[0]._sliding_window_tensor is layers[1]._sliding_window_tensor
    assert not layers[0]._sliding_window_tensor.is_inference()
    on_meta = unflatten_dynamic_cache([leaf.to("meta") for leaf in leaves] + [3], [*names, "length"]).layers
    assert on_meta[0]._sliding_window_tensor.device.type == "meta"


class UpdatesACache(torch.nn.Module):
    def forward(self, x, cache=None):
        if cache is None:
            cache = DynamicCache()
            cache.layers = [DynamicSlidingWindowLayer(1021)]
        cache.update(x, x, 0)
        return cache


@has_window_tensor
def test_a_cache_that_a_program_returns_has_the_tensor_and_the_program_has_none(block):
    """Made by unflatten at the call: in the trace it would be a constant; one layer of the window had a tensor."""
    for window, args in ((1021, ()), (1031, (unflatten_dynamic_cache(*fresh(1031)),))):
        program = torch.export.export(UpdatesACache(), (torch.ones(2, 2, 3, 4), *args))
        assert windows(program.module()(torch.ones(2, 2, 3, 4), *args)) == [window]
        assert not program.constants


@has_window_tensor
@pytest.mark.parametrize("around", [FakeTensorMode, torch.func.vmap], ids=["fake", "vmap"])
def test_nothing_is_made_where_it_would_not_be_a_tensor_of_its_own(around):
    window = 1033 if around is FakeTensorMode else 1039
    leaves, names = fresh(window)
    seen = []

    def rebuild(keys):
        cache = unflatten_dynamic_cache([keys, keys, 3], names)
        seen.append(hasattr(cache.layers[0], "_sliding_window_tensor"))
        return flatten_dynamic_cache(cache)[0][0]

    if around is FakeTensorMode:
        with FakeTensorMode() as mode:
            rebuild(mode.from_tensor(leaves[0]))
    else:
        torch.func.vmap(rebuild)(leaves[0])
    assert seen == [False]
    assert windows(unflatten_dynamic_cache(leaves, names)) == [window]
