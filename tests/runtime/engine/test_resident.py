"""Tests of roundpipe_runtime.engine.parameters.on_device: gradients of a layer, from its backward to the host."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, VirtualDevice, WeightedLoss
from roundpipe_runtime.engine.parameters.on_device import LayerOnDevice
from roundpipe_runtime.optim.layer_contents import scan
from tests.runtime.small import batch, gradients, near, same_bits, small_model


@pytest.fixture
def device():
    made = VirtualDevice("virtual:0", check=True)
    yield made
    made.close()


class Made(TorchDispatchMode):
    """Bytes of the tensors that operations make."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and all(result is not arg for arg in args):
            self.nbytes += result.nbytes
        return result


def backward(resident, value):
    for parameter in resident._parameters.values():
        parameter.grad = torch.full_like(parameter, value)


@pytest.mark.parametrize(
    ("own", "sums"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64), (torch.float32, torch.bfloat16)]
)
def test_gradients_are_summed_in_the_dtype_of_the_optimizer(own, sums, device):
    """As if each was converted first: three microbatches of a number that bfloat16 rounds."""
    layer = nn.Linear(4, 2, bias=False, dtype=own)
    resident = LayerOnDevice(scan([layer])[0], device, lambda p: p, lambda p: sums)
    expected = torch.zeros(2, 4, dtype=sums)
    for value in (1.0, 0.3, 1e-3):
        backward(resident, value)
        resident.take_gradients()
        expected += torch.full((2, 4), value, dtype=own).to(sums)
    found, _ = resident.download_gradients(1.0, None)[layer.weight]
    assert found.dtype == sums
    assert torch.equal(found, expected)
    resident.release()


def test_a_wider_sum_takes_no_second_copy_of_a_gradient(device):
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    resident = LayerOnDevice(scan([layer])[0], device, lambda p: p, lambda p: torch.float32)
    made = []
    for _ in range(2):
        backward(resident, 1.0)
        with Made() as counted:
            resident.take_gradients()
        made.append(counted.nbytes)
    assert made == [64 * 64 * 4, 0]
    resident.release()


class Noting(VirtualDevice):
    """Notes each gradient as it is when it leaves the device, and in what order work is given to it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.left, self.order = [], []

    def copy_out(self, tensor, *, last=False, parameter=False, target=None):
        self.order.append("gradient" if parameter else "value")
        if parameter:
            self.left.append(tensor.clone())
        return super().copy_out(tensor, last=last, parameter=parameter, target=target)


def test_gradients_of_pairs_are_scaled_before_they_come_down():
    """What leaves the device is what the parameters have in the end: the host passes over none of them again."""
    model, plain = small_model(), small_model()
    inputs, labels = batch(10)
    nn.functional.mse_loss(plain(inputs), labels).backward()

    def loss_fn(outputs, labels):
        return WeightedLoss((outputs - labels).square().sum(), labels.numel())

    device = Noting("virtual:0")
    pipe = RoundPipe(model, devices=[device], model_run_config=RoundPipeRunConfig(num_microbatch=3))
    pipe._rp_engine.row_check = None  # which compares gradients of a few rows before
    pipe.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
    found = gradients(model)
    assert all(near(found[name], gradient) for name, gradient in gradients(plain).items())
    assert len(device.left) == len(found)
    assert all(any(same_bits([gradient], [one]) for one in device.left) for gradient in found.values())


def test_gradients_leave_as_soon_as_their_layer_went_back_for_the_last_time():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    device, order = Noting("virtual:0"), []
    device.order = order
    for number, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, number=number: order.append(number))
    plan = ModelExecutePlan([range(2)], [range(2, 4), range(2)])
    config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean", execute_plan=plan)
    pipe = RoundPipe(model, devices=[device], model_run_config=config)
    inputs = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):  # the first one checks its loss, for which outputs come down
        order.clear()
        pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
    fused = order[order.index(3) : order.index(1)]
    assert fused == [3, 2, "value", 3, "gradient", 2, "value", "gradient"]
