"""Caches made of tensors, inputs and cases made for a model, and the words of transformers for a model's cache."""

import copy
import functools
import gc
import sys
import types
from types import SimpleNamespace

import onnx
import peft
import pytest
import torch
import torch.utils._pytree as pytree
import transformers
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

from tests.cache_words import WORD, cache_of
from tests.flatten.huggingface.tracing.one_graph import small_model
from tests.models import WINDOW, continued_alike, go_on, make_model, start
from tests.modules import module_of
from yobx_flatten import DecodeSizes, OnnxGenerator, decode_inputs, dynamic_shapes, load_case, replay_case, save_case
from yobx_flatten.declare import register_flattening_functions
from yobx_flatten.errors import CacheStructureError, GenerationError, ReplayError
from yobx_flatten.export import Case, export_onnx, export_program
from yobx_flatten.huggingface.builders import make_dynamic_cache, make_encoder_decoder_cache, make_static_cache
from yobx_flatten.huggingface.cache_names import CACHE, argument_of, forward_of, name_in, named_for
from yobx_flatten.huggingface.cases import contiguous, next_inputs
from yobx_flatten.huggingface.decoders import StateDecoder
from yobx_flatten.huggingface.outputs import ModelClasses
from yobx_flatten.model_folder.source.configuration import small_model as small_model_of_type
from yobx_flatten.runners.ports import KEPT_SCORES
from yobx_flatten.trees.walk import leaf_names


def pairs(count=2, length=3):
    return [(torch.randn(2, 2, length, 4), torch.randn(2, 2, length, 4)) for _ in range(count)]


def held(cache):
    """The pairs of a cache; lists of tensors are equal where the tensors are the same objects."""
    return [(layer.keys, layer.values) for layer in cache.layers]


SLIDING = "StaticSlidingWindowLayer" if hasattr(cache_utils, "StaticSlidingWindowLayer") else "SlidingWindowLayer"
WRONG = r"cls_layers: .* is not one of \['DynamicLayer', "


@pytest.mark.parametrize("form", [list, iter, lambda given: [tensor for pair in given for tensor in pair]])
def test_the_tensors_are_held_as_they_are(form):
    given = pairs()
    cache = make_dynamic_cache(form(given))
    assert type(cache) is DynamicCache
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 2
    assert held(cache) == given
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


def test_sliding_layers_have_seen_what_the_full_layer_holds_or_they_themselves():
    """Their own tensors do not tell, once the window is full. A window that is not given is as long as the keys."""
    given = [pairs(1, 7)[0], pairs(1, 12)[0]]
    cache = make_dynamic_cache(given, ["DynamicSlidingWindowLayer", "DynamicLayer"], [{"sliding_window": 8}, {}])
    assert cache.layers[0].cumulative_length == 12
    cache = make_dynamic_cache(pairs(), "DynamicSlidingWindowLayer", [{}, {"sliding_window": 9}])
    assert [(layer.cumulative_length, layer.sliding_window) for layer in cache.layers] == [(3, 3), (3, 9)]
    own = type("DynamicLayer", (DynamicLayer,), {})
    assert {type(layer) for layer in make_dynamic_cache(pairs(), own).layers} == {own}


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


def test_static_keys_of_full_length_are_held_as_they_are_and_shorter_ones_followed_by_zeros():
    """Then writing into the cache writes into them, as static caches do."""
    given = pairs(1, 16)
    cache = make_static_cache(given, length=3)
    assert type(cache) is StaticCache
    assert cache.layers[0].keys is given[0][0]
    assert int(getattr(cache.layers[0], "cumulative_length", 3)) == 3
    assert cache.layers[0].max_cache_len == 16
    given = pairs(1, 3)
    keys = make_static_cache(given, 5).layers[0].keys
    assert torch.equal(keys, torch.cat([given[0][0], torch.zeros(2, 2, 2, 4)], dim=2))


@pytest.mark.parametrize("past", [WINDOW - 3, WINDOW + 4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral"])
def test_a_static_cache_made_of_a_models_tensors_goes_on_as_the_models(name, past):
    started = start(name, past=past, static=True)
    layers = copy.deepcopy(started.cache).layers
    classes = [type(layer) for layer in layers]
    options = [{} if cls is cache_utils.StaticLayer else {"sliding_window": WINDOW} for cls in classes]
    made = make_static_cache([(layer.keys, layer.values) for layer in layers], 32, classes, options, length=past)
    for layer, original in zip(made.layers, layers, strict=True):
        assert vars(layer).keys() - {"is_initialized"} == vars(original).keys() - {"is_initialized"}
    assert continued_alike(started, made)
    if past < WINDOW:  # of the keys of a dynamic cache
        dynamic = start(name, past=past).cache.layers
        made = make_static_cache([(layer.keys, layer.values) for layer in dynamic], 32, classes, options)
        for a, b in zip(go_on(started, made, steps=4), go_on(started, steps=4), strict=True):
            torch.testing.assert_close(a, b)


def test_an_encoder_decoder_cache_knows_which_layers_are_filled():
    own, cross = make_dynamic_cache(pairs()), make_dynamic_cache(pairs(2, 6))
    cache = make_encoder_decoder_cache(own, cross)
    assert type(cache) is EncoderDecoderCache
    assert cache.self_attention_cache is own
    assert cache.cross_attention_cache is cross
    assert cache.is_updated == {0: True, 1: True}
    assert make_encoder_decoder_cache(own, DynamicCache()).is_updated == {}


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["two dimensions", "three dimensions"])
@pytest.mark.parametrize("cls", ["DynamicLayer", "DynamicSlidingWindowLayer"])
def test_placeholders_of_fewer_dimensions_come_apart_and_together(shape, cls):
    """Examples of registrations and of storage use them; the axis before the last is the length."""
    given = [(torch.rand(shape), torch.rand(shape)) for _ in range(2)]
    with register_flattening_functions(patch_transformers=True):
        cache = make_dynamic_cache(given, cls)
        assert cache.get_seq_length() == 3
        rebuilt = tree_unflatten(*tree_flatten(cache))
    assert held(rebuilt) == given


NO_PAIRS = [
    ([torch.zeros(1, 2, 3, 4)] * 3, r"flat list of 3 tensors; each layer needs two"),
    ([(torch.zeros(1, 2, 3, 4),)], r"key_value_pairs\[0\] must be a pair .* found \[\(1, 2, 3, 4\)\]"),
    ([(torch.zeros(1, 2, 3, 4),) * 2, (torch.zeros(3),) * 2], r"key_value_pairs\[1\] .* \[\(3,\), \(3,\)\]"),
    ([(torch.zeros(1, 2, 3, 4), None)], r"key_value_pairs\[0\] .*None"),
]


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        *((make, (given,), said) for make in (make_dynamic_cache, make_static_cache) for given, said in NO_PAIRS),
        (make_dynamic_cache, (pairs(), ["DynamicLayer"]), "cls_layers has 1 entries for 2 layers; give one per layer"),
        (make_dynamic_cache, (pairs(), "DynamicLayer", [{}, {}, {}]), "cls_kwargs has 3 entries for 2 layers"),
        *((make_dynamic_cache, (pairs(), cls), WRONG) for cls in ("StaticLayer", cache_utils.StaticLayer, "No", int)),
        (make_dynamic_cache, (pairs(1, 0), "DynamicSlidingWindowLayer"), r"layer takes \{'sliding_window': 8\}"),
        (make_static_cache, ([(torch.zeros(2, 3, 4),) * 2],), r"\[0\] must be a pair .* \[\(2, 3, 4\), \(2, 3, 4\)\]"),
        (make_static_cache, ([],), "key_value_pairs is empty"),
        (make_static_cache, (pairs(1, 5), 4), "hold 5 tokens, but the layer has room for 4"),
        (make_static_cache, (pairs(1, 5), 16, SLIDING, {"sliding_window": 4}), "hold 5 tokens, but .* room for 4"),
        (functools.partial(make_static_cache, length=-1), (pairs(1, 16),), "length"),
        (functools.partial(make_static_cache, length=17), (pairs(1, 16),), "length"),
    ],
)
def test_what_is_no_pair_or_does_not_fit_is_refused(make, given, message):
    with pytest.raises(CacheStructureError, match=message):
        make(*given)


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
    assert argument_of(transformers.RobertaForCausalLM.forward) == WORD


def test_a_word_of_tomorrow_is_found_by_its_type_and_the_forward_of_an_adapter_inside():
    assert argument_of(of("states", "Cache | None")) == "states"
    assert argument_of(of("cache", "Tensor")) is None
    assert argument_of(of("cache", "dict[str, Tensor]")) is None
    assert argument_of(of("states", "list[Tensor]")) is None
    assert argument_of(of("features")) is None
    # models of PEFT take `*args` and `**kwargs`: the forward inside is asked
    model = peft.get_peft_model(copy.deepcopy(make_model("llama")), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert argument_of(forward_of(model)) == WORD


def test_a_usual_word_counts_by_its_value_and_an_output_answers_by_its_own_entry():
    assert name_in({"cache": DynamicCache()}) == "cache"
    assert name_in({"cache": [{"key": torch.zeros(1), "value": torch.zeros(1)}]}) == "cache"
    assert name_in({"cache": torch.zeros(1)}) is None
    assert name_in({"cache": {"features": torch.zeros(1)}}) is None
    assert name_in({"cache": None}) == "cache"
    cache = DynamicCache()
    output = BaseModelOutputWithPast(last_hidden_state=torch.zeros(1), **{WORD: cache})
    assert (cache_of(output), name_in(output), cache_of((1, 2))) == (cache, WORD, None)


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


@pytest.mark.parametrize("proof", ["full", "none"])
def test_a_cache_that_is_not_returned_comes_out_of_the_file(llama, tmp_path, proof):
    """The next call needs it; without a next call, the file leaves it out, and the input for the last scores."""

    def forward(self, input_ids, attention_mask, past_key_values):
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, **{WORD: past_key_values})
        return {"logits": found.logits}

    forgets = module_of(forward, model=llama)
    inputs = {CACHE if name == WORD else name: value for name, value in decode_inputs(llama, DecodeSizes()).items()}
    report = export_onnx(forgets, (), inputs, path=tmp_path / "model.onnx", proof=proof).report
    assert report.output_names[:2] == ["logits", "present.0.key"]
    (note,) = [remark for remark in report.remarks if "loop=False" in remark]
    assert note.startswith(f"forward extends {CACHE} but does not return the result")
    report = export_onnx(forgets, (), inputs, path=tmp_path / "score.onnx", proof=proof, loop=False).report
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


def test_every_cache_that_comes_out_goes_in_again():
    """A model that hears while it is spoken to returns two; a field that came out as ``None`` is not an input."""
    kwargs = {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "attention_mask": torch.ones(2, 8, dtype=torch.int64),
        "encoder_inputs_embeds": torch.ones(2, 3, 4),
        WORD: make_dynamic_cache(pairs(1, 5)),
        "encoder_cache": make_dynamic_cache(pairs(1, 20)),
        "padding_cache": DynamicCache(),
        "use_cache": True,
    }
    own, other = make_dynamic_cache(pairs(1, 8)), make_dynamic_cache(pairs(1, 32))
    outputs = {"logits": torch.zeros(2, 3, 7), WORD: own, "encoder_cache": other, "padding_cache": None}
    following = next_inputs(kwargs, outputs | {"encoder_inputs_embeds": torch.zeros(2, 3, 4)})
    assert cache_of(following) is cache_of(outputs)
    assert following["encoder_cache"] is outputs["encoder_cache"]
    assert following["padding_cache"] is kwargs["padding_cache"]
    assert following["encoder_inputs_embeds"] is kwargs["encoder_inputs_embeds"]
    assert following["use_cache"] is True
    assert following["input_ids"].shape == (2, 3)
    assert following["attention_mask"].shape == (2, 11)
    assert next_inputs({"input_ids": kwargs["input_ids"]}, SimpleNamespace(logits=outputs["logits"])) is None


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
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
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
    model = small_model_of_type("paligemma")
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


def zeros_before_the_first_token(cache, rows):
    leaves, spec = pytree.tree_flatten(cache)
    empty = []
    for name, leaf in zip(leaf_names({WORD: cache}), leaves, strict=True):
        sizes = leaf.shape[1:] if "_states" in name else (leaf.shape[1], 0, leaf.shape[3])
        empty.append(leaf.new_zeros(rows, *sizes))
    return pytree.tree_unflatten(empty, spec)


@pytest.mark.skipif(
    not hasattr(Cache, "get_recurrent_state"), reason="before 5.23 several tokens after a state leave the mask out"
)
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


MODELS = "transformers.models.of_this_test"


def module_with_a_class(number):
    name = f"{MODELS}_{number}"
    module = sys.modules[name] = types.ModuleType(name)
    module.Model = type("Model", (), {"__module__": name})
    return module


def test_models_may_be_imported_while_the_imported_ones_are_listed(monkeypatch):
    """Whenever memory is collected, another thread may run; here each collection imports a model."""
    made = []
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    threshold = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(import_one := lambda phase, info: made.append(module_with_a_class(len(made))))
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
    made = [module_with_a_class(1)]

    def fits(cls):
        if len(made) == 1:
            made.append(module_with_a_class(2))
        return cls.__module__.startswith(MODELS)

    classes = ModelClasses(fits)
    assert classes() == [made[0].Model]
    assert classes() == [module.Model for module in made]
