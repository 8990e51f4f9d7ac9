"""A parameter that is resized in mid-training: torch's fused kernel would write outside of its moments."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, optim


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
    with pytest.raises(ConfigError, match=rf"resized to \({rows}, 16\).* moments \(64, 16\). Make the optimizer again"):
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
