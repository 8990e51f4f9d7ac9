"""Encoder-decoders generate through two pipelines: the tokens of the plain model, and the encoder runs once."""

import copy
import logging
import threading

import pytest
import torch
from torch.utils import _pytree as pytree

from matrix.models import make_model
from roundpipe_runtime.huggingface import generation
from roundpipe_runtime.huggingface.cutting.caches import HeldCache, home
from tests.runtime.huggingface.generate.test_generation import prompt
from tests.runtime.huggingface.hf_small import hf_batch, hf_model, wrapped
from yobx_flatten.huggingface.cache_names import argument_of, cache_of

pytestmark = pytest.mark.slow

OPTIONS = {"decoder_start_token_id": 2, "pad_token_id": 0, "max_new_tokens": 5, "min_new_tokens": 5}
# The size of a sound
SOUNDS = {
    "speech:whisper": lambda config: (config.num_mel_bins, 2 * config.max_source_positions),
    "speech:moonshine": lambda config: (2000,),
    "speech:speech_to_text": lambda config: (60, config.input_feat_per_channel),
}
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


def pair(name: str, **options):
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


@pytest.mark.filterwarnings("ignore:.*generation.*")
@pytest.mark.parametrize("name", ["seq2seq:t5", "seq2seq:bart", "speech:whisper", "seq2seq:t5gemma"])
def test_tokens_are_those_of_the_plain_model(name):
    pipeline, plain, inputs = pair(name)
    for way, options in WAYS.items():
        found = []
        for model in (pipeline, plain):
            torch.manual_seed(3)
            found.append(model.generate(**inputs, **OPTIONS, **options))
        assert torch.equal(*found), way
        assert found[0].shape[1] >= 5
    assert not any(path.is_on_host for path in pipeline._rp_paths)


# Texts of unequal lengths with a mask
TEXTS = ["mbart", "pegasus", "marian", "umt5", "m2m_100", "prophetnet"]


@pytest.mark.extended
@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("name", [*(f"seq2seq:{name}" for name in TEXTS), "speech:moonshine", "speech:speech_to_text"])
def test_more_models_generate_the_tokens_of_the_plain_model(name, way):
    pipeline, plain, inputs = pair(name)
    found, expected = (model.generate(**inputs, **OPTIONS, **WAYS[way]) for model in (pipeline, plain))
    assert torch.equal(found, expected)
    assert not any(path.is_on_host for path in pipeline._rp_paths)


def test_nothing_runs_on_after_close():
    before = set(threading.enumerate())
    pipeline, _, inputs = pair("seq2seq:t5")
    tokens = pipeline.generate(**inputs, **OPTIONS)
    paths = pipeline._rp_paths
    for path in paths:
        path.close()
    assert torch.isfinite(pipeline(**inputs, decoder_input_ids=tokens).logits).all()
    pipeline.close()
    assert set(threading.enumerate()) <= before


def test_the_encoder_runs_once():
    pipeline, _, inputs = pair("seq2seq:bart")
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
    pipeline, plain, inputs = pair("seq2seq:t5")
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
    pipeline, plain, inputs = pair("seq2seq:t5")
    first = pipeline.generate(**inputs, **OPTIONS)
    optimizer = torch.optim.SGD(pipeline.optim_parameters(), lr=5.0)
    pipeline.train().forward_backward(input_kwargs=hf_batch())
    pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    second = pipeline.eval().generate(**inputs, **OPTIONS)
    plain.load_state_dict(pipeline.state_dict())
    assert not torch.equal(first, second)
    assert torch.equal(second, plain.generate(**inputs, **OPTIONS))


def test_a_route_that_differs_is_not_taken(monkeypatch, caplog):
    monkeypatch.setattr(generation, "_first_tensor", lambda output: torch.rand(()).double())
    pipeline, plain, inputs = pair("seq2seq:t5")
    with caplog.at_level(logging.INFO, logger="roundpipe_runtime"):
        found = pipeline.generate(**inputs, **OPTIONS)
    assert torch.equal(found, plain.generate(**inputs, **OPTIONS))
    assert [path.is_on_host for path in pipeline._rp_paths] == [True, True]
    assert "T5Stack runs on the host in generate: through the pipeline, its output differs by" in caplog.text
    assert pipeline.forward_backward(input_kwargs=hf_batch()) > 0
    assert not any("forward" in vars(module) for module in pipeline.cut.model.modules())


def test_a_cache_of_both_sides_is_filled_as_the_plain_model_fills_it():
    """By the pipeline of the training, too: with `use_cache=True`, and with the cache of the call before."""
    pipeline, plain, inputs = pair("seq2seq:t5")
    tokens, held = hf_batch(3)["input_ids"][:, :4], []
    with torch.no_grad():
        for model in (pipeline, plain):
            cache = cache_of(model(**inputs, decoder_input_ids=tokens, use_cache=True))
            again = model(**inputs, decoder_input_ids=tokens[:, -1:], **{argument_of(plain.forward): cache})
            held.append((again.logits, cache))
    (found, ours), (expected, theirs) = held
    assert torch.allclose(found, expected, rtol=1e-9)
    assert type(ours) is type(theirs)
    assert ours.get_seq_length() == theirs.get_seq_length() == 5


def test_the_sides_of_a_held_cache_are_apart():
    cache = home(hf_model("seq2seq:t5"))
    ones = torch.ones(1, 4, 2, 16)
    held = HeldCache(cache)
    with held.opened(torch.device("cpu")) as view:
        view.self_attention_cache.update(ones, ones, 0)
        view.cross_attention_cache.update(2 * ones, 2 * ones, 0)
        view.is_updated[0] = True
    after = held.after()
    assert after.is_updated == {0: True}
    assert after.self_attention_cache.layers[0].keys.unique().tolist() == [1.0]
    assert after.cross_attention_cache.layers[0].keys.unique().tolist() == [2.0]
    assert not cache.is_updated
    assert held.before().get_seq_length() == 0
