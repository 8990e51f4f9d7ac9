"""Layers that mix rows, and packed rows of several texts."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel, LlamaConfig, LlamaForCausalLM

from roundpipe_runtime import RoundPipeRunConfig, RoundPipeWarning, wrap_model_to_roundpipe
from roundpipe_runtime.huggingface.batches import is_packed, keeps_texts_apart
from tests.runtime.huggingface.hf_small import known_model, wrapped
from tests.runtime.small import near_gradients

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def llama(mixes):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=40)).double()
    if mixes:
        model.model.layers[1].mlp.gate_proj = Centred(16, 32, bias=False).double()
    return model


def texts(rows=5):
    ids = torch.randint(3, 40, (rows, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("call", ["forward_backward", "forward", "no gradients"])
def test_a_model_with_a_layer_that_mixes_rows_runs_in_one_microbatch(call):
    plain = llama(mixes=True)
    model = wrap_model_to_roundpipe(copy.deepcopy(plain), lower_threshold=0, devices="virtual:2:check")
    config, batch = RoundPipeRunConfig(num_microbatch=3), texts()
    expected = plain(**batch).loss

    def run():
        if call == "forward_backward":
            return model.forward_backward(input_kwargs=batch, run_config=config)
        with torch.set_grad_enabled(call == "forward"):
            return model(**batch, roundpipe_run_config=config).loss

    with pytest.warns(RoundPipeWarning, match=r"model\.layers\.1 \(LlamaDecoderLayer\).*one microbatch"):
        found = run()
    assert torch.allclose(found, expected)
    if call != "no gradients":
        expected.backward()
        if call == "forward":
            found.backward()
        assert near_gradients(model, plain, rtol=1e-5, atol=1e-8)
    again = model.forward_backward(input_kwargs=batch, run_config=config)  # without another warning
    assert torch.allclose(again, expected)


def with_frequencies(model):
    made = nn.Embedding(40, 16, scale_grad_by_freq=True)
    made.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = made


def with_clamped_gradients(model):
    model.model.layers[0].mlp.register_full_backward_hook(lambda layer, found, given: (found[0].clamp(-1e-4, 1e-4),))


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("call", ["forward_backward", "forward"])
@pytest.mark.parametrize("change", [with_frequencies, with_clamped_gradients])
def test_a_model_whose_backward_depends_on_the_batch_has_the_gradients_of_the_batch(change, call, number):
    """Outputs show nothing of rows that are mixed in a backward, or of gradients that depend on the scale of a loss."""
    plain, trained = llama(mixes=False), llama(mixes=False)
    change(plain)
    change(trained)
    model = wrap_model_to_roundpipe(trained, lower_threshold=0, devices="virtual:2:check")
    config, batch = RoundPipeRunConfig(num_microbatch=number), texts()
    batch["labels"] = batch["labels"].masked_fill(torch.arange(5)[:, None] > torch.arange(6), -100)
    expected = plain(**batch).loss
    expected.backward()
    with torch.no_grad():  # such calls do not count for those with gradients
        model(**batch, roundpipe_run_config=config)
    is_exact = number == 1 or (change is with_clamped_gradients and call == "forward")
    with nullcontext() if is_exact else pytest.warns(RoundPipeWarning, match="gradients"):
        if call == "forward_backward":
            found = model.forward_backward(input_kwargs=batch, run_config=config)
        else:
            found = model(**batch, roundpipe_run_config=config).loss
            found.backward()
    assert torch.allclose(found, expected)
    assert near_gradients(model, plain, atol=1e-7)


@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("gradients", [False, True])
def test_similarities_of_all_pairs_are_those_of_the_batch(gradients, rows):
    """CLIP without a loss: pairs of one microbatch, joined as rows, would be some of them."""
    torch.manual_seed(0)
    parts = {"projection_dim": 8, "text_config": {**SMALL, "vocab_size": 40, "eos_token_id": 39}}
    plain = CLIPModel(CLIPConfig(**parts, vision_config={**SMALL, "image_size": 8, "patch_size": 4})).eval()
    batch = {"input_ids": torch.randint(3, 39, (rows, 6)), "pixel_values": torch.randn(rows, 3, 8, 8)}
    model = wrap_model_to_roundpipe(copy.deepcopy(plain), lower_threshold=0, devices="virtual:2", example=batch)
    config = RoundPipeRunConfig(num_microbatch=2)
    with torch.set_grad_enabled(gradients), pytest.warns(RoundPipeWarning, match="runs once for the whole batch"):
        found = model(**batch, roundpipe_run_config=config).logits_per_image
    expected = plain(**batch).logits_per_image
    assert found.shape == expected.shape == (rows, rows)
    assert torch.allclose(found, expected, atol=1e-5)
    if gradients:
        for one in (found, expected):
            one.diagonal().sum().backward()
        assert near_gradients(model, plain, atol=1e-5)


APART = ["llama", "gemma3_text"]
TOGETHER = ["qwen3_5_text", "bamba", "falcon_h1", "mamba"]


def two_texts():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, 90, (2, 9), generator=generator), torch.randint(5, 90, (2, 7), generator=generator)


def packed_batch():
    ids = torch.cat(two_texts(), 1)
    positions = torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1).contiguous()
    return {"input_ids": ids, "position_ids": positions, "labels": ids, "use_cache": False}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*APART, *TOGETHER])
def test_packed_rows_of_a_model(name):
    model = known_model(name).eval()
    batch = packed_batch()
    given = {"position_ids": batch["position_ids"]} if name != "mamba" else {}
    with torch.no_grad():
        behind = model(input_ids=batch["input_ids"], use_cache=False, **given)[0][:, 9:]
        alone = model(input_ids=two_texts()[1], use_cache=False)[0]
    is_apart = torch.allclose(behind, alone, atol=1e-4)
    assert is_apart is (name in APART)
    assert bool(keeps_texts_apart(model)) is is_apart


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "bamba"])
@pytest.mark.parametrize("call", ["forward_backward", "forward"])
def test_a_wrapped_model_warns_once(name, call):
    model = known_model(name)
    pipeline = wrapped(model, microbatches=1)
    batch = packed_batch()

    def run(given):
        with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(call == "forward_backward"):
            warnings.simplefilter("always")
            if call == "forward":
                loss = pipeline(**given).loss
            else:
                loss = pipeline.forward_backward(input_kwargs={k: v for k, v in given.items() if k != "use_cache"})
        return loss.item(), [str(one.message) for one in caught if issubclass(one.category, RoundPipeWarning)]

    assert run({**batch, "position_ids": torch.arange(16).expand(2, -1)})[1] == []
    first, second = run(batch), run(batch)
    assert len([text for text in first[1] if "position_ids restart in a row" in text]) == (name in TOGETHER)
    assert second[1] == []
    with torch.no_grad():
        expected = model(**{**batch, "use_cache": False}).loss.item()
    assert first[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "mask", "expected"),
    [
        ([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]], None, True),
        ([[4, 5, 6, 0, 1, 2]], None, True),
        ([[0, 1, 2, 0, 1, 2]], [[1, 1, 1, 1, 1, 1]], True),
        ([[0, 1, 2, 3, 4, 5]], None, False),
        ([[0, 0, 0, 1, 2, 3]], None, False),  # padded on the left
        ([[1, 1, 0, 1, 2, 3]], [[0, 0, 1, 1, 1, 1]], False),  # as generate does
        ([[0, 1, 2, 3, 0, 0]], None, False),  # padded on the right
        ([[[0, 1, 2, 0, 1, 2]]] * 3, None, True),  # of text, height and width
    ],
)
def test_positions_that_begin_again(positions, mask, expected):
    given = {"position_ids": torch.tensor(positions)}
    if mask is not None:
        given["attention_mask"] = torch.tensor(mask)
    assert is_packed(given) is expected
