"""A loss function of a call with labels: a multiple of the model's loss, with a penalty, or something else."""

import copy
import time

import pytest
import torch
import transformers

from roundpipe_runtime import LossError, RoundPipeRunConfig
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
from tests.runtime.huggingface.hf_small import worst_gradient

CONFIG = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=100
)


def made():
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(CONFIG).double()
    ids = torch.randint(5, 100, (7, 10))
    labels = ids.masked_fill(torch.arange(10) < torch.tensor([0, 3, 5, 0, 8, 2, 9])[:, None], -100)
    return plain, copy.deepcopy(plain), {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("adds", ["nothing", "a penalty"])
def test_multiples_and_penalties_are_those_of_the_plain_model(adds):
    """Microbatches have other numbers of labels; what is the same for all of them is added once."""
    plain, model, batch = made()
    pipeline = wrap_model_to_roundpipe(model, devices="virtual:2", lower_threshold=0)

    def loss_fn(of):
        return lambda outputs, _: (
            3 * outputs.loss + (0 if adds == "nothing" else of.lm_head.weight.square().sum() / 100)
        )

    expected = loss_fn(plain)(plain(**batch), None)
    expected.backward()
    for _ in range(2):
        model.zero_grad()
        found = pipeline.forward_backward(
            input_kwargs=batch, loss_fn=loss_fn(model), run_config=RoundPipeRunConfig(num_microbatch=3)
        )
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)  # transformers computes its loss in float32
        assert worst_gradient(model, plain) < 1e-6
    pipeline.close()


def of_its_own(outputs, _):
    return outputs.logits.square().mean()


def in_addition(outputs, _):
    return outputs.loss + outputs.logits.square().mean()


def squared(outputs, _):
    return outputs.loss**2


@pytest.mark.parametrize("loss_fn", [of_its_own, in_addition, squared])
def test_anything_else_is_refused(loss_fn):
    """Its weights are not those of the model's loss, and nothing states them; no gradient is changed."""
    _, model, batch = made()
    pipeline = wrap_model_to_roundpipe(model, devices="virtual:2", lower_threshold=0)
    with pytest.raises(LossError, match="more than a multiple of the loss"):
        pipeline.forward_backward(input_kwargs=batch, loss_fn=loss_fn, run_config=RoundPipeRunConfig(num_microbatch=3))
    assert all(parameter.grad is None for parameter in model.parameters())
    pipeline.close()


@pytest.mark.parametrize("loss_fn", [of_its_own, in_addition, squared])
def test_joined_it_is_that_of_the_plain_model(loss_fn):
    """The line of the error."""
    plain, model, batch = made()
    expected = loss_fn(plain(**batch), None)
    expected.backward()
    pipeline = wrap_model_to_roundpipe(model, devices="virtual:2", lower_threshold=0)
    config = RoundPipeRunConfig(num_microbatch=3, loss_reduction="joined")
    found = pipeline.forward_backward(input_kwargs=batch, loss_fn=loss_fn, run_config=config)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)  # transformers computes its loss in float32
    assert worst_gradient(model, plain) < 1e-6
    pipeline.close()


def test_the_check_leaves_the_masks_of_layers_that_run_meanwhile_on_other_devices(monkeypatch):
    """It puts the generator back, which another thread draws from: its masks were others in the recomputation."""
    ids = torch.randint(5, 100, (6, 10), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    own = transformers.models.llama.modeling_llama.LlamaMLP.forward

    def slow_layer(self, x):
        for _ in range(10):  # as the check begins and ends anywhere
            x = torch.nn.functional.dropout(x, 0.1, self.training)
            time.sleep(0.002)
        return own(self, x)

    def loss_fn(outputs, _):
        time.sleep(0.003)
        return outputs.loss

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", slow_layer)
    found = []
    for devices in ("virtual:1", "virtual:3"):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(CONFIG).train()
        pipeline = wrap_model_to_roundpipe(model, devices=devices, lower_threshold=0)
        torch.manual_seed(3)
        run_config = RoundPipeRunConfig(num_microbatch=6)
        loss = pipeline.forward_backward(input_kwargs=batch, loss_fn=loss_fn, run_config=run_config)
        pipeline.close()
        found.append((float(loss), [parameter.grad for parameter in model.parameters()]))
    (one_device, expected), (three_devices, gradients) = found
    assert three_devices == one_device
    for left, right in zip(gradients, expected, strict=True):
        assert torch.equal(left, right)
