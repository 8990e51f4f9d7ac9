"""A batch is not cut along a sequence: layers of torch that have it first are proven, or refused."""

import copy

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, SplitError, TensorChunkSpec
from tests.runtime.small import near_gradients

F = nn.functional
X = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))


def encoder(**options):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, **options) for _ in range(2)])


class Recurrent(nn.RNN):
    def forward(self, x):
        return super().forward(x)[0]


class Turns(nn.Module):
    """Has its rows first, and turns them for a layer that has them second."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


def call(pipe, way, num_microbatch=2, **options):
    """Run once, by one of three ways."""
    config = RoundPipeRunConfig(num_microbatch=num_microbatch, loss_reduction="mean", **options)
    if way == "loss":
        return pipe.forward_backward((X,), loss_fn=lambda outputs, _: outputs.square().mean(), run_config=config)
    with torch.set_grad_enabled(way == "gradients"):
        return pipe(X, roundpipe_run_config=config)


@pytest.mark.parametrize(("replicas", "num_microbatch"), [(None, 2), (1, 2), (2, 2), (2, 1), (9, 1)])
@pytest.mark.parametrize("way", ["loss", "gradients", "no gradients"])
@pytest.mark.parametrize("make", [encoder, lambda: nn.Sequential(nn.Linear(8, 8), Recurrent(8, 8))])
def test_a_sequence_that_is_cut_is_refused(make, way, replicas, num_microbatch):
    if way == "no gradients" and num_microbatch == 1:
        pytest.skip("an evaluation runs as one group, so nothing is cut")
    pipe = RoundPipe(make(), devices="virtual:2:check", replicas=replicas)
    before = torch.get_rng_state()
    with pytest.raises(SplitError, match=r"(?s)batch_first=False.*split_input=\{.args\[0\].: TensorChunkSpec\(1\)\}"):
        call(pipe, way, num_microbatch)
    assert all(module.training for module in pipe.modules())
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("replicas", [None, 2])
def test_the_rule_of_the_error_gives_the_numbers_of_the_plain_layers(replicas):
    """Cut along axis 1, outputs and gradients are those without a pipeline."""
    plain = encoder().eval()
    pipe = RoundPipe(copy.deepcopy(plain), devices="virtual:2:check", replicas=replicas)
    rules = {"split_input": {"args[0]": TensorChunkSpec(1)}, "merge_output": TensorChunkSpec(1)}
    with torch.no_grad():
        assert torch.allclose(call(pipe, "no gradients", **rules), plain(X), atol=1e-5)
    call(pipe, "gradients", **rules).square().sum().backward()
    plain(X).square().sum().backward()
    assert near_gradients(pipe, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make", [lambda: encoder(batch_first=True), lambda: nn.Sequential(Turns(Recurrent(8, 8)), nn.Linear(8, 8))]
)
def test_layers_that_keep_rows_apart_are_accepted(make):
    plain = make().eval()
    pipe = RoundPipe(copy.deepcopy(plain), devices="virtual:2:check")
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(call(pipe, "no gradients"), plain(X), atol=1e-5)
