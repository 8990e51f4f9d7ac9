"""What waits for what on an accelerator of the runtime, and what does not have to."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import DeviceError, RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.device.accelerator import AcceleratorDevice, parse_devices
from tests.accelerator import late
from tests.accelerator.training import late_devices


@pytest.fixture
def device():
    late.set_order("late")
    (made,) = late_devices(1)
    yield made
    made.close()


def is_overtaken(device, **options):
    """Whether the computation that follows a download is done before it: what comes down is what it wrote."""
    with device.computing():
        tensor = torch.ones(3, device=device.torch_device)
        kept = [tensor.view(1, 3)] if options.pop("keep", False) else []
    host, event = device.copy_out(tensor, **options)
    with device.computing():
        tensor.fill_(5.0)
    device._compute.synchronize()
    event.result()
    del kept
    return host.tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("options", "overtaken"), [({}, False), ({"last": True}, True), ({"last": True, "keep": True}, False)]
)
def test_the_computation_waits_for_a_download_only_of_what_may_be_written_again(device, options, overtaken):
    """The caller states that it does not write it; a layer that holds a view may, and is waited for."""
    assert is_overtaken(device, **options) is overtaken


class Counts(nn.Module):
    """Returns a tensor that it writes again at the next call."""

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


def test_memory_is_known_and_what_other_processes_leave(device):
    """The reference accelerator has 16 GiB, all of which it has for itself."""
    assert device.memory == 16 * 2**30
    late.set_memory(0, 2**30)
    try:
        assert device.memory == 2**30
    finally:
        late.set_memory(0, 16 * 2**30)


def test_a_new_pipeline_takes_the_streams_of_a_closed_one():
    """torch hands out 32 streams in turn: without it the seventh pipeline computes on a stream of the first."""
    first = parse_devices(["late:1"])[0]
    assert isinstance(first, AcceleratorDevice)
    first.close()
    (second,) = parse_devices(["late:1"])
    assert second is not first
    assert second.streams == first.streams
    second.close()


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
