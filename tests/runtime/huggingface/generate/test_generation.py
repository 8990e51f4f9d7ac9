"""Caches and `generate` through a pipeline: the tokens of the plain model, the caller's cache as the plain model's."""

import copy

import pytest
import torch

from roundpipe_runtime import RoundPipeRunConfig
from roundpipe_runtime.errors import ConfigError
from roundpipe_runtime.huggingface import WrappedModel
from roundpipe_runtime.huggingface.cutting.caches import HeldCache, home, join_held, swapped
from roundpipe_runtime.huggingface.generate.generation import forward_of, reason_for_host
from tests.runtime.huggingface.hf_small import hf_model, wrapped
from yobx_flatten import register_flattening_functions

pytestmark = pytest.mark.slow

# Rotary, learned and relative positions; a window of 8; keys and values that layers share; experts; recurrent layers
NAMES = ["llama", "gpt2", "bloom", "gemma3_text", "gemma3n_text", "gemma4_text", "mixtral", "jamba", "qwen3_next"]


def prompt(rows: int = 3, length: int = 10) -> dict[str, torch.Tensor]:
    """Tokens with padding on the left, as generation wants it."""
    ids = torch.randint(5, 100, (rows, length), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[rows - 1, :1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pair(name: str, **options):
    """The pipeline, and a plain copy, for evaluation."""
    model = hf_model(name).eval()
    plain = copy.deepcopy(model)
    return wrapped(model, **{"microbatches": 2, **options}), plain


def host_reason(pipeline: WrappedModel) -> str | None:
    return reason_for_host(pipeline.cut, pipeline.forward)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_plain_model(name, monkeypatch):
    """Three rows, two of them padded, in two microbatches, 12 tokens past any window; the host runs no forward."""
    pipeline, plain = pair(name)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(**prompt(), **options)
    assert host_reason(pipeline) is None
    calls = []
    forward = WrappedModel.forward
    monkeypatch.setattr(WrappedModel, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    found = pipeline.generate(**prompt(), **options)
    pipeline.close()
    assert torch.equal(found, expected)
    assert len(calls) >= found.shape[1] - 10


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"do_sample": True, "top_k": 20}, {"cache_implementation": "static"}, {"use_cache": False}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_other_ways_to_generate(name, options):
    """Beams reorder the cache, sampling draws the same numbers, a static cache is written in place."""
    pipeline, plain = pair(name)
    found = []
    for model in (pipeline, plain):
        torch.manual_seed(3)
        found.append(model.generate(**prompt(), max_new_tokens=8, pad_token_id=0, **options))
    pipeline.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_a_cache_is_filled_as_the_plain_model_fills_it(microbatches):
    """Prompt, then one token: logits, every key and value, and the count of a window are those of the plain model."""
    pipeline, plain = pair("gemma3_text", microbatches=microbatches)
    inputs = prompt()
    ours, theirs = home(plain), home(plain)
    with torch.no_grad():
        for part in (slice(0, 9), slice(9, 10)):
            call = {
                "input_ids": inputs["input_ids"][:, part],
                "attention_mask": inputs["attention_mask"][:, : part.stop],
                "use_cache": True,
            }
            found = pipeline(**call, past_key_values=ours)
            expected = plain(**call, past_key_values=theirs)
            assert torch.allclose(found.logits, expected.logits, rtol=1e-9)
            assert found.past_key_values is ours
    pipeline.close()
    assert [layer.keys.shape[2] for layer in ours.layers] == [7, 10]  # a window of 8 keeps 7
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert type(one) is type(other)
        assert torch.allclose(one.keys, other.keys, rtol=1e-9)
        assert torch.allclose(one.values, other.values, rtol=1e-9)
    assert ours.get_seq_length() == theirs.get_seq_length() == 10


def test_a_cache_is_made_where_none_is_given():
    """With `use_cache=True` the output has the cache of the whole batch, also where the caller registered caches."""
    pipeline, plain = pair("llama")
    with torch.no_grad(), register_flattening_functions(patch_transformers=True):
        found = pipeline(**prompt(), use_cache=True).past_key_values
    with torch.no_grad():
        expected = plain(**prompt(), use_cache=True).past_key_values
    as_tuple = pipeline(**prompt(), use_cache=True, return_dict=False, roundpipe_run_config=_no_gradients())
    pipeline.close()
    assert type(found) is type(expected) is type(as_tuple[1])
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert torch.allclose(one.keys, other.keys, rtol=1e-9)


def _no_gradients() -> RoundPipeRunConfig:
    return RoundPipeRunConfig(requires_grad=False)


def test_after_an_exception_the_cache_is_as_it_was(monkeypatch):
    """The second layer fails in the second microbatch: nothing of the forward is in the caller's cache."""
    pipeline, plain = pair("llama")
    cache = home(plain)
    with torch.no_grad():
        pipeline(**prompt(), past_key_values=cache)
    before = [layer.keys.clone() for layer in cache.layers]
    layer = pipeline.cut.model.model.layers[1]
    calls = []

    def fail(module, args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("half-way")

    handle = layer.register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(RuntimeError, match="half-way"):
        pipeline(input_ids=torch.ones(3, 1, dtype=torch.long), past_key_values=cache)
    handle.remove()
    assert all(torch.equal(one.keys, other) for one, other in zip(cache.layers, before, strict=True))
    with torch.no_grad():
        pipeline(input_ids=torch.ones(3, 1, dtype=torch.long), past_key_values=cache)
    pipeline.close()
    assert cache.get_seq_length() == 11


def test_gradients_and_a_cache_are_refused():
    """A layer that is called again in backward would write the cache twice."""
    pipeline, _ = pair("llama")
    with pytest.raises(ConfigError, match=r"no_grad"):
        pipeline(**prompt(), use_cache=True)
    with pytest.raises(ConfigError, match="keeps no cache"):
        pipeline.forward_backward(input_kwargs={**prompt(), "labels": prompt()["input_ids"], "use_cache": True})
    pipeline.close()


@pytest.mark.parametrize("name", ["mamba", "xlm"])
def test_a_cache_of_another_kind_is_refused_and_generated_with_on_the_host(name):
    """Its forward takes no `past_key_values`: `use_cache=True` says so, and `generate` is the model's own."""
    pipeline, plain = pair(name)
    assert host_reason(pipeline) is not None
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(pipeline.generate(**prompt(), **options), plain.generate(**prompt(), **options))
    if name == "mamba":
        with torch.no_grad(), pytest.raises(ConfigError, match="past_key_values"):
            pipeline(**prompt(), use_cache=True)
    pipeline.close()


def test_a_difference_sends_generation_to_the_host():
    """If the trial finds other logits, that is the reason."""
    pipeline, _ = pair("llama")

    def wrong(**kwargs):
        output = pipeline.forward(**kwargs)
        output.logits = output.logits * 1.01
        return output

    assert "differ by 1.0e-02" in reason_for_host(pipeline.cut, wrong)
    pipeline.close()


def test_adapters_generate_through_the_pipeline():
    """PEFT's `generate` calls the model inside, whose forward is the pipeline's meanwhile."""
    peft = pytest.importorskip("peft", reason="LoRA is PEFT's")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(hf_model("llama"), config).double().eval()
    plain = copy.deepcopy(model)
    pipeline = wrapped(model)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert host_reason(pipeline) is None
    assert torch.equal(pipeline.generate(**prompt(), **options), plain.generate(**prompt(), **options))
    pipeline.close()


def test_the_forward_of_the_model_is_back_afterwards():
    """After `generate`, and after an exception in it, the model calls its own forward."""
    model = hf_model("llama")

    def fail():
        with forward_of(model, lambda **kwargs: kwargs):
            assert model(a=1) == {"a": 1}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "forward" not in vars(model)


def test_only_entries_that_are_read_are_moved():
    """A layer that updates entry 1 leaves entry 0 where it is; the cache itself changes when the parts are joined."""
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


def test_swapped():
    """Items of a tuple and of a mapping, by identity."""
    one, other = [], []
    assert swapped((one, other), {id(one): 1}) == (1, [])
    assert swapped({"a": other}, {id(other): 2}) == {"a": 2}
