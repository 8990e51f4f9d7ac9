"""The documents' code runs as it stands there, and prints what they print."""

import importlib.util

import pytest

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


CLASS_EXAMPLE = """
import dataclasses
from typing import Any, List, Tuple
import torch
from yobx_flatten import (
    register_class_flattening,
    unregister_class_flattening,
)


# A minimal dict-like container.
class MyOutput(dict):
    \"\"\"Simple dict subclass that can hold named tensors.\"\"\"


def flatten_my_output(obj):
    keys = list(obj.keys())
    return [obj[k] for k in keys], keys


def flatten_with_keys_my_output(obj):
    keys = list(obj.keys())
    values = [obj[k] for k in keys]
    return [(torch.utils._pytree.MappingKey(k), v) for k, v in zip(keys, values)], keys


def unflatten_my_output(values, context, output_type=None):
    return MyOutput(zip(context, values))


register_class_flattening(
    MyOutput,
    flatten_my_output,
    unflatten_my_output,
    flatten_with_keys_my_output,
)

# Flatten and unflatten a MyOutput object.
obj = MyOutput(a=torch.tensor([1.0, 2.0]), b=torch.tensor([3.0]))
flat, spec = torch.utils._pytree.tree_flatten(obj)
print("flat tensors:", [t.tolist() for t in flat])

restored = torch.utils._pytree.tree_unflatten(flat, spec)
print("restored keys:", list(restored.keys()))

# Clean up so that subsequent runs of the docs are not affected.
unregister_class_flattening(MyOutput)
"""


GENERATED_EXAMPLE = """
import torch
from yobx_flatten import (
    make_flattening_function_for_dataclass,
    register_class_flattening,
    unregister_class_flattening,
)


class HiddenState(dict):
    \"\"\"Dict-like container for a transformer hidden state.\"\"\"


flatten_fn, flatten_with_keys_fn, unflatten_fn = make_flattening_function_for_dataclass(
    HiddenState, set()
)

print("generated function names:")
print(" ", flatten_fn.__name__)
print(" ", flatten_with_keys_fn.__name__)
print(" ", unflatten_fn.__name__)

register_class_flattening(HiddenState, flatten_fn, unflatten_fn, flatten_with_keys_fn)

obj = HiddenState(last_hidden_state=torch.zeros(2, 3))
flat, spec = torch.utils._pytree.tree_flatten(obj)
print("flat:", [t.shape for t in flat])

unregister_class_flattening(HiddenState)
"""


LAYERS_EXAMPLE = """
import torch
import transformers
from yobx_flatten.trees.describe import string_type
from yobx_flatten.huggingface.builders import make_dynamic_cache
from yobx_flatten.huggingface.caches.functions import (
    flatten_dynamic_cache,
    unflatten_dynamic_cache,
)

# DynamicSlidingWindowLayer was added in transformers >= 4.50.
if not hasattr(transformers.cache_utils, "DynamicSlidingWindowLayer"):
    print("DynamicSlidingWindowLayer not available, skipping example.")
else:
    bsize, nheads, slen, dim = 2, 4, 3, 7
    sliding_window = slen  # sliding_window must be >= the sequence length

    # Build a DynamicCache with two different layer types.
    cache = make_dynamic_cache(
        [
            (
                torch.randn(bsize, nheads, slen, dim),
                torch.randn(bsize, nheads, slen, dim),
            ),
            (
                torch.randn(bsize, nheads, slen, dim),
                torch.randn(bsize, nheads, slen, dim),
            ),
        ],
        cls_layers=[
            transformers.cache_utils.DynamicLayer,
            transformers.cache_utils.DynamicSlidingWindowLayer,
        ],
        cls_kwargs=[{}, {"sliding_window": sliding_window}],
    )
    print("cache:", string_type(cache, with_shape=True))

    # Flatten (serialize) the cache — the context encodes each layer's type.
    flat, context = flatten_dynamic_cache(cache)
    print("context keys:", context)

    # Unflatten (deserialize) the cache — layer types are restored from the context.
    rebuilt = unflatten_dynamic_cache(flat, context)
    print("layer types:", [type(layer).__name__ for layer in rebuilt.layers])
    print("sliding_window:", rebuilt.layers[1].sliding_window)
"""


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        pytest.param(
            CLASS_EXAMPLE,
            "flat tensors: [[1.0, 2.0], [3.0]]\nrestored keys: ['a', 'b']\n",
            id="register_class_flattening",
        ),
        pytest.param(
            GENERATED_EXAMPLE,
            "generated function names:\n"
            "  flatten_hidden_state\n"
            "  flatten_with_keys_hidden_state\n"
            "  unflatten_hidden_state\n"
            "flat: [torch.Size([2, 3])]\n",
            id="make_flattening_function_for_dataclass",
        ),
        pytest.param(
            LAYERS_EXAMPLE,
            "cache: DynamicCache(DynamicLayer(T1s2x4x3x7, T1s2x4x3x7), "
            "DynamicSlidingWindowLayer(T1s2x4x3x7, T1s2x4x3x7))\n"
            "context keys: ['key_D_0', 'value_D_0', 'key_W3_1', 'value_W3_1']\n"
            "layer types: ['DynamicLayer', 'DynamicSlidingWindowLayer']\n"
            "sliding_window: 3\n",
            id="layers of a DynamicCache",
            marks=needs_transformers,
        ),
    ],
)
def test_an_example_of_the_documents_prints_what_they_print(example, printed, capsys):
    exec(compile(example, "<document>", "exec"), {"__name__": "document"})
    assert capsys.readouterr().out == printed
