"""Tests of huggingface.cutting.capture: hidden states, attentions and router logits of a cut model."""

import pytest
import torch

from matrix.cut_cases import batch_of
from roundpipe_runtime.huggingface import cut
from roundpipe_runtime.huggingface.cutting.capture import COLLECTOR, collect_on_copy, is_old
from tests.runtime.huggingface.hf_small import hf_batch, hf_model, known_model, wrapped

FLAGS = [{"output_hidden_states": True}, {"output_attentions": True}, {"output_router_logits": True}]


# hooks in layers, and on modules that hold several of them; attentions of the form of masks
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "seq2seq:t5", "longcat_flash", "falcon"])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: next(iter(flags)))
def test_captured_outputs_are_those_of_the_plain_model(name, flags):
    model = hf_model(name)
    model.set_attn_implementation("eager")
    batch = hf_batch()
    del batch["labels"]
    if name == "longcat_flash" and is_old():
        pytest.skip("the model itself adds float64 to float32 before transformers 5")
    if name == "seq2seq:t5":
        batch["decoder_input_ids"] = batch["input_ids"].flip(1)
        if "output_router_logits" in flags and is_old():
            pytest.skip("T5 knows that argument from transformers 5 on")
    example = {key: value[:2] for key, value in batch.items()}
    if is_old() and name not in ("llama", "mixtral") and "output_attentions" in flags:
        example.update(flags)  # layers of these models return what they are asked for, so the example must ask
    with torch.no_grad():
        expected = model(**batch, **flags, use_cache=False)
        pipeline = wrapped(model, example=example)
        found = pipeline(**batch, **flags)
        plain = pipeline(**batch)
        again = model(**batch, **flags, use_cache=False)
    assert COLLECTOR.get() is None
    if not is_old():
        collect_on_copy(model)
        assert all("forward" not in vars(module) for module in model.modules())
    assert list(found) == list(again) == list(expected)
    if name == "mixtral" or "output_router_logits" not in flags:
        assert len(found) > len(plain)
    for key in expected:
        assert_same(found[key], expected[key])
        assert_same(again[key], expected[key])  # the model is as it was, and captures by itself


def assert_same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-9, equal_nan=True)
        return
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_code_between_layers_may_read_what_was_captured():
    """Mistral 3 goes on from a hidden state of its vision tower, which a hook has put aside: a phase ends there."""
    if is_old():
        pytest.skip("the vision tower captures nothing in this version of transformers")
    model = hf_model("image:mistral3")
    report = cut(model, batch_of("image:mistral3", model, 2, 0)).report
    assert not report.is_whole
    assert any(name.startswith("model.vision_tower.transformer.layers") for name in report.pieces)
    assert report.phases == 3


def test_a_cache_that_layers_share_is_named():
    """The layers of DiffusionGemma's decoder read keys that its encoder's layers wrote: it stays in one piece."""
    model = known_model("image:diffusion_gemma")
    report = cut(model, batch_of("image:diffusion_gemma", model, 2, 0), check=False).report
    assert report.is_whole
    assert (
        "layers.0 gets a cache that the model made, and fails without the entries that other layers write into it"
        in str(report)
    )
