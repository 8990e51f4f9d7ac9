"""Generation through a pipeline, of decoders and of models with an encoder."""

import copy
import logging
import threading
import types

import pytest
import torch
from torch.utils import _pytree as pytree

from matrix.cut_cases import batch_of
from matrix.models import make_model
from roundpipe_runtime import RoundPipeRunConfig
from roundpipe_runtime.errors import ConfigError
from roundpipe_runtime.huggingface import WrappedModel, wrap
from roundpipe_runtime.huggingface.cutting.caches import HeldCache, home, join_held
from roundpipe_runtime.huggingface.wrap import forward_of, reason_for_host
from tests.runtime.huggingface.hf_small import hf_batch, hf_model, wrapped
from yobx_flatten import register_flattening_functions
from yobx_flatten.huggingface.cache_names import CACHE, argument_of, cache_of

pytestmark = pytest.mark.slow

# Rotary, learned and relative positions; a window of 8; keys and values that layers share; experts; recurrent layers,
# also without attention
NAMES = [
    "llama", "gpt2", "bloom", "gemma3_text", "gemma3n_text", "gemma4_text", "mixtral", "jamba", "qwen3_next", "mamba",
]  # fmt: skip


def prompt(rows: int = 3, length: int = 10) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 100, (rows, length), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[rows - 1, :1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pair(name: str, **options):
    model = hf_model(name).eval()
    plain = copy.deepcopy(model)
    return wrapped(model, **{"microbatches": 2, **options}), plain


def is_on_host(path):
    return path._tried and path._pipeline is None


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_plain_model(name, monkeypatch):
    pipeline, plain = pair(name)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    if name == "mamba" and home(plain) is None:
        pytest.skip("the Mamba of this transformers has a class of caches of its own")
    expected = plain.generate(**prompt(), **options)
    assert reason_for_host(pipeline.cut, pipeline.forward) is None
    calls = []
    forward = WrappedModel.forward
    monkeypatch.setattr(WrappedModel, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    found = pipeline.generate(**prompt(), **options)
    assert torch.equal(found, expected)
    assert len(calls) >= found.shape[1] - 10


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_a_cache_is_filled_as_the_plain_model_fills_it(microbatches):
    pipeline, plain = pair("gemma3_text", microbatches=microbatches)
    inputs, name = prompt(), argument_of(plain.forward)
    ours, theirs = home(plain), home(plain)
    with torch.no_grad():
        for part in (slice(0, 9), slice(9, 10)):
            call = {
                "input_ids": inputs["input_ids"][:, part],
                "attention_mask": inputs["attention_mask"][:, : part.stop],
                "use_cache": True,
            }
            found = pipeline(**call, **{name: ours})
            assert torch.allclose(found.logits, plain(**call, **{name: theirs}).logits, rtol=1e-9)
            assert cache_of(found) is ours
    assert [layer.keys.shape[2] for layer in ours.layers] == [7, 10]  # a window of 8 keeps 7
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert type(one) is type(other)
        assert torch.allclose(one.keys, other.keys, rtol=1e-9)
        assert torch.allclose(one.values, other.values, rtol=1e-9)
    assert ours.get_seq_length() == theirs.get_seq_length() == 10


def test_a_cache_is_made_where_none_is_given():
    pipeline, plain = pair("llama")
    with torch.no_grad(), register_flattening_functions(patch_transformers=True):
        found = cache_of(pipeline(**prompt(), use_cache=True))
    with torch.no_grad():
        expected = cache_of(plain(**prompt(), use_cache=True))
    config = RoundPipeRunConfig(requires_grad=False)
    as_tuple = pipeline(**prompt(), use_cache=True, return_dict=False, roundpipe_run_config=config)
    assert type(found) is type(expected) is type(as_tuple[1])
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert torch.allclose(one.keys, other.keys, rtol=1e-9)


def test_after_an_exception_the_cache_is_as_it_was():
    pipeline, plain = pair("llama")
    cache, name = home(plain), argument_of(plain.forward)
    with torch.no_grad():
        pipeline(**prompt(), **{name: cache})
    before = [layer.keys.clone() for layer in cache.layers]
    layer = pipeline.cut.model.model.layers[1]
    calls = []

    def fail(module, args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("half-way")

    handle = layer.register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(RuntimeError, match="half-way"):
        pipeline(input_ids=torch.ones(3, 1, dtype=torch.long), **{name: cache})
    handle.remove()
    assert all(torch.equal(one.keys, other) for one, other in zip(cache.layers, before, strict=True))
    with torch.no_grad():
        pipeline(input_ids=torch.ones(3, 1, dtype=torch.long), **{name: cache})
    assert cache.get_seq_length() == 11


def test_gradients_and_a_cache_are_refused():
    """A layer that is called again in backward would write the cache twice. The message has the model's name for it."""
    pipeline, plain = pair("llama")
    labels, name = {"labels": prompt()["input_ids"]}, argument_of(plain.forward)
    with pytest.raises(ConfigError, match=r"no_grad"):
        pipeline(**prompt(), use_cache=True)
    with pytest.raises(ConfigError, match="returns no cache"):
        pipeline.forward_backward(input_kwargs={**prompt(), **labels, "use_cache": True})
    with pytest.raises(ConfigError, match=f"leave {name} out"):
        pipeline.forward_backward(input_kwargs={**prompt(), **labels, name: home(plain)})
    other = types.SimpleNamespace(get_seq_length=lambda: 0)
    with torch.no_grad(), pytest.raises(ConfigError, match=rf"model\(\.\.\., {name}=DynamicCache"):
        pipeline(**prompt(), **{name: other})


@pytest.mark.parametrize("name", ["rwkv", "xlm"])
def test_a_cache_of_another_kind_is_refused_and_generated_with_on_the_host(name):
    """Its forward takes no cache of transformers: `use_cache=True` says so, and `generate` is the model's own."""
    pipeline, plain = pair(name)
    assert reason_for_host(pipeline.cut, pipeline.forward) is not None
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(pipeline.generate(**prompt(), **options), plain.generate(**prompt(), **options))
    if name == "rwkv":
        with torch.no_grad(), pytest.raises(ConfigError, match=r"or no cache:\n    model\(\.\.\., use_cache=False"):
            pipeline(**prompt(), use_cache=True)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_the_cache_is_found_under_another_version_s_name(name):
    pipeline, plain = pair(name)
    ours, theirs = home(plain), home(plain)
    if ours is None:
        pytest.skip("the Mamba of this transformers has a class of caches of its own")
    own = argument_of(plain.forward)
    other = next(word for word in (CACHE, "cache") if word != own)
    with torch.no_grad():
        with pytest.warns(FutureWarning, match=f"calls its cache `{own}`. Use `{own}` instead of `{other}`") as said:
            found = pipeline(**prompt(), use_cache=True, **{other: ours})
        expected = plain(**prompt(), use_cache=True, **{own: theirs})
    assert [one.filename for one in said] == [__file__]
    assert torch.allclose(found.logits, expected.logits, rtol=1e-9)
    assert cache_of(found) is ours


def test_the_output_answers_to_each_name_as_the_plain_one(old_names_said):
    """The same names of entries and attributes, whichever of them the installed transformers has."""
    pipeline, plain = pair("llama")
    with torch.no_grad():
        found, expected = (model(**prompt(), use_cache=True) for model in (pipeline, plain))
    assert list(found) == list(expected)
    for word in (CACHE, "cache"):
        held = [getattr(output, word, None) for output in (found, expected)]
        assert type(held[0]) is type(held[1])
        assert held[0] in (None, cache_of(found))


def test_a_model_that_sees_generates_the_tokens_of_the_plain_model():
    model = hf_model("image:llava").eval()
    batch = {name: value.double() if value.is_floating_point() else value
             for name, value in batch_of("image:llava", model, 3, 0).items() if name != "labels"}  # fmt: skip
    plain = copy.deepcopy(model)
    pipeline = wrapped(model, microbatches=2, example=batch)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(pipeline.generate(**batch, **options), plain.generate(**batch, **options))


def test_a_difference_sends_generation_to_the_host():
    pipeline, _ = pair("llama")

    def wrong(**kwargs):
        output = pipeline.forward(**kwargs)
        output.logits = output.logits * 1.01
        return output

    assert "differ by 1.0e-02" in reason_for_host(pipeline.cut, wrong)


def test_adapters_generate_through_the_pipeline():
    """PEFT's `generate` calls the model inside, whose forward is the pipeline's meanwhile."""
    peft = pytest.importorskip("peft", reason="LoRA is PEFT's")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(hf_model("llama"), config).double().eval()
    plain = copy.deepcopy(model)
    pipeline = wrapped(model)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert reason_for_host(pipeline.cut, pipeline.forward) is None
    assert torch.equal(pipeline.generate(**prompt(), **options), plain.generate(**prompt(), **options))


def test_the_forward_of_the_model_is_back_afterwards():
    model = hf_model("llama")

    def fail():
        with forward_of(model, lambda **kwargs: kwargs):
            assert model(a=1) == {"a": 1}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "forward" not in vars(model)


def test_only_entries_that_are_read_are_moved():
    cache = home(hf_model("llama"))
    ones = torch.ones(1, 4, 2, 16)
    cache.update(ones, ones, 0)
    held = HeldCache(cache)
    with held.opened(torch.device("cpu")) as view:
        view.update(2 * ones, 2 * ones, 1)
    assert held.after().layers[0] is cache.layers[0]
    assert held.before().get_seq_length(1) == 0
    assert not cache.layers[1].is_initialized
    join_held(cache, [held], [1])
    assert cache.layers[1].keys.tolist() == (2 * ones).tolist()


OPTIONS = {"decoder_start_token_id": 2, "pad_token_id": 0, "max_new_tokens": 5, "min_new_tokens": 5}
# The size of a sound
SOUNDS = {
    "speech:whisper": lambda config: (config.num_mel_bins, 2 * config.max_source_positions),
    "speech:moonshine": lambda config: (2000,),
    "speech:speech_to_text": lambda config: (60, config.input_feat_per_channel),
}
WAYS = {
    "greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 20}, "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"}, "no cache": {"use_cache": False},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*generation.*")
@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "seq2seq:t5", "seq2seq:bart", "speech:whisper", "seq2seq:t5gemma"]
)
def test_tokens_are_those_of_the_plain_model_in_all_ways(name):
    pipeline, plain, inputs = encoder_pair(name)
    for way, options in WAYS.items():
        found = []
        for model in (pipeline, plain):
            torch.manual_seed(3)
            found.append(model.generate(**inputs, **OPTIONS, **options))
        assert torch.equal(*found), way
        assert found[0].shape[1] >= 5
    assert not any(is_on_host(path) for path in pipeline._rp_paths)


# Texts of unequal lengths with a mask, and sounds
MORE = [f"seq2seq:{name}" for name in ("mbart", "pegasus", "marian", "umt5", "m2m_100", "prophetnet")]


@pytest.mark.extended
@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("name", [*MORE, "speech:moonshine", "speech:speech_to_text"])
def test_more_models_generate_the_tokens_of_the_plain_model(name, way):
    pipeline, plain, inputs = encoder_pair(name)
    found, expected = (model.generate(**inputs, **OPTIONS, **WAYS[way]) for model in (pipeline, plain))
    assert torch.equal(found, expected)
    assert not any(is_on_host(path) for path in pipeline._rp_paths)


def encoder_pair(name: str, **options):
    """The pipeline, a plain copy, and a prompt of three rows, two of them padded, in two microbatches."""
    model = make_model(name).double().eval()
    model.config.decoder_start_token_id = 2
    plain = copy.deepcopy(model)
    if name not in SOUNDS:
        return wrapped(model, microbatches=2, **options), plain, prompt()
    shape = (3, *SOUNDS[name](model.config))
    sounds = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    example = {model.main_input_name: sounds[:2], "decoder_input_ids": torch.ones(2, 4, dtype=torch.long)}
    return wrapped(model, microbatches=2, example=example, **options), plain, {model.main_input_name: sounds}


def test_nothing_runs_on_after_close():
    before = set(threading.enumerate())
    pipeline, _, inputs = encoder_pair("seq2seq:t5")
    tokens = pipeline.generate(**inputs, **OPTIONS)
    paths = pipeline._rp_paths
    for path in paths:
        path.close()
    assert torch.isfinite(pipeline(**inputs, decoder_input_ids=tokens).logits).all()
    pipeline.close()
    assert set(threading.enumerate()) <= before


def test_the_encoder_runs_once():
    pipeline, _, inputs = encoder_pair("seq2seq:bart")
    pipeline.generate(**inputs, **OPTIONS)
    inner, calls = pipeline.cut.model.model, {"encoder": 0, "decoder": 0}

    def count(side):
        def hook(*_):
            calls[side] += 1

        return hook

    handles = [getattr(inner, side).layers[0].register_forward_pre_hook(count(side)) for side in calls]
    pipeline.generate(**inputs, **OPTIONS)
    for handle in handles:
        handle.remove()
    assert calls == {"encoder": 2, "decoder": 2 * 5}


def test_outputs_beside_the_tokens():
    pipeline, plain, inputs = encoder_pair("seq2seq:t5")
    options = {"output_logits": True, "output_hidden_states": True, "return_dict_in_generate": True}
    found, expected = (model.generate(**inputs, **OPTIONS, **options) for model in (pipeline, plain))
    assert list(found) == list(expected)
    for name in ("logits", "encoder_hidden_states", "decoder_hidden_states"):
        pairs = zip(pytree.tree_leaves(found[name]), pytree.tree_leaves(expected[name]), strict=True)
        assert all(torch.allclose(one, other, rtol=1e-9) for one, other in pairs), name
    both = [cache_of(one) for one in (found, expected)]
    assert both[0].is_updated == both[1].is_updated == {0: True, 1: True}
    for side in ("self_attention_cache", "cross_attention_cache"):
        caches = [getattr(one, side) for one in both]
        for one, other in zip(*(cache.layers for cache in caches), strict=True):
            assert torch.allclose(one.keys, other.keys, rtol=1e-9)


def test_weights_of_the_last_step_generate():
    pipeline, plain, inputs = encoder_pair("seq2seq:t5")
    first = pipeline.generate(**inputs, **OPTIONS)
    optimizer = torch.optim.SGD(pipeline.optim_parameters(), lr=5.0)
    pipeline.train().forward_backward(input_kwargs=hf_batch())
    pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    second = pipeline.eval().generate(**inputs, **OPTIONS)
    plain.load_state_dict(pipeline.state_dict())
    assert not torch.equal(first, second)
    assert torch.equal(second, plain.generate(**inputs, **OPTIONS))


def test_a_route_that_differs_is_not_taken(monkeypatch, caplog):
    monkeypatch.setattr(wrap, "_first_tensor", lambda output: torch.rand(()).double())
    pipeline, plain, inputs = encoder_pair("seq2seq:t5")
    with caplog.at_level(logging.INFO, logger="roundpipe_runtime"):
        found = pipeline.generate(**inputs, **OPTIONS)
    assert torch.equal(found, plain.generate(**inputs, **OPTIONS))
    assert [is_on_host(path) for path in pipeline._rp_paths] == [True, True]
    assert "T5Stack runs on the host in generate: through the pipeline, its output differs by" in caplog.text
    assert pipeline.forward_backward(input_kwargs=hf_batch()) > 0
    assert not any("forward" in vars(module) for module in pipeline.cut.model.modules())
