"""Copies, streams and memory of the reference accelerator, and its tests by `doctor`."""

import dataclasses
import json
import os

import pytest
import torch
from torch import nn

from roundpipe_runtime import DeviceError, ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.cli import doctor
from roundpipe_runtime.device.accelerator import AcceleratorDevice, copy_in_pieces, parse_devices
from roundpipe_runtime.device.pinning import PinnedModel
from roundpipe_runtime.device.protocol import Device
from roundpipe_runtime.estimate.hardware import DeviceRates
from tests import fresh_process
from tests.accelerator import late
from tests.accelerator.training import late_devices, train
from tests.runtime.small import same_bits


@pytest.fixture
def device():
    late.set_order("late")
    (made,) = late_devices(1)
    yield made
    made.close()


def test_an_activation_does_not_queue_behind_parameters(device):
    weights = torch.ones(3).pin_memory()
    there = device.copy_in(weights, parameter=True)
    activation = device.copy_in(torch.ones(2).pin_memory())
    device._activations.synchronize()
    weights.fill_(5)
    with device.computing():
        assert (activation.tolist(), there.tolist()) == ([1, 1], [5, 5, 5])


def test_a_tensor_may_be_written_in_place_after_its_download_was_given(device):
    with device.computing():
        there = torch.ones(3, device=device.torch_device)
    host, event = device.copy_out(there)
    with device.computing():
        there.fill_(5)
    device._compute.synchronize()
    event.result()
    assert host.tolist() == [1, 1, 1]


def test_the_host_waits_for_what_is_computed_of_a_sparse_gradient(device):
    class Sparse(torch.Tensor):
        layout = torch.sparse_coo

    with device.computing():
        there = torch.ones(3, device=device.torch_device).as_subclass(Sparse)
    host, event = device.copy_out(there)
    assert event.done()
    assert host.tolist() == [1, 1, 1]


def test_an_upload_waits_for_an_event_of_another_kind(device):
    host = torch.zeros(3).pin_memory()

    class Event:
        def done(self):
            return False

        def result(self):
            host.fill_(3)

    copy = device.copy_in(host, Event())
    with device.computing():
        assert copy.tolist() == [3, 3, 3]


@pytest.mark.parametrize("seed", range(3))
def test_parameters_may_change_as_soon_as_a_call_returns(seed):
    found = []
    for order in ("eager", "random"):
        late.set_order(order, seed)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        pipe = RoundPipe(model, devices=late_devices(2))
        pipe.forward_backward((torch.ones(6, 4),), loss_fn=lambda outputs, _: outputs.square().mean())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        for number in range(2):
            torch.accelerator.synchronize(number)
        assert same_bits(found[-1], [parameter.grad for parameter in model.parameters()])
        pipe.close()
    assert same_bits(*found)


def test_a_download_is_pinned(device):
    late.counts()
    with device.computing():
        there = torch.ones(1000, device=device.torch_device)
    host, event = device.copy_out(there)
    assert host.is_pinned()
    assert not host.eq(1).all()
    event.result()
    assert host.eq(1).all()
    assert late.counts()["bytes down, pinned"] == 4000


def test_all_copies_of_a_training_are_pinned():
    late.set_order("late")
    late.counts()
    train(late_devices(2))
    found = late.counts()
    assert "bytes down, pageable" not in found or found["bytes down, pageable"] < 100
    assert found.get("bytes up, pageable", 0) < 100


class Labelled(torch.Tensor):
    """A tensor of a class that knows itself where its data is."""


@pytest.mark.parametrize("make", [lambda w: w.as_subclass(Labelled), lambda w: w[:, ::2]], ids=["class", "gaps"])
def test_what_fits_into_no_slab_is_pinned_alone(device, make):
    weight = make(torch.arange(12.0).reshape(3, 4))
    kind, expected = type(weight), weight.tolist()
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    del weight  # while another tensor has the memory, the parameter is taken for a part of it
    PinnedModel(model, "alloc", [device])
    assert model.weight.is_pinned()
    assert type(model.weight.data) is kind
    assert model.weight.tolist() == expected


def test_the_host_runs_two_stages_ahead_at_most(device):
    flags = [torch.zeros(1).pin_memory() for _ in range(4)]
    found = []
    for flag in flags:
        with device.visit():
            found.append([int(flag.item()) for flag in flags])
            with device.computing():
                flag.copy_(torch.ones(1, device=device.torch_device), non_blocking=True)
    assert found == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]


def test_gradients_of_one_stage_only_are_still_under_way(device):
    targets = [torch.zeros(1).pin_memory() for _ in range(4)]
    found = []
    for target in targets:
        with device.visit():
            found.append([int(target.item()) for target in targets])
            with device.computing():
                gradient = torch.ones(1, device=device.torch_device)
            device.copy_out(gradient, last=True, parameter=True, target=target)
    assert found == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]


def test_large_parameters_travel_in_pieces(device):
    """Ten floats at 16 bytes a piece are three copies."""
    for nbytes, pieces in ((16, 3), (40, 1), (1, 10)):
        there, source = torch.empty(10, device=device.torch_device), torch.arange(10.0).pin_memory()
        late.counts()
        copy_in_pieces(there, source, nbytes)
        assert late.counts()["copies up, pinned"] == pieces
        assert there.cpu().equal(source)


@pytest.mark.parametrize(
    ("options", "keep", "overtaken"), [({}, False, False), ({"last": True}, False, True), ({"last": True}, True, False)]
)
def test_the_computation_waits_for_a_download_only_of_what_may_be_written_again(device, options, keep, overtaken):
    with device.computing():
        tensor = torch.ones(3, device=device.torch_device)
        kept = tensor.view(1, 3) if keep else None
    host, event = device.copy_out(tensor, **options)
    with device.computing():
        tensor.fill_(5.0)
    device._compute.synchronize()
    event.result()
    del kept
    assert (host.tolist() == [5, 5, 5]) is overtaken  # what comes down is what a computation before it wrote


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = None

    def forward(self, x):
        with torch.no_grad():
            self.seen = torch.zeros_like(x) if self.seen is None else self.seen.add_(1.0)
        return self.seen


@pytest.mark.filterwarnings("ignore:The outputs of a layer depend")
def test_a_layer_may_return_a_tensor_that_it_writes_again(device):
    pipe = RoundPipe(Counts(), devices=[device], model_run_config=RoundPipeRunConfig(num_microbatch=3))
    with torch.no_grad():
        assert pipe(torch.zeros(3, 1)).flatten().tolist() == [0, 1, 2]


def test_memory_of_a_download_is_not_used_again_before_it(device):
    with device.computing():
        tensor = torch.ones(1000, device=device.torch_device)
    host, event = device.copy_out(tensor, last=True)
    del tensor
    with device.computing():
        torch.full((1000,), 7.0, device=device.torch_device)
    device._compute.synchronize()
    event.result()
    assert host.eq(1).all()


def test_gradients_do_not_queue_before_activations(device):
    with device.computing():
        gradient, activation = (torch.ones(2, device=device.torch_device) for _ in range(2))
    large, _ = device.copy_out(gradient, last=True, parameter=True)
    large.fill_(3.0)
    small, event = device.copy_out(activation, last=True)
    event.result()
    assert (small.tolist(), large.tolist()) == ([1, 1], [3, 3])


def test_a_layer_waits_for_its_own_parameters_only(device):
    first, second = torch.ones(2).pin_memory(), torch.ones(2).pin_memory()
    there = device.copy_in(first, parameter=True)
    arrival = device.arrival()
    later = device.copy_in(second, parameter=True)
    with device.computing(arrival):
        assert (there * 2).tolist() == [2, 2]
    second.fill_(5.0)  # nothing has read it yet
    with device.computing():
        assert later.tolist() == [5, 5]


def test_the_host_runs_ahead_of_a_small_stage(device):
    flags = [torch.zeros(1).pin_memory() for _ in range(5)]
    found = []
    for flag, nbytes in zip(flags, [100, 100, 1, 100, 1], strict=True):
        with device.visit(nbytes):
            found.append(sum(int(one.item()) for one in flags))
            with device.computing():
                flag.copy_(torch.ones(1, device=device.torch_device), non_blocking=True)
    assert found == [0, 0, 0, 1, 2]


def test_a_tensor_that_a_layer_makes_on_the_host_is_refused(device):
    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones(len(x), 1)

    pipe = RoundPipe(nn.Sequential(Constant()), devices=[device])
    with torch.no_grad(), pytest.raises(DeviceError, match=r"shape \(1, 1\) is on cpu.*late:0") as error:
        pipe(torch.zeros(2, 1))
    assert "layer 0 (Constant)" in error.value.__notes__[0]


def test_costs_are_what_the_device_computed(device):
    class Product(nn.Module):
        def forward(self, x):
            large = x.new_ones(600, 600)
            return x + (large @ large).sum() * 0

    class Additions(nn.Module):
        def forward(self, x):
            for _ in range(10):
                x = x + 1
            return x

    pipe = RoundPipe(nn.Sequential(Product(), Additions()), devices=[device])
    with torch.no_grad():
        for _ in range(3):
            pipe(torch.zeros(2, 1))
    product, additions = pipe._rp_engine.planner.layer_costs("infer")
    assert product.forward > 3 * additions.forward


def test_parameters_are_pinned_in_slabs_after_a_step_in_the_background(device):
    """What the stages read then is a copy of the parameters: every upload of it comes from pinned memory."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    pipe = RoundPipe(model, devices=[device], model_run_config=RoundPipeRunConfig(loss_reduction="mean"))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(3):
        late.counts()
        pipe.forward_backward((torch.ones(2, 64),), loss_fn=lambda outputs, _: outputs.square().mean())
        found = late.counts()
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)
    pipe.synchronize()
    assert found["bytes up, pinned"] >= 4 * 64 * 64 * 4
    assert found.get("bytes up, pageable", 0) == 0
    assert found["bytes down, pinned"] >= 4 * 64 * 64 * 4


def test_a_failed_run_leaves_nothing_on_its_way():
    class Fails(nn.Module):
        def forward(self, x):
            raise ArithmeticError

    late.set_order("late")
    devices = late_devices(2)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Fails()]
    pipe = RoundPipe(nn.Sequential(*layers), devices=devices)
    with pytest.raises(ArithmeticError):
        pipe.forward_backward((torch.ones(4, 8),), loss_fn=lambda outputs, _: outputs.square().mean())
    pending = [late.pending(number) for number in range(2)]  # on other streams, memory is still given back
    for device in devices:
        for stream in device.streams:
            stream.synchronize()
    assert [late.pending(number) for number in range(2)] == pending
    pipe.close()


WIDTH, LAYERS, ROWS, MICROBATCHES = 256, 10, 4, 3
WEIGHT, ACTIVATION = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH


class Layer(nn.Module):
    """A weight, and a number of the device that the host waits for."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.asks = asks

    def forward(self, x):
        x = self.linear(x)
        return x * float(x.detach().sum().item() < 1e9) if self.asks else x


def pipeline(*, asks, layers_per_stage=2):
    model = nn.Sequential(*[Layer(asks=asks) for _ in range(LAYERS)])
    stages = [range(first, first + layers_per_stage) for first in range(0, LAYERS, layers_per_stage)]
    config = RoundPipeRunConfig(
        loss_reduction="mean", num_microbatch=MICROBATCHES, execute_plan=ModelExecutePlan(stages[:-1], stages[::-1])
    )
    return RoundPipe(model, devices=late_devices(1), model_run_config=config)


def step(pipe):
    loss = pipe.forward_backward(
        (torch.ones(MICROBATCHES * ROWS, WIDTH),), loss_fn=lambda outputs, _: outputs.square().mean()
    )
    pipe.zero_grad()
    return loss


@pytest.mark.parametrize("order", [("late", 0), ("random", 1), ("random", 2)], ids=str)
@pytest.mark.parametrize("asks", [False, True])
def test_the_device_holds_two_stages_and_their_activations(asks, order):
    pipe = pipeline(asks=asks)
    late.set_order(*order)
    right = step(pipe)
    stages = 2 * 2 * 2 * WEIGHT
    activations = 2 * MICROBATCHES * (2 + 2 * 2) * ACTIVATION
    bound = 1.05 * stages + WEIGHT + activations
    limit = torch.accelerator.get_memory_info(0)[1]
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    late.set_memory(0, int(before + bound))
    try:
        assert step(pipe).equal(right)
    finally:
        late.set_memory(0, limit)
    assert torch.accelerator.max_memory_allocated(0) - before <= bound
    pipe.close()


def test_pinned_memory_is_that_of_the_tensors():
    late.set_order("late")
    late.counts()
    pipe = pipeline(asks=False)
    size = LAYERS * WEIGHT
    assert size <= late.counts()["pinned bytes"] <= 1.02 * size
    activations = MICROBATCHES * (2 * LAYERS + 4) * ACTIVATION
    step(pipe)
    assert size <= late.counts()["pinned bytes"] <= 1.02 * size + activations
    step(pipe)
    assert late.counts()["pinned bytes"] <= activations
    pipe.close()


def test_a_stage_is_uploaded_while_the_one_before_makes_the_host_wait():
    late.set_order("eager")
    pipe, sent = pipeline(asks=True), [0]
    for _ in range(2):  # the first two runs upload parameters once more, to look whether a layer wrote them
        step(pipe)

    def note(module, arguments):
        sent.append(sent[-1] + late.counts().get("bytes up, pinned", 0))

    for layer in pipe:
        layer.register_forward_pre_hook(note)
    late.counts()
    step(pipe)
    calls = MICROBATCHES * 2
    assert [sent[calls * stage] // WEIGHT for stage in range(1, 5)] == [4, 6, 8, 10]
    pipe.close()


_PROGRAM = """
import dataclasses, json, os, torch
from tests.accelerator import late
from roundpipe_runtime.estimate.hardware import measure_device
late.set_costs(flops=120e12, memory=0.9e12, link=25e9, pageable_link=6e9)
print(json.dumps(dataclasses.asdict(measure_device(torch.device("late", 0)))), flush=True)
os._exit(0)
"""


def test_rates_are_those_of_the_device():
    """25 GB/s each way at the same time, 6 GB/s pageable, 120 TFLOP/s, and copies next to kernels."""
    found = json.loads(fresh_process.run("-c", _PROGRAM, env={**os.environ, "LATE_DRY": "1"}).stdout)
    expected = {"up": 25e9, "down": 25e9, "both": 50e9, "pageable_up": 6e9, "pageable_down": 6e9, "flops": 120e12}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0.02)
    assert found["overlap"] == pytest.approx(1.0, abs=0.05)


def test_a_device_has_its_memory_and_a_new_pipeline_takes_the_streams_of_a_closed_one():
    """torch hands out 32 streams in turn: without it the seventh pipeline computes on a stream of the first."""
    first = parse_devices(["late:1"])[0]
    assert isinstance(first, AcceleratorDevice)
    assert isinstance(first, Device)
    assert first.memory == 16 * 2**30  # all of which it has for itself
    first.close()
    (second,) = parse_devices(["late:1"])
    assert second is not first
    assert second.streams == first.streams
    second.close()


def test_every_device_is_looked_over():
    late.set_order("late")
    found = {check.name: check for check in doctor.examine()}
    parts = ("link of", "speed of", "streams of", "events of", "plan for")
    assert {f"{what} late:{number}" for what in parts for number in range(late.DEVICES)} <= {*found}
    assert "of 17.2 GB free" in found["late:3"].found
    assert found["training on late:0, late:1, late:2, late:3"].status == "ok"
    assert [check for check in found.values() if check.status == "fail"] == []


def test_what_was_measured_is_judged(monkeypatch):
    """2 bytes up at 50 GB/s take as long as 2 operations of 10,000 tokens at 500 TFLOP/s."""
    good = DeviceRates(50e9, 40e9, 80e9, 8e9, 6e9, 500e12, 0.95, 1.0)
    for changed, what, status, words in [
        ({}, "link of", "ok", "50 GB/s up, 40 GB/s down, 80 GB/s both at once"),
        ({"down": 3e9}, "link of", "warning", "3 GB/s down"),
        ({"overlap": 0.1}, "streams of", "warning", "10%"),
        ({"clock": 0.01}, "events of", "warning", "0.01 s"),
        ({}, "speed of", "ok", "500 TFLOP/s"),
        ({}, "plan for", "ok", "from 10,000 tokens per step on"),
    ]:
        rates = dataclasses.replace(good, **changed)
        monkeypatch.setattr(doctor, "measure_device", lambda device, rates=rates: rates)
        (found,) = (check for check in doctor.device_checks(torch.device("late:0")) if check.name == f"{what} late:0")
        assert found.status == status
        assert words in found.found
        assert bool(found.remedy) is (status != "ok")
