"""Parameters and gradients of layers on a device: what stays there, and what leaves it."""

import gc
import itertools
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, VirtualDevice, WeightedLoss
from roundpipe_runtime.engine.parameters.on_device import LayerOnDevice
from roundpipe_runtime.engine.planner import FOR_PARAMETERS, Planner
from roundpipe_runtime.errors import DeviceMemoryError
from roundpipe_runtime.optim.layer_contents import scan
from tests.runtime import small
from tests.runtime.small import batch, cut_plan, gradients, near_gradients, same_bits, small_model, without_row_check

ROWS = 8


@pytest.fixture(params=[1, 2])
def devices(request):
    with small.checked_devices(request.param) as made:
        yield made


def small_device(model, share, number=0):
    """A device whose memory is a share of the model's parameters."""
    limit = int(share * sum(p.nbytes for p in model.parameters()))
    return VirtualDevice(f"virtual:{number}", memory_limit=limit, check=True)


def adapted(**options):
    """The small model, whose weights are frozen and whose biases train, as those of adapters do."""
    model = small_model(**options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def nbytes(model, trains):
    return sum(p.nbytes for p in model.parameters() if p.requires_grad is trains)


def pipe_of(model, devices, keep, **options):
    config = RoundPipeRunConfig(keep_parameters=keep, loss_reduction="mean", num_microbatch=3, **options)
    return RoundPipe(model, devices=devices, model_run_config=config)


def layer_by_layer(model):
    """A plan in which every layer is uploaded twice."""
    number = len(model)
    return cut_plan(number, list(range(1, number)), list(range(1, number)), fused=1)


def run(pipe):
    inputs, labels = batch(ROWS)
    pipe.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss)


def train(make, devices, keep, *, mode=False, fused=False, accumulate=1, dtype=None, steps=4):
    torch.manual_seed(3)
    model = make()
    config = RoundPipeRunConfig(keep_parameters=keep, loss_reduction="mean", num_microbatch=3)
    pipe = RoundPipe(model, devices=devices, optim_dtype=dtype, model_run_config=config)
    optimizer = torch.optim.Adam([p for p in pipe.optim_parameters() if p.requires_grad], lr=1e-2, fused=fused)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            inputs, labels = batch(ROWS - part, seed=10 * step + part)
            losses.append(pipe.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss))
        if mode == "by itself":
            optimizer.step()
            optimizer.zero_grad()
        else:
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=mode)
    pipe.synchronize()
    traffic = pipe.parameter_traffic
    pipe.close()
    return [*losses, *(value.clone() for value in model.state_dict().values())], traffic


CASES = [
    (mode, fused, accumulate, dtype)
    for mode, fused in itertools.product([False, True, "exact"], [False, True])
    for accumulate, dtype in [(1, None), (2, None if fused else torch.float64)]
]


@pytest.mark.parametrize(("mode", "fused", "accumulate", "dtype"), [*CASES, ("by itself", True, 2, None)])
@pytest.mark.parametrize("make", [adapted, small_model], ids=["adapters", "all train"])
def test_a_training_has_the_same_bits(make, mode, fused, accumulate, dtype):
    def made():
        return make(tied=True, dropout=0.2, norm=True)

    options = {"mode": mode, "fused": fused, "accumulate": accumulate, "dtype": dtype}
    plain, _ = train(made, "virtual:2:check", 0, **options)
    kept, traffic = train(made, "virtual:2:check", "auto", **options)
    assert same_bits(kept, plain)
    if make is adapted or accumulate > 1:
        assert traffic.reused > 0


@settings(max_examples=15)
@given(
    keep=st.sampled_from([0, 1e-7, 3e-7, 5e-7, "auto"]), forward=st.lists(st.integers(1, 6), max_size=5),
    backward=st.lists(st.integers(1, 6), max_size=5), fused=st.integers(1, 3), rows=st.integers(3, 7),
)  # fmt: skip
def test_no_plan_and_no_limit_changes_a_gradient(keep, forward, backward, fused, rows):
    """The whole model in plain PyTorch is the source, up to rounding: what is kept changes no bit of the pipeline."""
    found = []
    for kept in (0, keep):
        model = adapted(tied=True)
        plan = cut_plan(len(model), forward, backward, fused)
        with_plan = pipe_of(model, "virtual:2:check", kept, execute_plan=plan)
        for seed in range(3):
            inputs, labels = batch(rows, seed)
            with_plan.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss)
        with_plan.close()
        found.append([value for value in gradients(model).values() if value is not None])
    assert same_bits(*found)


def wide(number=12, width=64):
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(number)])
    for layer in layers[:-1]:
        layer.requires_grad_(False)
    return layers


def wide_loss(pipe):
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    return pipe.forward_backward((inputs,), label=inputs, loss_fn=nn.functional.mse_loss)


def run_wide(pipe):
    before = pipe.parameter_traffic
    wide_loss(pipe)
    after = pipe.parameter_traffic
    return after.uploaded - before.uploaded, after.reused - before.reused


@pytest.mark.parametrize("number", [1, 2])
def test_frozen_parameters_are_uploaded_once_per_device(number):
    """Where model and gradients do not fit, but parameters do. Stages go round, so each layer comes to each device."""
    model = wide()
    limited = [small_device(model, 1.3, place) for place in range(number)]
    options = {"execute_plan": layer_by_layer(model)}
    frozen, trained = nbytes(model, False), nbytes(model, True)
    without = without_row_check(pipe_of(wide(), limited, 0, **options))
    assert [run_wide(without), run_wide(without)] == [(2 * frozen + trained, 0)] * 2
    assert set(without.parameter_traffic.kept.values()) == {0}
    pipe = without_row_check(pipe_of(model, limited, 1.0, **options))
    first = run_wide(pipe)
    for _ in range(3):
        pipe.step(lambda: None)
        run_wide(pipe)
    assert sum(first) == 2 * frozen + trained  # the last layer has one stage
    assert pipe.parameter_traffic.kept == {device.name: frozen + trained for device in limited}
    assert run_wide(pipe) == (0, 2 * frozen + trained)  # no step since
    with torch.no_grad():
        model[-1].weight.add_(1)
    assert run_wide(pipe) == (model[-1].weight.nbytes, 2 * frozen + model[-1].bias.nbytes)
    pipe.close(), without.close()


WRITES = {
    "in place": lambda layer: layer.weight.mul_(2),
    "by .data": lambda layer: layer.weight.data.mul_(2),
    "another memory": lambda layer: setattr(layer.weight, "data", layer.weight.detach() * 2),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight * 2)),
    "thawed": lambda layer: layer.weight.requires_grad_(True),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_between_two_runs_is_seen(devices, write):
    model, plain = adapted(), adapted()
    pipe = pipe_of(model, devices, "auto")
    inputs, labels = batch(ROWS)
    for _ in range(2):
        with torch.no_grad():
            pipe(inputs)
    for one in (model, plain):
        with torch.no_grad():
            write(one[2])
    pipe.zero_grad()
    pipe.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(plain(inputs), labels).backward()
    assert near_gradients(model, plain, rtol=1.3e-6, atol=1e-5)


def test_a_write_that_no_sample_finds_needs_a_line(devices):
    """One number of many, by `.data`: the documented limit, and the line that helps."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
    pipe = pipe_of(model, devices, "auto")
    inputs = torch.ones(4, 100)
    with torch.no_grad():
        for _ in range(2):
            before = pipe(inputs)
        model[1].weight.data[0, 98] += 1.0
        stale = pipe(inputs)
        pipe.drop_kept_parameters()
        assert set(pipe.parameter_traffic.kept.values()) == {0}
        fresh = pipe(inputs)
        torch.testing.assert_close(fresh, model(inputs))
    assert torch.equal(stale, before) or torch.equal(stale, fresh)
    assert not torch.equal(fresh, before)


def test_only_so_many_bytes_stay_and_frozen_ones_first(devices):
    model = adapted()
    frozen = nbytes(model, False)
    pipe = pipe_of(model, devices, (frozen - 1) / 1e9, execute_plan=layer_by_layer(model))
    for _ in range(4):
        run(pipe)
        pipe.step(lambda: None)
    kept = pipe.parameter_traffic.kept
    assert all(frozen - 1 - max(p.nbytes for p in model.parameters()) <= found < frozen for found in kept.values())


# A share of the model as memory of a device, and what is asked to stay: what two stages leave, or more than there is
# memory for, so that an upload takes the room of what stays.
TIGHT = {"auto": (0.7, "auto"), "too much": (6.5 / 12, 1.0)}


@pytest.mark.parametrize(("share", "keep"), TIGHT.values(), ids=TIGHT)
def test_a_device_without_room_for_the_model_trains_it_all_the_same(share, keep):
    model = wide()
    device = small_device(model, share)
    pipes = [
        pipe_of(made, where, kept, execute_plan=layer_by_layer(model))
        for made, where, kept in ((model, [device], keep), (wide(), "virtual:1", 0))
    ]
    losses, expected = ([wide_loss(pipe) for _ in range(3)] for pipe in pipes)
    assert same_bits(losses, expected)
    traffic = pipes[0].parameter_traffic
    if keep == "auto":
        assert traffic.reused > 0
        assert 0 < traffic.kept[device.name] <= FOR_PARAMETERS * device.memory_limit
    device.close()


def test_activations_without_room_name_what_stays():
    model = wide()
    device = small_device(model, 1.2)
    pipe = pipe_of(model, [device], 1.0, execute_plan=layer_by_layer(model))
    wide_loss(pipe)
    inputs = torch.ones(300, 64)
    with pytest.raises(DeviceMemoryError) as error:
        pipe.forward_backward((inputs,), label=inputs, loss_fn=nn.functional.mse_loss)
    assert "keep_parameters" in "".join(error.value.__notes__)
    assert pipe.parameter_traffic.kept == {device.name: 0}
    wide_loss(pipe)
    device.close()


def test_a_call_with_none_a_failed_run_and_the_end_leave_nothing_on_a_device(devices):
    model = adapted()
    pipe = pipe_of(model, devices, "auto")
    run(pipe)
    assert sum(pipe.parameter_traffic.kept.values()) > 0
    with torch.no_grad():
        pipe(batch(ROWS)[0], roundpipe_run_config=RoundPipeRunConfig(keep_parameters=0))
    assert set(pipe.parameter_traffic.kept.values()) == {0}
    run(pipe)

    def fails(outputs, labels):
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        pipe.forward_backward((batch(ROWS)[0],), label=batch(ROWS)[1], loss_fn=fails)
    assert set(pipe.parameter_traffic.kept.values()) == {0}
    gc.collect()  # the error has the frames of the run
    run(pipe)
    other = pipe_of(adapted(seed=4), devices, "auto")
    run(other)
    pipe.close()
    assert set(pipe.parameter_traffic.kept.values()) == {0}
    assert sum(other.parameter_traffic.kept.values()) > 0  # that of another model stays
    held = other.parameter_traffic.kept
    assert all(device.allocated == held[device.name] for device in devices)
    other.close()
    assert all(device.allocated == 0 for device in devices)


@pytest.mark.parametrize(("found", "dtype", "fits"), [
    ([("cpu", None)], None, True), ([("cuda", 8000)], None, True), ([("cuda", 1000)], None, False),
    ([("cuda", None)], None, False), ([("cuda", 8000), ("cuda", None)], None, False),
    ([("cuda", 8000), ("cuda", 1000)], None, False), ([("cuda", 4000)], torch.float32, True),
    ([("cuda", 4000)], torch.float64, False),
])  # fmt: skip
def test_layers_stay_where_there_is_room_for_all(found, dtype, fits):
    """2,112 bytes of parameters and gradients in 60 %, as many more for sums in float64; unknown memory is no room."""
    devices = [types.SimpleNamespace(torch_device=torch.device(kind), memory=memory) for kind, memory in found]
    options = [] if dtype is None else [lambda parameter: dtype]
    assert Planner([nn.Linear(32, 8)], devices, *options).fits() is fits


@pytest.fixture
def device():
    with small.checked_devices(1) as made:
        yield made[0]


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
    assert near_gradients(model, plain)
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
    assert order[order.index(3) : order.index(1)] == [3, 2, "value", 3, "gradient", 2, "value", "gradient"]
