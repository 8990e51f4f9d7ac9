"""dynamo goes through the functions that take caches apart: `torch.compile` in one graph, and strict exports."""

import copy

import pytest
import torch
import torch.utils._pytree as pytree

from tests.flatten.huggingface.tracing.one_graph import small_model
from yobx_flatten import DecodeSizes, decode_inputs, dynamic_shapes, register_flattening_functions
from yobx_flatten.huggingface.builders import make_dynamic_cache

# dynamo goes through a cached function as if it were not cached, and says so; ours return the same again and again
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:While compiling, we found certain side effects:UserWarning"  # transformers' own, of the models
    ),
]

FULL, SLIDING = ("DynamicLayer", {}), ("DynamicSlidingWindowLayer", {"sliding_window": 8})


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="dynamo of torch 2.11 does not read the attributes of a layer")
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([FULL], id="one layer"),
        pytest.param([FULL] * 3, id="of one kind"),
        pytest.param([SLIDING] * 2, id="sliding"),
        pytest.param([FULL, SLIDING] * 2, id="in turn"),
        pytest.param([SLIDING, SLIDING, FULL, SLIDING, FULL], id="in no order"),
    ],
)
def test_compiled_code_takes_a_cache_apart_in_one_graph(layers):
    pairs = [(torch.full((1, 2, 3, 4), 1.0 + i), torch.full((1, 2, 3, 4), 10.0 + i)) for i in range(len(layers))]
    cache = make_dynamic_cache(pairs, *map(list, zip(*layers, strict=True)))

    @torch.compile(backend="eager", fullgraph=True)
    def double(cache):
        return pytree.tree_map(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, cache)

    with register_flattening_functions(patch_transformers=True):
        leaves, spec = pytree.tree_flatten(cache)  # the first time writes functions, which dynamo does not follow
        pytree.tree_unflatten(leaves, spec)
        found = double(cache)
    values = [(layer.keys.unique().tolist(), layer.values.unique().tolist()) for layer in found.layers]
    assert values == [([2.0 + 2 * i], [20.0 + 2 * i]) for i in range(len(layers))]
    assert [type(layer).__name__ for layer in found.layers] == [name for name, _ in layers]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="dynamo of torch 2.11 does not follow what rebuilds a cache")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("LlamaConfig", "LlamaForCausalLM"), id="llama", marks=pytest.mark.extended),
        pytest.param(("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}), id="mistral"),
    ],
)
def test_a_strict_export_serves_other_lengths(names):
    model = small_model(*names)
    example = decode_inputs(model, DecodeSizes())
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        program = torch.export.export(
            model,
            (),
            copy.deepcopy(example),
            dynamic_shapes=dynamic_shapes(example),
            strict=True,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        for sizes in (DecodeSizes(batch=3, past=4, new=2), DecodeSizes(batch=1, past=17, new=1, padding=3)):
            inputs = decode_inputs(model, sizes, seed=1)
            expected = model(**copy.deepcopy(inputs)).logits
            found = program.module()(**inputs).logits
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
