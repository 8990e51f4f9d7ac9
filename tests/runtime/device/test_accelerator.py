"""An accelerator's copies run beside its computation, and nothing is read before it is there."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.device.accelerator import AcceleratorDevice, copy_in_pieces
from roundpipe_runtime.device.virtual import Device, parse_devices
from tests.runtime.device.late_device import LateStream, late_devices
from tests.runtime.small import (
    batch,
    checked_devices,
    cut_plan,
    gradients,
    relative_error,
    same_bits,
    small_model,
    state,
)

F = nn.functional
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator"),
]


def config(grain="stage"):
    plan = cut_plan(9, [2, 4], [3, 5], 2)
    return RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, execute_plan=plan, recompute_grain=grain)


def train(devices, grain="stage"):
    """Losses, gradients, buffers and weights after two steps of a model with everything."""
    model = small_model(tied=True, dropout=0.3, norm=True)
    pipe = RoundPipe(model, devices=devices, model_run_config=config(grain), pin_model="off")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    inputs, labels = batch(8)
    losses = []
    for _ in range(2):
        losses.append(pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss))
        pipe.step(optimizer.step)
    return [*losses, *state(model), *(p.detach().clone() for p in model.parameters())]


def train_in_two_halves(devices):
    """Gradients of forward() and backward(), of the inputs as well, and outputs without gradients."""
    model = small_model(tied=True, dropout=0.3, norm=True)
    pipe = RoundPipe(model, devices=devices, model_run_config=RoundPipeRunConfig(num_microbatch=3), pin_model="off")
    inputs, labels = batch(8)
    inputs.requires_grad_()
    F.mse_loss(pipe(inputs), labels).backward()
    with torch.no_grad():
        return [pipe(inputs), inputs.grad, *state(model)]


# -- on streams that do everything as late as they may -----------------------------------------------------------------


def test_a_late_device_is_a_device():
    """The double stands in the place of a real one."""
    with late_devices(1) as (device,):
        assert isinstance(device, Device)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_no_copy_is_read_before_it_is_there(count, grain):
    """The same bits as on virtual devices, whose copies are there at once."""
    with checked_devices(2) as virtual:
        expected = train(virtual, grain)
    with late_devices(count) as late:
        assert same_bits(train(late, grain), expected)


def test_forward_and_backward_wait_for_their_copies_too():
    """The classic way: outputs, input gradients and buffers."""
    with checked_devices(2) as virtual:
        expected = train_in_two_halves(virtual)
    with late_devices(2) as late:
        assert same_bits(train_in_two_halves(late), expected)


@pytest.mark.parametrize("name", ["_activations", "_compute", "_downloads"])
def test_a_stream_that_does_not_wait_is_found_out(name):
    """Without the waits of one stream the numbers are wrong: what the tests above show is not an accident."""
    with checked_devices(2) as virtual:
        expected = train_in_two_halves(virtual)
    with late_devices(2) as late:
        for device in late:
            getattr(device, name).waits = False
        assert not same_bits(train_in_two_halves(late), expected)


def test_parameters_may_change_as_soon_as_a_call_returns():
    """Nothing is left in a queue that would read the weights after the optimizer wrote them."""
    with late_devices(2) as late:
        train(late)
        streams = [stream for device in late for stream in vars(device).values() if isinstance(stream, LateStream)]
        assert len(streams) == 8
        assert [len(stream.queue) - stream.done for stream in streams] == [0] * 8


def test_the_allocator_is_told_of_every_stream_that_reads():
    """What is uploaded is read by the computation, what is downloaded by the download."""
    with late_devices(1) as (device,):
        copy = device.copy_in(torch.ones(2, 3), parameter=True)
        device.copy_in(torch.ones(4))
        device.copy_out(copy)
        assert device.recorded == [((2, 3), device._compute), ((4,), device._compute), ((2, 3), device._downloads)]


def test_an_activation_does_not_queue_behind_parameters():
    """It is there, while the parameters that were given before are not."""
    with late_devices(1) as (device,):
        weights = device.copy_in(torch.ones(3), parameter=True)
        activation = device.copy_in(torch.ones(2))
        device._activations.synchronize()
        assert activation.tolist() == [1, 1]
        assert weights.isnan().all()


def test_the_host_runs_two_stages_ahead_at_most():
    """The third stage begins when the first one has ended on the device."""
    ended = []

    class End:
        def __init__(self, number):
            self.number = number

        def synchronize(self):
            ended.append(self.number)

    with late_devices(1) as (device,):
        numbers = iter(range(4))
        device._compute.record_event = lambda: End(next(numbers))
        found = []
        for _ in range(4):
            with device.visit():
                found.append(list(ended))
    assert found == [[], [], [0], [0, 1]]


def test_a_sparse_gradient_comes_down():
    """There is no pinned memory for it, so it is waited for."""
    with late_devices(1) as (device,):
        host, event = device.copy_out(torch.eye(3).to_sparse())
        assert event.done()
        assert torch.equal(host.to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    ("source", "nbytes", "pieces"),
    [
        (torch.arange(10.0), 16, 3),
        (torch.arange(10.0), 40, 1),
        (torch.arange(10.0), 1, 10),
        (torch.arange(12.0).reshape(3, 4), 16, 3),
        (torch.arange(12.0).reshape(3, 4).T, 16, 1),
        (torch.tensor(3.0), 1, 1),
        (torch.empty(0), 16, 1),
    ],
)
def test_large_parameters_travel_in_pieces(source, nbytes, pieces):
    """Ten floats at 16 bytes a piece are three copies; a transposed one, which has no flat view, is one."""
    with late_devices(1) as (device,):
        target, stream = torch.full_like(source, float("nan")), device._parameters
        with stream:
            copy_in_pieces(target, source, nbytes)
        assert len(stream.queue) == pieces
        stream.synchronize()
    assert torch.equal(target, source)


# -- on a real one -----------------------------------------------------------------------------------------------------


class TestOnAnAccelerator:
    pytestmark = gpu

    def test_gradients_are_those_of_the_host(self):
        """Losses and gradients on the accelerator are those of virtual devices, but for the rounding of its kernels."""
        found = []
        for devices in (None, "virtual:2"):
            model, (inputs, labels) = small_model(tied=True), batch(8)
            pipe = RoundPipe(model, devices=devices, model_run_config=RoundPipeRunConfig(loss_reduction="mean"))
            for _ in range(5):
                loss = pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
            found.append((loss, gradients(model)))
            pipe.close()
        assert relative_error(found[0][0], found[1][0]) < 1e-4
        assert all(relative_error(found[0][1][name], gradient) < 1e-4 for name, gradient in found[1][1].items())

    def test_inputs_and_labels_may_live_on_the_accelerator(self):
        """What the caller computed there is waited for, and its gradient is where it is."""
        here = torch.accelerator.current_accelerator()
        model, (inputs, labels) = small_model(), batch(8)
        pipe = RoundPipe(model, devices=None, model_run_config=RoundPipeRunConfig(loss_reduction="mean"))
        plain, there = inputs.clone().requires_grad_(), inputs.to(here).requires_grad_()
        F.mse_loss(small_model()(plain * 2), labels).backward()
        pipe.forward_backward((there * 2,), label=labels.to(here), loss_fn=F.mse_loss)
        assert relative_error(there.grad.cpu(), plain.grad) < 1e-4
        pipe.close()

    def test_a_run_is_repeated_to_the_last_bit(self):
        """Dropout, norms and tied weights: the same seeds and the same bits, whatever overlaps."""
        (device,) = parse_devices([torch.accelerator.current_accelerator()])
        assert same_bits(train([device]), train([device]))

    def test_a_model_four_times_larger_than_a_limit_stays_under_it(self):
        """The peak of the device's memory, with a plan for a device that is given as small."""
        (device,) = parse_devices([torch.accelerator.current_accelerator()])
        model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(64)])
        size = sum(p.numel() * p.element_size() for p in model.parameters())

        class Small(AcceleratorDevice):
            memory = size // 4

        pipe = RoundPipe(
            model, devices=[Small(device.torch_device)], model_run_config=RoundPipeRunConfig(loss_reduction="mean")
        )
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        for _ in range(3):
            pipe.forward_backward((torch.randn(64, 1024),), loss_fn=lambda outputs, _: outputs.square().mean())
        assert torch.accelerator.max_memory_allocated() - before < size // 4
        pipe.close()
