"""Caches that are made of tensors, and the words of transformers for a model's cache."""

import copy
import functools

import onnx
import peft
import pytest
import torch
import transformers
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.cache_words import WORD
from tests.models import WINDOW, continued_alike, go_on, make_model, start
from yobx_flatten import (
    Case,
    DecodeSizes,
    GenerationError,
    OnnxGenerator,
    decode_inputs,
    dynamic_shapes,
    export_onnx,
    load_case,
    register_flattening_functions,
    replay_case,
    save_case,
)
from yobx_flatten.errors import CacheStructureError
from yobx_flatten.huggingface.builders import make_dynamic_cache, make_encoder_decoder_cache, make_static_cache
from yobx_flatten.huggingface.cache_names import CACHE, argument_of, cache_of, forward_of, name_in, named_for
from yobx_flatten.runners.ports import KEPT_SCORES

STATIC_SLIDING = (
    "StaticSlidingWindowLayer" if hasattr(cache_utils, "StaticSlidingWindowLayer") else "SlidingWindowLayer"
)


def pairs(count=2, length=3):
    return [(torch.randn(2, 2, length, 4), torch.randn(2, 2, length, 4)) for _ in range(count)]


# -- dynamic


def in_turn(given):
    return [tensor for pair in given for tensor in pair]


@pytest.mark.parametrize("form", [list, iter, in_turn])
def test_the_tensors_are_held_as_they_are(form):
    given = pairs()
    cache = make_dynamic_cache(form(given))
    assert type(cache) is DynamicCache
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 2
    for layer, (keys, values) in zip(cache.layers, given, strict=True):
        assert layer.keys is keys
        assert layer.values is values


def test_no_pairs_make_an_empty_cache_that_grows():
    cache = make_dynamic_cache([])
    assert cache.layers == []
    cache.update(*pairs(1)[0], 0)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize(
    "classes",
    ["DynamicSlidingWindowLayer", cache_utils.DynamicSlidingWindowLayer, ["DynamicSlidingWindowLayer"] * 2],
    ids=["name", "class", "one per layer"],
)
@pytest.mark.parametrize("options", [{"sliding_window": 8}, [{"sliding_window": 8}] * 2], ids=["one", "each"])
def test_classes_and_options_are_for_all_layers_or_for_each(classes, options):
    cache = make_dynamic_cache(pairs(), classes, options)
    assert [layer.sliding_window for layer in cache.layers] == [8, 8]


def test_sliding_layers_have_seen_what_the_full_layer_holds():
    """Their own tensors do not tell, once the window is full."""
    given = [pairs(1, 7)[0], pairs(1, 12)[0]]
    cache = make_dynamic_cache(given, ["DynamicSlidingWindowLayer", "DynamicLayer"], [{"sliding_window": 8}, {}])
    assert cache.layers[0].cumulative_length == 12


def test_sliding_layers_alone_have_seen_what_they_hold():
    cache = make_dynamic_cache(pairs(), "DynamicSlidingWindowLayer", {"sliding_window": 8})
    assert [layer.cumulative_length for layer in cache.layers] == [3, 3]


@pytest.mark.parametrize("past", [WINDOW - 3, WINDOW + 4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_a_cache_made_of_a_models_tensors_goes_on_as_the_models(name, past):
    started = start(name, past=past)
    layers = started.cache.layers
    made = make_dynamic_cache(
        [(layer.keys, layer.values) for layer in layers],
        [type(layer) for layer in layers],
        [{"sliding_window": WINDOW} if type(layer) is not DynamicLayer else {} for layer in layers],
    )
    assert continued_alike(started, made)


# -- static


def test_static_keys_of_full_length_are_held_as_they_are():
    """Then writing into the cache writes into them, as static caches do."""
    given = pairs(1, 16)
    cache = make_static_cache(given, length=3)
    assert type(cache) is StaticCache
    assert cache.layers[0].keys is given[0][0]
    assert int(getattr(cache.layers[0], "cumulative_length", 3)) == 3
    assert cache.layers[0].max_cache_len == 16


def test_shorter_static_keys_are_followed_by_zeros():
    given = pairs(1, 3)
    keys = make_static_cache(given, 5).layers[0].keys
    assert keys.shape == (2, 2, 5, 4)
    assert torch.equal(keys[:, :, :3], given[0][0])
    assert torch.equal(keys[:, :, 3:], torch.zeros(2, 2, 2, 4))


@pytest.mark.parametrize("past", [WINDOW - 3, WINDOW + 4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral"])
def test_a_static_cache_made_of_a_models_tensors_goes_on_as_the_models(name, past):
    started = start(name, past=past, static=True)
    layers = copy.deepcopy(started.cache).layers
    made = make_static_cache(
        [(layer.keys, layer.values) for layer in layers],
        32,
        [type(layer) for layer in layers],
        [{} if type(layer) is cache_utils.StaticLayer else {"sliding_window": WINDOW} for layer in layers],
        length=past,
    )
    for layer in made.layers:
        own = vars(layer).keys() - {"is_initialized"}
        assert own == vars(layers[made.layers.index(layer)]).keys() - {"is_initialized"}
    assert continued_alike(started, made)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_static_cache_may_be_made_of_a_dynamic_ones_keys(name):
    past = WINDOW - 3
    started, static = start(name, past=past), start(name, past=past, static=True)
    made = make_static_cache(
        [(layer.keys, layer.values) for layer in started.cache.layers],
        32,
        [type(layer) for layer in static.cache.layers],
        [{} if type(layer) is cache_utils.StaticLayer else {"sliding_window": WINDOW} for layer in static.cache.layers],
    )
    for a, b in zip(go_on(static, made, steps=4), go_on(static, steps=4), strict=True):
        torch.testing.assert_close(a, b)


# -- encoder and decoder


def test_an_encoder_decoder_cache_knows_which_layers_are_filled():
    own, cross = make_dynamic_cache(pairs()), make_dynamic_cache(pairs(2, 6))
    cache = make_encoder_decoder_cache(own, cross)
    assert type(cache) is EncoderDecoderCache
    assert cache.self_attention_cache is own
    assert cache.cross_attention_cache is cross
    assert cache.is_updated == {0: True, 1: True}
    assert make_encoder_decoder_cache(own, DynamicCache()).is_updated == {}


def test_a_window_that_is_not_given_is_as_long_as_the_keys():
    cache = make_dynamic_cache(
        [(torch.zeros(1, 2, length, 4),) * 2 for length in (3, 5, 3)],
        "DynamicSlidingWindowLayer",
        [{}, {}, {"sliding_window": 9}],
    )
    assert [layer.sliding_window for layer in cache.layers] == [3, 5, 9]


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["two dimensions", "three dimensions"])
@pytest.mark.parametrize("cls", ["DynamicLayer", "DynamicSlidingWindowLayer"])
def test_placeholders_of_fewer_dimensions_come_apart_and_together(shape, cls):
    """Examples of registrations and of storage use them; the axis before the last is the length."""
    given = [(torch.rand(shape), torch.rand(shape)) for _ in range(2)]
    with register_flattening_functions(patch_transformers=True):
        cache = make_dynamic_cache(given, cls)
        assert cache.get_seq_length() == 3
        leaves, spec = tree_flatten(cache)
        rebuilt = tree_unflatten(leaves, spec)
    held = [tensor for layer in rebuilt.layers for tensor in (layer.keys, layer.values)]
    assert all(a is b for a, b in zip(held, (x for pair in given for x in pair), strict=True))


# -- bad input


@pytest.mark.parametrize("make", [make_dynamic_cache, make_static_cache])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([torch.zeros(1, 2, 3, 4)] * 3, r"flat list of 3 tensors; give keys and values in turn"),
        ([(torch.zeros(1, 2, 3, 4),)], r"key_value_pairs\[0\] must be a pair .* found \[\(1, 2, 3, 4\)\]"),
        ([(torch.zeros(1, 2, 3, 4),) * 2, (torch.zeros(3),) * 2], r"key_value_pairs\[1\] .* \[\(3,\), \(3,\)\]"),
        ([(torch.zeros(1, 2, 3, 4), None)], r"key_value_pairs\[0\] .*None"),
    ],
    ids=["odd", "single", "one dimension", "none"],
)
def test_what_is_no_pair_is_named(make, given, message):
    with pytest.raises(CacheStructureError, match=message):
        make(given)


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (make_dynamic_cache, (pairs(), ["DynamicLayer"]), "cls_layers has 1 entries for 2 layers; give one per layer"),
        (make_dynamic_cache, (pairs(), "DynamicLayer", [{}, {}, {}]), "cls_kwargs has 3 entries for 2 layers"),
        (make_dynamic_cache, (pairs(), "StaticLayer"), r"cls_layers: .* is not one of \['DynamicLayer', "),
        (make_dynamic_cache, (pairs(), cache_utils.StaticLayer), r"cls_layers: .* is not one of \['DynamicLayer', "),
        (make_dynamic_cache, (pairs(), "Nonsense"), r"cls_layers: .* is not one of \['DynamicLayer', "),
        (make_dynamic_cache, (pairs(), int), r"cls_layers: .* is not one of \['DynamicLayer', "),
        (make_dynamic_cache, (pairs(1, 0), "DynamicSlidingWindowLayer"), r"layer takes \{'sliding_window': 8\}"),
        (make_static_cache, ([(torch.zeros(2, 3, 4),) * 2],), r"\[0\] must be a pair .* \[\(2, 3, 4\), \(2, 3, 4\)\]"),
        (make_static_cache, ([],), "key_value_pairs is empty"),
        (make_static_cache, (pairs(1, 5), 4), "hold 5 tokens, but the layer has room for 4"),
        (
            make_static_cache,
            (pairs(1, 5), 16, STATIC_SLIDING, {"sliding_window": 4}),
            "hold 5 tokens, but the layer has room for 4",
        ),
        (functools.partial(make_static_cache, length=-1), (pairs(1, 16),), "length"),
        (functools.partial(make_static_cache, length=17), (pairs(1, 16),), "length"),
    ],
)
def test_what_does_not_fit_is_refused(make, given, message):
    with pytest.raises(CacheStructureError, match=message):
        make(*given)


def test_a_subclass_stays_the_class_it_is():
    own = type("DynamicLayer", (DynamicLayer,), {})
    assert {type(layer) for layer in make_dynamic_cache(pairs(), own).layers} == {own}


WORDS = ("cache", "past_key_values", "cache_params")


def of(word, annotation=None):
    scope = {"Cache": DynamicCache, "Tensor": torch.Tensor}
    exec(f"def forward(self, input_ids, {word}{f': {annotation}' if annotation else ''} = None): ...", scope)
    return scope["forward"]


@pytest.mark.parametrize("word", WORDS)
def test_every_word_is_read_off_a_signature(word):
    assert argument_of(of(word)) == word
    assert argument_of(of(word, "Cache")) == word
    assert argument_of(of(word, "tuple[tuple[Tensor]] | None")) == word  # what RoBERTa's forward still states


@pytest.mark.parametrize("name", ["RobertaForCausalLM", "XmodForCausalLM", "ErnieForCausalLM", "BertGenerationDecoder"])
def test_forwards_that_state_tuples_of_tensors_take_a_cache(name):
    assert argument_of(getattr(transformers, name).forward) == WORD


def test_a_word_of_tomorrow_is_found_by_its_type():
    assert argument_of(of("states", "Cache | None")) == "states"
    assert argument_of(of("cache", "Tensor")) is None
    assert argument_of(of("cache", "dict[str, Tensor]")) is None
    assert argument_of(of("states", "list[Tensor]")) is None
    assert argument_of(of("features")) is None


def test_a_usual_word_counts_by_its_value():
    assert name_in({"cache": DynamicCache()}) == "cache"
    assert name_in({"cache": [{"key": torch.zeros(1), "value": torch.zeros(1)}]}) == "cache"
    assert name_in({"cache": torch.zeros(1)}) is None
    assert name_in({"cache": {"features": torch.zeros(1)}}) is None
    assert name_in({"cache": None}) == "cache"


def test_an_output_answers_by_its_own_entry():
    cache = DynamicCache()
    output = BaseModelOutputWithPast(last_hidden_state=torch.zeros(1), **{WORD: cache})
    assert cache_of(output) is cache
    assert name_in(output) == WORD
    assert cache_of((1, 2)) is None


def test_an_adapter_s_model_is_asked_for_the_forward_inside():
    """PEFT's models take `*args` and `**kwargs`."""
    model = peft.get_peft_model(make_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert argument_of(forward_of(model)) == WORD


@pytest.mark.parametrize("word", WORDS[:2])
def test_arguments_of_another_release_are_renamed(word):
    given = {"input_ids": 1, word: DynamicCache(), "use_cache": True}
    for own in WORDS:
        assert list(named_for(of(own), given)) == ["input_ids", own, "use_cache"]
    assert named_for(of("features"), given) == given


@pytest.fixture(scope="module")
def llama():
    model = make_model("llama")
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def other_word(inputs):
    word = next(word for word in WORDS[:2] if word != WORD)
    return {word if name == WORD else name: value for name, value in inputs.items()}


@pytest.mark.slow
def test_files_have_one_word_and_take_every_word(llama, tmp_path):
    inputs = other_word(decode_inputs(llama, DecodeSizes()))
    case = Case("another word", kwargs=other_word(decode_inputs(llama, DecodeSizes(batch=3, past=9, new=2))), steps=2)
    path = tmp_path / "model.onnx"
    done = export_onnx(llama, (), inputs, path=path, dynamic_shapes=dynamic_shapes(inputs), cases=[case])
    assert done.report.ok
    caches = [name for name in done.report.input_names if name not in ("input_ids", "attention_mask")]
    assert caches == [f"{CACHE}.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    prompt = torch.tensor([[5, 6, 7, 8]])
    want = llama.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(OnnxGenerator(path).generate(prompt, max_new_tokens=6), want)
    # a case that was stored under another word
    given = decode_inputs(llama, DecodeSizes(batch=1, past=4, new=1))
    with torch.no_grad():
        outputs = llama(**copy.deepcopy(given))
    save_case(tmp_path / "case.onnx", other_word(given), outputs)
    assert replay_case(load_case(tmp_path / "case.onnx"), path).ok


@pytest.mark.slow
def test_a_program_is_called_under_every_word(llama, tmp_path):
    inputs = decode_inputs(llama, DecodeSizes())
    other = decode_inputs(llama, DecodeSizes(batch=3, past=9, new=2))
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        want = llama(**copy.deepcopy(other)).logits
        # torch's own call with a word of another release
        shapes = dynamic_shapes(other_word(inputs))
        program = torch.export.export(llama, (), other_word(inputs), dynamic_shapes=shapes)
        torch.export.save(program, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2")
        for one in (program, loaded):
            for given in (other, other_word(other)):
                torch.testing.assert_close(one.module()(**copy.deepcopy(given)).logits, want, atol=1e-5, rtol=0)


class Forgets(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, past_key_values):
        kwargs = {"input_ids": input_ids, "attention_mask": attention_mask, WORD: past_key_values}
        return {"logits": self.model(**kwargs).logits}


@pytest.mark.parametrize("proof", ["full", "none"])
def test_a_cache_that_is_not_returned_comes_out_of_the_file(llama, tmp_path, proof):
    """The model extends it, so the next call needs it; without a next call, the file leaves it out.

    Such a file has no input for the scores of the last token either, which is for generating.
    """
    inputs = {CACHE if name == WORD else name: value for name, value in decode_inputs(llama, DecodeSizes()).items()}
    report = export_onnx(Forgets(llama), (), inputs, path=tmp_path / "model.onnx", proof=proof).report
    assert report.output_names[:2] == ["logits", "present.0.key"]
    (note,) = [remark for remark in report.remarks if "loop=False" in remark]
    assert note.startswith(f"forward extends {CACHE} but does not return the result")
    report = export_onnx(Forgets(llama), (), inputs, path=tmp_path / "score.onnx", proof=proof, loop=False).report
    assert report.output_names == ["logits"]
    taken = {
        name: [value.name for value in onnx.load(tmp_path / name).graph.input] for name in ("model.onnx", "score.onnx")
    }
    assert KEPT_SCORES in taken["model.onnx"]
    assert KEPT_SCORES not in taken["score.onnx"]


@pytest.mark.slow
def test_cache_outputs_of_other_names_are_refused_when_a_file_is_opened(llama, tmp_path):
    export_onnx(llama, (), decode_inputs(llama, DecodeSizes()), path=tmp_path / "model.onnx", proof="none")
    model = onnx.load(tmp_path / "model.onnx")
    for node in model.graph.node:
        node.output[:] = [name.replace("present.", "kept.") for name in node.output]
        node.input[:] = [name.replace("present.", "kept.") for name in node.input]
    for value in model.graph.output:
        value.name = value.name.replace("present.", "kept.")
    onnx.save(model, tmp_path / "kept.onnx")
    with pytest.raises(GenerationError, match=r"kept\.onnx takes past_key_values\.0\.key and does not return present"):
        OnnxGenerator(tmp_path / "kept.onnx")
    given = decode_inputs(llama, DecodeSizes(batch=1, past=4, new=1))
    with torch.no_grad():
        outputs = llama(**copy.deepcopy(given))
    save_case(tmp_path / "case.onnx", given, outputs)
    with pytest.raises(GenerationError, match="does not return present"):
        replay_case(load_case(tmp_path / "case.onnx"), tmp_path / "kept.onnx")
