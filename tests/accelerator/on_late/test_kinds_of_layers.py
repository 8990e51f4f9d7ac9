"""Half precision, autocast, eight bits, compiled layers, and devices of different sizes, next to plain PyTorch."""

import copy

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from tests.accelerator import late
from tests.accelerator.training import late_devices
from tests.cases import cases
from tests.runtime.small import batch, relative_error, same_bits, small_model

F = nn.functional
CONFIG = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=4)
ORDERS = [("late", 0), ("random", 1)]


def loss_fn(outputs, labels):
    return F.mse_loss(outputs.float(), labels.float())


def trained(model, devices, inputs, labels):
    """The loss and the gradients of one step."""
    pipe = RoundPipe(model, devices=devices, model_run_config=CONFIG)
    loss = pipe.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
    pipe.close()
    return [loss, *(parameter.grad for parameter in model.parameters())]


def plainly(model, inputs, labels):
    """The same without a pipeline."""
    loss = loss_fn(model(inputs), labels)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_bfloat16(count, order):
    """Gradients in bfloat16 are those of the model in float64 but for eight bits."""
    late.set_order(*order)
    model, (inputs, labels) = small_model(tied=True), batch(8)
    right = plainly(copy.deepcopy(model).double(), inputs.double(), labels)
    found = trained(model.bfloat16(), late_devices(count), inputs.bfloat16(), labels)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found[1:])
    assert all(relative_error(one, other) < 0.03 for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_autocast(count, order):
    late.set_order(*order)
    model, (inputs, labels) = small_model(), batch(8)
    on_device = copy.deepcopy(model).to("late:0")
    with torch.autocast("late", dtype=torch.bfloat16):
        right = plainly(on_device, inputs.to("late:0"), labels.to("late:0"))
        exact = plainly(copy.deepcopy(model).double(), inputs.double(), labels)
        found = trained(model, late_devices(count), inputs, labels)
    assert all(relative_error(one, other.cpu()) < 0.01 for one, other in zip(found, right, strict=True))
    assert relative_error(found[1], exact[1]) > 1e-4  # it did compute in bfloat16


class EightBits(nn.Module):
    """A frozen weight of eight bits with a scale, and a trainable one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        self.scale = nn.Parameter(weight.abs().max() / 448)
        self.weight = nn.Parameter((weight / self.scale).detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x):
        return torch.tanh(x @ (self.weight.to(x.dtype) * self.scale))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_float8(count, order):
    late.set_order(*order)
    torch.manual_seed(0)
    model = nn.Sequential(*[EightBits(8) for _ in range(4)])
    inputs, labels = torch.randn(8, 8), torch.randn(8, 8)
    right = plainly(copy.deepcopy(model), inputs, labels)
    late.counts()
    found = trained(model, late_devices(count), inputs, labels)
    assert [one is None for one in found] == [one is None for one in right]
    pairs = [(one, other) for one, other in zip(found, right, strict=True) if one is not None]
    assert all(relative_error(one, other) < 1e-5 for one, other in pairs)
    assert late.counts().get("bytes up, pageable", 0) < 100


# torch's compiler looks at the attribute of every input
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("backend", cases(["eager", "aot_eager"], quick=["eager"]))
def test_compiled_layers(backend, order):
    """A layer that is compiled computes what it computes otherwise, on each of two devices."""
    late.set_order(*order)
    model, (inputs, labels) = small_model(dropout=0.0), batch(8)
    right = plainly(copy.deepcopy(model), inputs, labels)
    compiled = nn.Sequential(*[torch.compile(layer, backend=backend) for layer in model])
    found = trained(compiled, late_devices(2), inputs, labels)
    torch._dynamo.reset()
    assert all(relative_error(one, other) < 1e-5 for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_devices_of_different_memory(order):
    late.set_order(*order)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)])
    inputs, labels = torch.randn(8, 64), torch.randn(8, 64)
    right = trained(copy.deepcopy(model), late_devices(1), inputs, labels)
    size = sum(parameter.nbytes for parameter in model.parameters())
    limit = torch.accelerator.get_memory_info(0)[1]
    torch.accelerator.empty_cache()
    late.set_memory(0, size // 2)
    late.set_memory(1, 8 * size)
    try:
        found = trained(model, late_devices(2), inputs, labels)
    finally:
        for number in range(2):
            late.set_memory(number, limit)
    assert same_bits(found, right)
