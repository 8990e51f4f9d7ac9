"""Flatten and unflatten make no tensor and copy none."""

from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import cache_utils
from transformers.cache_utils import EncoderDecoderCache

from tests.flatten.huggingface.caches.cache_cases import real_caches, same_leaves
from tests.models import start


class Operations(TorchDispatchMode):
    """Records every operation on tensors, making one included."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Records every torch function, except the questions what a tensor is."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") not in {"__get__", "dim"}:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@real_caches
def test_flatten_and_unflatten_make_no_tensor(block, monkeypatch, name, static, past):
    """A tensor made there becomes a constant of an exported program; `update` copies all there is."""
    cache = start(name, static=static, past=past).cache
    pytree.tree_flatten(cache)  # a class is read once, its `update` too
    owners = [cache_utils.Cache, EncoderDecoderCache]
    owners += {type(layer) for layer in getattr(cache, "layers", ())}
    for owner in owners:
        if "update" in vars(owner):
            monkeypatch.setattr(owner, "update", None)
    with Operations() as operations, Calls() as calls:
        leaves, spec = pytree.tree_flatten(cache)
        keyed, _ = pytree.tree_flatten_with_path(cache)
        rebuilt = pytree.tree_unflatten(leaves, spec)
        again, _ = pytree.tree_flatten(rebuilt)
    # a cache that ends in its length: one number is written at each flattening, of which torch does two for paths
    counted = isinstance(spec.context, list) and spec.context[-1] == "length"
    allowed = {"aten.full.default", "aten._local_scalar_dense.default"} if counted else set()
    assert set(operations.found) <= allowed
    assert operations.found.count("aten.full.default") == 4 * counted
    assert counted or not calls.found
    assert same_leaves(again, leaves)
    assert same_leaves([leaf for _, leaf in keyed], leaves)
