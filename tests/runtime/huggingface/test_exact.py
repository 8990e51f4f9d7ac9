"""Calls of all kinds give what the plain model gives: drawn at random, with noise, and under autocast."""

import copy
import random

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from matrix.models import make_model
from roundpipe_runtime import RoundPipeRunConfig, WeightedLoss
from tests.runtime.huggingface.hf_small import hf_batch, hf_model, worst_gradient, wrapped

pytestmark = pytest.mark.slow

# Windows; experts with a loss of their own; recurrent layers; hidden states put together by hand
NAMES = ["gemma3_text", "qwen3_moe", "jamba", "gptj"]


def drawn(model, seed: int) -> tuple[dict, dict, int]:
    """A call, what it asks for beside, and how many microbatches."""
    draw = random.Random(seed)
    rows, length = draw.randint(1, 6), draw.randint(4, 12)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 100, (rows, length), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    side = draw.choice(["left", "right", "none"])
    for row in range(rows if side != "none" else 0):
        count = draw.randint(0, length - 3)
        mask[row, slice(0, count) if side == "left" else slice(length - count, length)] = 0
    labels[mask == 0] = -100
    for row in range(rows - 1):
        labels[row, : draw.choice([0, 0, length // 2, length])] = -100
    call = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if draw.random() < 0.3:
        call["inputs_embeds"] = model.get_input_embeddings()(call.pop("input_ids")).detach()
    if draw.random() < 0.3:
        call["num_items_in_batch"] = draw.randint(5, 50)
    flags = {
        "output_hidden_states": draw.random() < 0.4,
        "output_router_logits": "moe" in model.config.model_type and draw.random() < 0.5,
        "return_dict": draw.random() < 0.7,
    }
    return call, {name: value for name, value in flags.items() if value or name == "return_dict"}, draw.randint(1, 5)


@pytest.mark.parametrize("name", NAMES)
def test_calls_drawn_at_random(name):
    base = hf_model(name)
    for seed in range(3):
        model, plain = copy.deepcopy(base), copy.deepcopy(base)
        call, flags, microbatches = drawn(base, seed)
        pipeline = wrapped(model, microbatches=microbatches, check=False)
        for _ in range(2):
            expected = plain(**copy.deepcopy(call), **flags, use_cache=False)
            expected[0].backward()
            loss, found = pipeline.forward_backward(input_kwargs=copy.deepcopy(call) | flags, return_outputs=True)
        pipeline.close()
        assert loss.item() == pytest.approx(expected[0].item(), rel=1e-6), seed
        assert type(found) is type(expected), seed
        pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
        for one, other in pairs:
            if isinstance(other, torch.Tensor):
                # some models attend in float32 whatever their dtype, and its rounding depends on the number of rows
                largest = other.nan_to_num(0, 0, 0).abs().amax().item() if other.numel() else 0.0
                assert torch.allclose(one, other, rtol=1e-6, atol=1e-6 * largest, equal_nan=True), seed
        assert worst_gradient(model, plain) < 1e-6, seed


def test_noise_is_the_same_forward_and_backward():
    base = make_model("seq2seq:bart").double()
    base.config.decoder_start_token_id = 2
    for module in base.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.2
    for part in (base.model.encoder, base.model.decoder):
        part.layerdrop = 0.2
    base.config.encoder_layerdrop = base.config.decoder_layerdrop = 0.2
    batch = hf_batch()
    labels = batch.pop("labels")
    batch["decoder_input_ids"] = base.prepare_decoder_input_ids_from_labels(labels)
    torch.manual_seed(1)
    way = {name: torch.randn_like(parameter) for name, parameter in base.named_parameters()}
    way["model.shared.weight"][base.config.pad_token_id] = 0  # which never has a gradient

    def loss_fn(output, wanted):
        flat = output.logits.flatten(0, 1)
        return WeightedLoss(functional.cross_entropy(flat, wanted.flatten(), reduction="sum"), (wanted >= 0).sum())

    def run(step):
        model = copy.deepcopy(base).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(way[name], alpha=step)
        pipeline = wrapped(model, check=False)
        torch.manual_seed(7)
        loss = pipeline.forward_backward(input_kwargs=batch, label=labels, loss_fn=loss_fn).item()
        pipeline.close()
        return loss, sum((p.grad * way[n]).sum().item() for n, p in model.named_parameters() if p.grad is not None)

    slope = (run(1e-5)[0] - run(-1e-5)[0]) / 2e-5
    loss, found = run(0.0)
    with torch.no_grad():
        without_noise = base.eval()(**batch, labels=labels).loss.item()
    assert loss != pytest.approx(without_noise, rel=1e-3)
    assert found == pytest.approx(slope, rel=1e-5)


def test_a_model_may_be_wrapped_under_autocast():
    """The proof is made without it; a batch in one microbatch is then computed as the plain model computes it."""
    model = make_model("llama").eval()
    plain, batch = copy.deepcopy(model), hf_batch()
    with torch.autocast("cpu", torch.bfloat16):
        pipeline = wrapped(model)
        config = RoundPipeRunConfig(num_microbatch=1)
        found = pipeline.forward_backward(input_kwargs=batch, run_config=config)
        expected = plain(**batch).loss
    pipeline.close()
    assert pipeline.cut.report.equivalence.outputs == 0.0
    assert found.item() == expected.item()
