"""Inputs and cases that are made for a model: all that a next call takes; zeros as the state before the first token."""

import gc
import sys
import types
from types import SimpleNamespace

import pytest
import torch
import torch.utils._pytree as pytree
import transformers
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from tests.cache_words import WORD, cache_of
from tests.flatten.huggingface.tracing.one_graph import small_model
from yobx_flatten import DecodeSizes, ReplayError, decode_inputs, export_program, register_flattening_functions
from yobx_flatten.huggingface.builders import make_dynamic_cache
from yobx_flatten.huggingface.cache_names import argument_of
from yobx_flatten.huggingface.cases import contiguous, next_inputs
from yobx_flatten.huggingface.decoders import StateDecoder
from yobx_flatten.huggingface.outputs import ModelClasses
from yobx_flatten.model_folder.pieces.text import decoder_pieces
from yobx_flatten.model_folder.source.configuration import small_model as small_model_of_type
from yobx_flatten.trees.walk import leaf_names


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


several_tokens_after_a_state = pytest.mark.skipif(
    not hasattr(Cache, "get_recurrent_state"), reason="before 5.23 several tokens after a state leave the mask out"
)


def zeros_before_the_first_token(cache, rows):
    names = leaf_names({WORD: cache})
    leaves, spec = pytree.tree_flatten(cache)
    parts = ["states" if "_states" in name else name.rpartition(".")[2] for name in names]
    sizes = [
        leaf.shape if part == "states" else (rows, leaf.shape[1], 0, leaf.shape[3])
        for leaf, part in zip(leaves, parts, strict=True)
    ]
    empty = [leaf.new_zeros(rows, *size[1:]) for leaf, size in zip(leaves, sizes, strict=True)]
    return pytree.tree_unflatten(empty, spec)


@several_tokens_after_a_state
@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "lfm2", "qwen3_next"])
def test_zeros_are_the_state_before_the_first_token(name):
    model = small_model_of_type(name)
    decoder = StateDecoder(model) if StateDecoder.fits(model) else model
    ids = torch.randint(3, 259, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :1] = 0, 0
    word = argument_of(decoder.forward)  # before 5.24 not that of models with attention
    like = dict.fromkeys(("input_ids", "attention_mask", word))
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        cache = zeros_before_the_first_token(decode_inputs(decoder, DecodeSizes(), like)[word], 3)
        found = decoder(input_ids=ids, attention_mask=mask, **{word: cache}, use_cache=True)
        wanted = model(input_ids=ids, attention_mask=mask, use_cache=True)
    torch.testing.assert_close(found["logits"][:, -1], wanted.logits[:, -1], atol=1e-4, rtol=1e-4)


@several_tokens_after_a_state
def test_a_model_without_attention_takes_what_other_decoders_take():
    model = small_model_of_type("mamba")
    (piece,) = decoder_pieces(model)
    assert list(piece.kwargs) == ["input_ids", "attention_mask", "cache"]
    ids = torch.randint(3, 259, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits[:, -1]
        read = piece.module(ids[:, :7], mask[:, :7])
        found = piece.module(ids[:, 7:], mask, cache_of(read))
    torch.testing.assert_close(found["logits"][:, -1], wanted, atol=1e-4, rtol=1e-4)


MODELS = "transformers.models.of_this_test"


def module_with_a_class(number):
    name = f"{MODELS}_{number}"
    module = types.ModuleType(name)
    module.Model = type("Model", (), {"__module__": name})
    return module


def test_models_may_be_imported_while_the_imported_ones_are_listed(monkeypatch):
    """Whenever memory is collected, another thread may run; here each collection imports a model."""
    made = []

    def import_one(phase, info):
        made.append(module_with_a_class(len(made)))
        sys.modules[made[-1].__name__] = made[-1]

    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    threshold = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(import_one)
    gc.set_threshold(20)
    try:
        listed = [ModelClasses(lambda cls: cls.__module__.startswith(MODELS))() for _ in range(5)]
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(import_one)
    assert len(made) > 5
    assert all(found == [module.Model for module in made[: len(found)]] for found in listed)


def test_a_model_that_was_imported_while_the_others_were_listed_is_found_next(monkeypatch):
    """It counts as new, although it was there when the list was finished."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    first, second = module_with_a_class(1), module_with_a_class(2)
    sys.modules[first.__name__] = first

    def fits(cls):
        sys.modules[second.__name__] = second
        return cls.__module__.startswith(MODELS)

    classes = ModelClasses(fits)
    assert classes() == [first.Model]
    assert classes() == [first.Model, second.Model]
