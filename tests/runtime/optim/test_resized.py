"""A parameter that is resized in mid-training: torch's fused kernel would write outside of its moments."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, RoundPipe, optim
from roundpipe_runtime.engine import lifecycle


def stepped():
    """A parameter that has moments, and its optimizer."""
    parameter = nn.Parameter(torch.ones(64, 16))
    optimizer = optim.Adam([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("rows", [70, 60])
@pytest.mark.parametrize("when", ["before the gradient", "after the gradient"])
def test_a_parameter_that_was_resized_is_refused(when, rows):
    """As `resize_token_embeddings` resizes: the parameter stays, with other data."""
    parameter, optimizer = stepped()
    if when == "after the gradient":
        parameter.data = torch.ones(rows, 16)
    else:
        parameter.grad = None
        parameter.data = torch.ones(rows, 16)
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(
        ConfigError, match=rf"resized to \({rows}, 16\).* moments \(64, 16\)\. Create the optimizer again"
    ):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(rows, 16))
    parameter.grad = torch.ones_like(parameter)
    plain = nn.Parameter(torch.ones(rows, 16))
    plain.grad = torch.ones_like(plain)
    optim.Adam([parameter], lr=0.1).step()
    torch.optim.Adam([plain], lr=0.1).step()
    assert torch.allclose(parameter, plain)


def test_other_data_of_the_same_shape_is_stepped():
    parameter, optimizer = stepped()
    parameter.data = torch.zeros(64, 16)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.allclose(parameter, torch.full((64, 16), -0.1), atol=1e-4)


def test_no_gradient_is_read_while_a_step_runs_in_the_background(monkeypatch):
    """That step sets gradients to None in its thread: reading one there at the same time would corrupt memory."""
    reads, check = [], lifecycle.check_gradients
    monkeypatch.setattr(lifecycle, "check_gradients", lambda contents: reads.append(1) or check(contents))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipeline = RoundPipe(model, devices="virtual:2")
    optimizer = torch.optim.Adam(pipeline.optim_parameters())
    for _ in range(3):
        pipeline.forward_backward((torch.ones(6, 4),), label=torch.ones(6, 2), loss_fn=nn.functional.mse_loss)
        pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)
    pipeline.synchronize()
    assert len(reads) == 1
