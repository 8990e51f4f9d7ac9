"""A rebuilt layer has every attribute of the layer that was flattened, also one that no table knows."""

import inspect

import pytest
import torch
import torch.utils._pytree as pytree
import transformers.cache_utils as cache_utils
from transformers import DynamicCache

from yobx_flatten import register_flattening_functions

# what a class is made with
SIZES = {
    "max_cache_len": (6, 12),
    "sliding_window": (8,),
    "config": (),
    "number_of_states": (1, 2),
    "conv_kernel_size": (4,),
    "layer_idx": (0,),
}


def layer_classes():
    """All classes of layers that the installed release defines for keys, values and states."""
    bases = [getattr(cache_utils, name, None) for name in ("CacheLayerMixin", "LinearAttentionCacheLayerMixin")]
    left, found = [base for base in bases if base is not None], []
    while left:
        for cls in left.pop().__subclasses__():
            if cls.__module__ == "transformers.cache_utils" and cls not in found:
                found.append(cls)
                left.append(cls)
    # those with more to set up are made by their libraries, and 4.57 has an older name for one class, that warns
    renamed = {"SlidingWindowLayer"} if hasattr(cache_utils, "StaticSlidingWindowLayer") else set()
    return [
        cls
        for cls in found
        if not inspect.isabstract(cls) and "Quantized" not in cls.__name__ and cls.__name__ not in renamed
    ]


def made(cls):
    """Layers of a class in every combination of sizes."""
    takes = inspect.signature(cls.__init__).parameters.values()
    options = [{}]
    for one in takes:
        if SIZES.get(one.name):
            options = [{**chosen, one.name: size} for chosen in options for size in SIZES[one.name]]
    for chosen in options:
        try:
            yield cls(**chosen)
        except TypeError:  # a base that others complete
            return


def filled(layer, tokens):
    """The layer after so many tokens, as a model fills it."""
    if hasattr(layer, "update") and tokens:
        for place in range(tokens):
            at = {"cache_position": torch.tensor([place])}  # 4.56 asks for it
            layer.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4), cache_kwargs=at)
    if hasattr(layer, "update_recurrent_state") and tokens:
        layer.update_recurrent_state(torch.randn(1, 2, 3))
    return layer


def facts(layer):
    """Every attribute, and every public property of the class, by name."""
    found = dict(vars(layer))
    for name in dir(type(layer)):
        if not name.startswith("_") and isinstance(inspect.getattr_static(type(layer), name), (property, bool, int)):
            found[name] = getattr(layer, name)
    return found


def difference(before, after):
    """The names of which two layers differ."""
    unlike = before.keys() ^ after.keys()
    return unlike | {name for name in before.keys() & after.keys() if not same(before[name], after[name])}


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and not difference(one, other)
    return type(one) is type(other) and one == other


def rebuilt(layers):
    """The layers after a round trip, and after another in which they are read and built as before."""
    for _ in range(2):
        cache = DynamicCache()
        cache.layers = layers
        cache = pytree.tree_unflatten(*pytree.tree_flatten(cache))
        layers = cache.layers
        yield layers


@pytest.mark.parametrize("cls", layer_classes(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("tokens", [0, 1, 5, 10])
def test_every_attribute_and_property_comes_back(cls, tokens):
    """Empty, filled, and past the window, with room for less and for more than the window."""
    count = 0
    with register_flattening_functions(patch_transformers=True):
        for layer in made(cls):
            if hasattr(layer, "max_cache_len") and tokens > layer.max_cache_len and "Sliding" not in cls.__name__:
                continue
            try:
                layer = filled(layer, tokens)
            except (TypeError, NotImplementedError):  # indexed layers are filled with more than keys and values
                layer = next(one for one in made(cls))
            before = facts(layer)
            for (after,) in rebuilt([layer]):
                assert type(after) is cls
                assert not difference(before, facts(after)), cls
            count += 1
    assert count or tokens > 6


@pytest.mark.parametrize("cls", ["DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_an_attribute_of_tomorrow_comes_back(cls, tokens):
    """One that no table knows is stored with the others; layers without it are read as before."""
    cls = getattr(cache_utils, cls)
    with register_flattening_functions(patch_transformers=True):
        plain = filled(next(made(cls)), tokens)
        list(rebuilt([plain]))
        layer = filled(next(made(cls)), tokens)
        layer.rolls_back = True
        before = facts(layer)
        for (after,) in rebuilt([layer]):
            assert after.rolls_back is True
            assert not difference(before, facts(after))
        _, spec = pytree.tree_flatten(cache_of_layers([plain]))
        assert spec != pytree.tree_flatten(cache_of_layers([layer]))[1]


def cache_of_layers(layers):
    """A cache of these layers."""
    cache = DynamicCache()
    cache.layers = layers
    return cache


def test_room_and_window_decide_whether_a_layer_can_go_back():
    """`is_croppable` is what transformers states, for room below the window, as large, and above."""
    if not hasattr(getattr(cache_utils, "StaticSlidingWindowLayer", None), "is_croppable"):
        pytest.skip("before transformers 5.17 layers do not state it")
    with register_flattening_functions(patch_transformers=True):
        for room in (4, 8, 20):
            layer = cache_utils.StaticSlidingWindowLayer(max_cache_len=room, sliding_window=8)
            want = layer.is_croppable
            layer.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))
            for (after,) in rebuilt([layer]):
                assert after.is_croppable == want
