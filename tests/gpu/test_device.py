"""A device copies in and out, waits for what the caller computed there, and repeats a run to the last bit."""

import itertools

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, Timeline
from roundpipe_runtime.cli.doctor import train_difference
from roundpipe_runtime.device.accelerator import AcceleratorDevice
from roundpipe_runtime.estimate.hardware import measure_device
from roundpipe_runtime.fine_tune.records import device_peak
from tests.gpu.place import on_a_device
from tests.runtime.small import batch, cut_plan, relative_error, same_bits, small_model, state
from yobx_flatten import string_type

F = nn.functional
pytestmark = on_a_device
_MEAN = RoundPipeRunConfig(loss_reduction="mean")


def train(place, grain="stage"):
    """Losses, gradients, buffers and weights after two steps of a model with everything."""
    model = small_model(tied=True, dropout=0.3, norm=True)
    plan = cut_plan(9, [2, 4], [3, 5], 2)
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, execute_plan=plan, recompute_grain=grain)
    pipe = RoundPipe(model, devices=place.devices, model_run_config=config, pin_model="off")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    inputs, labels = batch(8)
    losses = []
    for _ in range(2):
        losses.append(pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss))
        pipe.step(optimizer.step)
    pipe.close()
    return [*losses, *state(model), *(p.detach().clone() for p in model.parameters())]


def test_it_copies_in_and_out(place):
    copy = place.device.copy_in(torch.arange(4.0))
    with place.device.computing():
        copy = copy * 2
    back, event = place.device.copy_out(copy)
    event.result()
    assert back.tolist() == [0, 2, 4, 6]
    place.device.release([copy])


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(12).reshape(3, 4).T, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.empty(0, 3),
     torch.tensor(True), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64)],
    ids=["transposed", "channels last", "empty", "bool", "bfloat16", "complex"],
)  # fmt: skip
def test_every_kind_of_tensor_travels(place, tensor):
    copy = place.device.copy_in(tensor)
    back, event = place.device.copy_out(copy)
    event.result()
    assert torch.equal(back, tensor)
    assert back.dtype == tensor.dtype
    place.device.release([copy])


def test_inputs_and_labels_may_live_on_the_device(place):
    here = place.torch_device
    model, (inputs, labels) = small_model(), batch(8)
    pipe = place.wrap(model, model_run_config=_MEAN)
    plain, there = inputs.clone().requires_grad_(), inputs.to(here).requires_grad_()
    F.mse_loss(small_model()(plain * 2), labels).backward()
    pipe.forward_backward((there * 2,), label=labels.to(here), loss_fn=F.mse_loss)
    assert there.grad.device.type == here.type
    assert relative_error(there.grad.cpu(), plain.grad) < 1e-4
    pipe.close()


@pytest.mark.parametrize("what", ["inputs", "labels"])
def test_what_another_stream_computes_is_waited_for(place, what):
    place.needs_accelerator("streams")
    here = place.torch_device
    inputs, labels = batch(8)
    model = small_model()
    expected = F.mse_loss(small_model()(inputs), labels)
    pipe = place.wrap(model, model_run_config=_MEAN)
    tensors = {"inputs": inputs, "labels": labels}
    with torch.Stream(here):
        busy = torch.full((512, 512), 1.0 / 512, device=here)
        for _ in range(50):
            busy = busy @ busy
        tensors[what] = tensors[what].to(here) + (busy[0, 0] - 1.0 / 512).round()
        loss = pipe.forward_backward((tensors["inputs"],), label=tensors["labels"], loss_fn=F.mse_loss)
    assert relative_error(loss.cpu(), expected) < 1e-5
    pipe.close()


def test_outputs_on_the_device_are_ready_for_the_caller_s_stream(place):
    config = RoundPipeRunConfig(output_device=place.torch_device, num_microbatch=2)
    pipe = place.wrap(small_model(), model_run_config=config)
    inputs, _ = batch(8)
    with torch.no_grad():
        found = pipe(inputs) * 2
        expected = small_model()(inputs) * 2
    assert found.device.type == place.torch_device.type
    assert relative_error(found.cpu(), expected) < 1e-5
    pipe.close()


def test_a_sparse_gradient_comes_down(place):
    """There is no pinned memory for it, so it is waited for."""
    host, event = place.device.copy_out(torch.eye(3).to_sparse().to(place.torch_device))
    event.result()
    assert torch.equal(host.to_dense(), torch.eye(3))


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_a_run_is_repeated_to_the_last_bit(place, grain):
    assert same_bits(train(place, grain), train(place, grain))


@pytest.mark.extended  # fifty seconds where kernels are those of the CPU
def test_a_model_four_times_larger_than_a_limit_stays_under_it(place):
    place.needs_accelerator("memory of its own")
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(64)])
    size = sum(p.numel() * p.element_size() for p in model.parameters())

    class Small(AcceleratorDevice):
        memory = size // 4

    pipe = place.wrap(model, devices=[Small(place.torch_device)], model_run_config=_MEAN)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    for _ in range(3):
        pipe.forward_backward((torch.randn(64, 1024),), loss_fn=lambda outputs, _: outputs.square().mean())
    assert torch.accelerator.max_memory_allocated() - before < size // 4
    pipe.close()


def test_its_peak_is_told(place):
    place.needs_accelerator("memory of its own")
    held = torch.ones(2**20, device=place.torch_device)
    assert device_peak([place.device]) >= held.nbytes


def test_its_rates_are_those_of_a_device(place):
    place.needs_accelerator("link")
    small = {} if place.torch_device.type == "cuda" else {"nbytes": 2**20, "rows": 128}
    rates = measure_device(place.torch_device, **small)
    assert min(rates.up, rates.down, rates.both, rates.flops, rates.clock) > 0
    if place.torch_device.type == "cuda":
        assert rates.up > rates.pageable_up


def test_the_doctor_s_training_is_that_of_plain_pytorch(place):
    assert train_difference(place.devices) < 1e-4


def test_a_timeline_shows_every_layer_s_call(place):
    model = small_model()
    pipe = place.wrap(model)
    with Timeline() as timeline:
        pipe.forward_backward((batch(8)[0],), loss_fn=lambda outputs, _: outputs.square().mean())
    forward = sorted((one for one in timeline.records if one.kind == "forward"), key=lambda one: one.start)
    assert len(forward) == 2 * len(model)
    assert all(one.end <= two.start + 1e-6 for one, two in itertools.pairwise(forward))
    assert all(one.start <= one.end for one in timeline.records)
    pipe.close()


def test_values_are_described_from_the_device(place):
    tensor = torch.ones(2, device=place.torch_device)
    found = string_type([tensor], with_shape=True, with_min_max=True, with_device=True)
    assert found == f"#1[{'C' if tensor.device.type == 'cpu' else 'G'}T1s2[1.0,1.0:A1.0]]"
