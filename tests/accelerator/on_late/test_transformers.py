"""Models of transformers train on the reference accelerator as the plain model does on the CPU."""

import copy

import pytest
import torch

from tests.accelerator import late
from tests.cases import cases
from tests.runtime.huggingface.hf_small import hf_batch, hf_model, worst_gradient, wrapped


def model_of(name):
    """In float64, so that a difference is a mistake."""
    if name != "t5":
        return hf_model(name)
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).double()


@pytest.mark.parametrize("order", [("late", 0), ("random", 1)], ids=str)
@pytest.mark.parametrize("name", cases(["llama", "gemma2", "mixtral", "gpt2", "t5"], quick=["llama", "t5"]))
def test_losses_are_those_of_the_plain_model(name, order):
    """In float64, with rows of different lengths: the losses of two steps, and the gradients of the first."""
    late.set_order(*order)
    model = model_of(name).eval()
    plain, batch = copy.deepcopy(model), hf_batch(padding=name != "gemma2")  # whose padding on the left is NaN
    pipeline = wrapped(model, devices="virtual:2")
    ours, theirs = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (model, plain))
    for step in range(2):
        expected = plain(**batch, use_cache=False).loss
        expected.backward()
        loss = pipeline.forward_backward(input_kwargs=batch)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        if step == 0:
            assert worst_gradient(model, plain) < 1e-5
        pipeline.step(lambda: (ours.step(), ours.zero_grad()))
        theirs.step()
        theirs.zero_grad()
    pipeline.close()
