"""The next decode call goes on with what the last one returned."""

from types import SimpleNamespace

import pytest
import torch
import torch.utils._pytree as pytree
import transformers
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from tests.cache_words import WORD, cache_of
from tests.flatten.huggingface.tracing.one_graph import small_model
from yobx_flatten import DecodeSizes, ReplayError, decode_inputs, export_program, register_flattening_functions
from yobx_flatten.huggingface.builders import make_dynamic_cache
from yobx_flatten.huggingface.cases import contiguous, next_inputs


def caches(length):
    return make_dynamic_cache([(torch.randn(2, 2, length, 4), torch.randn(2, 2, length, 4))])


def test_every_cache_that_comes_out_goes_in_again():
    """A model that hears while it is spoken to returns two; a field that came out as ``None`` is not an input."""
    kwargs = {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "attention_mask": torch.ones(2, 8, dtype=torch.int64),
        "encoder_inputs_embeds": torch.ones(2, 3, 4),
        WORD: caches(5),
        "encoder_cache": caches(20),
        "padding_cache": DynamicCache(),
        "use_cache": True,
    }
    outputs = dict(
        logits=torch.zeros(2, 3, 7),
        **{WORD: caches(8)},
        encoder_cache=caches(32),
        padding_cache=None,
        encoder_inputs_embeds=torch.zeros(2, 3, 4),
    )
    following = next_inputs(kwargs, outputs)
    assert cache_of(following) is cache_of(outputs)
    assert following["encoder_cache"] is outputs["encoder_cache"]
    assert following["padding_cache"] is kwargs["padding_cache"]
    assert following["encoder_inputs_embeds"] is kwargs["encoder_inputs_embeds"]
    assert following["use_cache"] is True
    assert following["input_ids"].shape == (2, 3)
    assert following["attention_mask"].shape == (2, 11)


def test_a_call_without_a_cache_is_the_last():
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    assert next_inputs({"input_ids": tokens}, SimpleNamespace(logits=torch.zeros(1, 1, 7))) is None


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}), id="past the window"),
        pytest.param(("T5Config", "T5ForConditionalGeneration"), id="with an encoder"),
    ],
)
def test_the_inputs_of_a_decode_call_are_contiguous(options):
    """New tokens, positions and the keys of a sliding layer are not slices of something larger."""
    model = small_model(*options)
    names = ("input_ids", "attention_mask", "position_ids", WORD)
    inputs = decode_inputs(model, DecodeSizes(past=20), None if "T5" in options[0] else dict.fromkeys(names))
    with register_flattening_functions(patch_transformers=True):
        leaves = pytree.tree_leaves(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert len(tensors) >= 6
    assert all(tensor.is_contiguous() for tensor in tensors)


def test_what_is_made_contiguous_holds_the_same_values():
    sliced, whole = torch.arange(12).reshape(2, 6)[:, 2:], torch.ones(2)
    cache = make_dynamic_cache([(torch.randn(2, 2, 8, 4)[:, :, 3:], torch.randn(2, 2, 5, 4))])
    expected = cache.layers[0].keys.clone()
    output = BaseModelOutput(last_hidden_state=sliced, hidden_states=(sliced, whole))
    found = contiguous({"output": output, "cache": cache, "list": [sliced]})
    assert (found["output"], found["cache"]) == (output, cache)
    assert output.last_hidden_state.tolist() == sliced.tolist()
    assert output.last_hidden_state is output["last_hidden_state"] is output.hidden_states[0] is found["list"][0]
    assert output.last_hidden_state.is_contiguous()
    assert output.hidden_states[1] is whole
    assert torch.equal(cache.layers[0].keys, expected)
    assert cache.layers[0].keys.is_contiguous()


def test_a_model_that_is_ambiguous_without_token_types_says_so():
    """PaliGemma in eager mode gives two results without them; with them the program is right."""
    from yobx_flatten.model_folder.source.configuration import small_model

    model = small_model("paligemma")
    if getattr(model.config.text_config, "use_bidirectional_attention", None) is None:
        pytest.skip("attention that is not causal by itself came with a later transformers")
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[ids == model.config.image_token_id] = 5
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        dropped = model(**kwargs).logits
        model.set_attn_implementation("eager")
        kept = model(**kwargs).logits
        model.set_attn_implementation("sdpa")
    if (dropped - kept).abs().max() < 1e-3:
        pytest.skip("5.0 makes the same mask for both")
    with pytest.raises(ReplayError, match=r"PaliGemma\w+ was called without token_type_ids.*Pass token_type_ids"):
        export_program(model, (), kwargs, cases=[])
    assert export_program(model, (), {**kwargs, "token_type_ids": torch.zeros_like(ids)}, cases=[]).report.ok


@pytest.mark.parametrize("kind", ["Bert", "Electra"])
def test_cases_of_an_encoder_are_named_by_their_length(kind):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(vocab_size=40, **sizes)).eval()
    ids = torch.randint(0, 40, (2, 5))
    done = export_program(model, kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    names = {case.case for case in done.report.cases}
    assert {"batch 3, length 7", "batch 1, length 12", "batch 2, length 19, 3 padded"} <= names
    assert not any("past" in name for name in names)
    assert str(DecodeSizes(2, 17, 2, padding=3)) == "batch 2, past 17, new 2, 3 padded"
