"""Masks that models of transformers draw with NumPy: those of the model in one microbatch, one mask for both passes."""

import copy

import numpy as np
import pytest
import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from roundpipe_runtime import RoundPipeRunConfig, wrap_model_to_roundpipe


@pytest.fixture
def model():
    """In float64, without dropout; half of the places are masked."""
    before = np.random.get_state()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    features = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 20}
    dropouts = ["layerdrop", "hidden_dropout", "attention_dropout", "feat_proj_dropout", "activation_dropout"]
    none = dict.fromkeys([*dropouts, "final_dropout"], 0.0)
    masks = {"mask_time_prob": 0.5, "mask_time_length": 4, "ctc_loss_reduction": "mean"}
    yield Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **features, **positions, **none, **masks)).double().train()
    np.random.set_state(before)


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return {"input_values": torch.randn(4, 800).double(), "labels": torch.randint(1, 20, (4, 5))}


def test_one_microbatch_is_masked_as_the_model_is(model, batch):
    """Loss, all gradients, and the state of NumPy's generator afterwards, though phases run code of the model again."""
    plain = copy.deepcopy(model)
    pipe = wrap_model_to_roundpipe(model, devices="virtual:2", example={k: v[:2] for k, v in batch.items()})
    np.random.seed(7)
    expected = plain(**batch).loss
    expected.backward()
    after = np.random.rand()
    np.random.seed(7)
    found = pipe.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=1))
    assert np.random.rand() == after
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.allclose(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_the_gradient_is_that_of_the_masks_of_the_loss(model, batch):
    """Two microbatches with outputs alone: the derivative is that of a central difference with the same seed."""
    pipe = wrap_model_to_roundpipe(model, devices="virtual:2", example={k: v[:2] for k, v in batch.items()})
    inputs, config = {"input_values": batch["input_values"]}, RoundPipeRunConfig(num_microbatch=2)
    embed = model.wav2vec2.masked_spec_embed
    along = torch.randn(embed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss():
        np.random.seed(7)
        torch.manual_seed(1)
        return pipe(**inputs, roundpipe_run_config=config).logits.square().sum()

    loss().backward()
    found = (embed.grad * along).sum().item()
    sides = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            embed.add_(along, alpha=step)
            sides.append(loss().item())
            embed.sub_(along, alpha=step)
    assert found == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-4)
