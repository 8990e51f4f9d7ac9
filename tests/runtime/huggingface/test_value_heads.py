"""Models with a head of values next to that of tokens, as reinforcement has: they are cut without a description."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe_runtime import RoundPipeRunConfig
from tests.runtime.huggingface.hf_small import worst_gradient, wrapped

pytestmark = pytest.mark.slow


class WithValues(nn.Module):
    """A causal language model that also returns a value for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
        self.pretrained_model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        self.config = self.pretrained_model.config
        self.v_head = nn.Sequential(nn.Dropout(0.0), nn.Linear(32, 1))

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        found = self.pretrained_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache, output_hidden_states=True
        )
        return found.logits, self.v_head(found.hidden_states[-1]).squeeze(-1)


def policy_and_value_loss(outputs, labels):
    """A clipped ratio of probabilities with advantages, and the squared error of values: a sum, and its rows."""
    (logits, values), (tokens, old, returns) = outputs, labels
    own = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    ratio = (own - old).exp()
    advantage = returns[:, None] - values[:, :-1].detach()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (policy + 0.5 * (values[:, :-1] - returns[:, None]).square()).sum(), len(tokens)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_head_of_values_is_found_and_trained(microbatches):
    """Loss and all gradients of a step of PPO, of five rows with padding, are those of the reference model."""
    model = WithValues().double()
    plain = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 64, (5, 7), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    labels = (
        tokens,
        torch.randn(5, 6, generator=generator, dtype=torch.float64) - 4,
        torch.randn(5, generator=generator, dtype=torch.float64),
    )
    batch = {"input_ids": tokens, "attention_mask": mask}
    pipeline = wrapped(model, example={name: value[:2] for name, value in batch.items()})
    config = RoundPipeRunConfig(num_microbatch=microbatches)
    loss = pipeline.forward_backward(input_kwargs=batch, label=labels, loss_fn=policy_and_value_loss, run_config=config)
    total, rows = policy_and_value_loss(plain(**batch), labels)
    expected = total / rows
    expected.backward()
    assert not pipeline.cut.report.is_whole
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert worst_gradient(model, plain) < 1e-6  # norms of Llama compute in float32
    assert model.v_head[1].weight.grad.norm() > 0
