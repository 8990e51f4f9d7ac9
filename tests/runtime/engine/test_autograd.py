"""forward() and loss.backward(): for autograd a pipeline is a function of its inputs and of its parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, StageError
from tests.runtime.small import batch, near, small_model

F = nn.functional


@pytest.fixture
def pair(devices):
    """A pipeline over a model with a tied weight, and the plain model."""
    model = small_model(tied=True)
    plain = copy.deepcopy(model)
    return RoundPipe(model, devices=devices), plain


def test_gradients_can_be_asked_for(pair):
    """torch.autograd.grad gives those of the parameters, or of the inputs alone, and leaves `grad` alone."""
    pipe, plain = pair
    inputs, labels = batch(6)
    found = torch.autograd.grad(F.mse_loss(pipe(inputs), labels), list(pipe.parameters()))
    expected = torch.autograd.grad(F.mse_loss(plain(inputs), labels), list(plain.parameters()))
    assert all(near(one, other) for one, other in zip(found, expected, strict=True))
    inputs.requires_grad_()
    (found,) = torch.autograd.grad(pipe(inputs).sum(), inputs)
    (expected,) = torch.autograd.grad(plain(inputs).sum(), inputs)
    assert near(found, expected)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_hooks_on_parameters_run(pair):
    pipe, plain = pair
    seen = {"pipe": [], "plain": []}
    for name, model in (("pipe", pipe), ("plain", plain)):
        model[2].weight.register_hook(lambda gradient, name=name: seen[name].append(gradient.clone()) or 3 * gradient)
        model[0].weight.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.clone()))
    inputs, labels = batch(6)
    for model in (pipe, plain):
        for _ in range(2):
            F.mse_loss(model(inputs), labels).backward()
    assert len(seen["pipe"]) == len(seen["plain"]) == 4
    for kind in (0, 1):  # a tensor of 6 by 6, and one of 6 by 4
        one, other = (sorted(seen[name], key=lambda t: t.numel())[2 * kind :][:2] for name in ("pipe", "plain"))
        assert all(near(a, b) for a, b in zip(one, other, strict=True))
    assert all(near(p.grad, q.grad) for p, q in zip(pipe.parameters(), plain.parameters(), strict=True))


def test_parameters_that_are_part_of_a_graph(devices):
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    pipe = RoundPipe(copy.deepcopy(plain), devices=devices)
    inputs, labels = batch(6)
    gradients = []
    for model in (pipe, plain):
        made_of = {name: parameter.detach().clone().requires_grad_() for name, parameter in plain.named_parameters()}
        weights = {name: 2 * tensor for name, tensor in made_of.items()}
        F.mse_loss(torch.func.functional_call(model, weights, (inputs,)), labels).backward()
        gradients.append([tensor.grad for tensor in made_of.values()])
    assert all(near(one, other) for one, other in zip(*gradients, strict=True))


def test_forward_mode_gradients_are_refused(devices):
    """Outputs would have no tangents."""
    pipe = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), devices=devices)
    with forward_ad.dual_level(), pytest.raises(StageError, match="forward-mode"):
        pipe(forward_ad.make_dual(torch.ones(2, 4), torch.ones(2, 4)))
    assert pipe(torch.ones(2, 4)).shape == (2, 4)


def test_sparse_and_dense_gradients_of_one_weight(devices):
    """The table looks up, the head multiplies: the sum is dense, also of two backwards."""

    class Head(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return x @ self.weight.T

    table = nn.Embedding(7, 4, sparse=True)
    plain = nn.Sequential(table, nn.Linear(4, 4), Head(table.weight))
    model = copy.deepcopy(plain)
    pipe = RoundPipe(model, devices="virtual:2", model_run_config=RoundPipeRunConfig(num_microbatch=3))
    ids = torch.tensor([[0, 1], [2, 2], [6, 0]])
    for _ in range(2):
        pipe(ids).square().mean().backward()
        plain(ids).square().mean().backward()
    assert all(near(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_gradients_of_gradients_are_refused(pair):
    """Otherwise a penalty on a gradient would count in the loss and not in its gradient."""
    pipe, _ = pair
    inputs = batch(6)[0].requires_grad_()
    output = pipe(inputs).sum()
    with pytest.raises(StageError, match="create_graph=True"):
        torch.autograd.grad(output, inputs, create_graph=True)
