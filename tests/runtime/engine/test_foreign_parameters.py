"""A layer that trains a parameter of another layer is refused: its gradient would not be that of the plain model."""

import functools

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, StageError, VirtualDevice
from roundpipe_runtime.engine.layer_graph import check_leaves
from roundpipe_runtime.engine.parameters.on_device import LayerOnDevice
from roundpipe_runtime.optim.layer_contents import scan


class Penalised(nn.Linear):
    """Adds the norm of another layer's weight to what it returns."""

    def forward(self, x):
        return super().forward(x) + self.others[0].weight.norm()


@pytest.mark.parametrize("way", ["forward_backward", "outputs"])
def test_the_parameter_and_both_layers_are_named(way):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Penalised(3, 2))
    model[2].others = [model[0]]  # a list hides it from torch
    pipeline = RoundPipe(model, devices="virtual:2")
    x = torch.ones(4, 3)
    if way == "outputs":
        go = pipeline(x).sum().backward
    else:
        go = functools.partial(pipeline.forward_backward, (x,), loss_fn=lambda outputs, _: outputs.sum())
    with pytest.raises(StageError, match=r"layer 2 \(Penalised\) uses 'weight' of layer 0 \(Linear\)"):
        go()


def test_a_parameter_that_both_layers_have_is_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Penalised(3, 2))
    model[2].others = nn.ModuleList([model[0]])
    x = torch.randn(4, 3)
    model(x).sum().backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    pipeline = RoundPipe(model, devices="virtual:2")
    run = RoundPipeRunConfig(num_microbatch=2)
    pipeline.forward_backward((x,), loss_fn=lambda outputs, _: outputs.sum(), run_config=run)
    assert torch.allclose(model[0].weight.grad, expected, rtol=1e-5)


def test_they_are_named_while_the_other_layer_computes():
    """The weight that is read is then a copy, which stands in the other layer for a call on its device."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Penalised(3, 2))
    model[2].others = [model[0]]
    contents = scan(list(model))
    device = VirtualDevice("one")
    there = LayerOnDevice(contents[0], device, lambda parameter: parameter)
    outputs = there.call(lambda: model[2](torch.ones(4, 3)))
    with pytest.raises(StageError, match=r"layer 2 \(Penalised\) uses 'weight' of layer 0 \(Linear\)"):
        check_leaves(contents[2], [outputs], [None], list(model[2].parameters()), contents)
    there.release()
    device.close()
