"""Steps that are simulated, next to steps that ran, and to sums by hand."""

import dataclasses
import threading
import time

import pytest
import torch
from torch import nn

from roundpipe_runtime import LayerCost, ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig, Timeline
from roundpipe_runtime.device import disk
from roundpipe_runtime.device.disk import DiskMemory
from roundpipe_runtime.errors import ConfigError
from roundpipe_runtime.estimate import Hardware, measure_layers, simulate, step_plan
from roundpipe_runtime.schedule.timeline import device_totals
from tests.runtime.device.logical_clock import LogicalDevice, TimedLayer, stamp_mailboxes

WIDTH, ROWS, MICROBATCHES = 64, 16, 2
PARAMETERS = WIDTH * WIDTH


def machine(count=1, **rates):
    given = {"flops": 1e9, "link": 1e6, "memory": None, "host": None, "host_rate": 1e7, "origin": {}, **rates}
    kind = given.pop("kind", "cuda")
    return Hardware(names=tuple(f"{kind}:{index}" for index in range(count)), kind=kind, **given)


def start(used):
    for device in used:
        device.now, device.bytes_up, device.bytes_down = 0.0, 0, 0


def assert_predicted(run, used):
    assert run.links == [(device.bytes_up, device.bytes_down) for device in used]
    assert run.time == pytest.approx(max(device.now for device in used), rel=0.02)


@pytest.fixture(scope="module")
def step():
    """Three matrices, a forward stage of two layers, and a stage for each layer going back."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(3)])
    layers = measure_layers(list(model), (torch.empty(ROWS, WIDTH, device="meta"),))
    plan = ModelExecutePlan([range(2)], [range(2, 3), range(1, 2), range(1)])
    return step_plan(plan, layers, model, num_microbatch=MICROBATCHES, tokens=MICROBATCHES * ROWS)


@pytest.mark.parametrize("fits", [True, False], ids=["layers stay", "layers travel"])
@pytest.mark.parametrize(
    ("seconds", "devices", "microbatches", "copies"),
    [
        ([0.5, 1.0, 1.0, 1.0, 3.0], 2, 3, 1),
        ([1.0] * 6, 3, 4, 1),
        ([0.1, *[1.0] * 7, 2.0], 4, 9, 1),
        ([1.0] * 3, 1, 1, 1),
        ([1.0, 1.0, 1.0, 3.0], 3, 5, 2),
        ([0.1, *[1.0] * 5, 6.0], 4, 9, 3),
    ],
)
def test_a_step_takes_as_long_as_simulated(seconds, devices, microbatches, copies, fits, monkeypatch):
    """The engine on devices whose clocks only layers and copies advance: seconds, bubble, and bytes of each link."""
    stamp_mailboxes(monkeypatch)
    link = 1e4
    layers = [TimedLayer(WIDTH // 4, one) for one in seconds]
    costs = [LayerCost(one, 3 * one) for one in seconds]
    plan = ModelExecutePlan.auto("fused", costs, min_stages=devices, last_stage_copies=copies)
    config = RoundPipeRunConfig(num_microbatch=microbatches, loss_reduction="mean", execute_plan=plan)
    used = [LogicalDevice(f"virtual:{index}", link) for index in range(devices)]
    pipe = RoundPipe(nn.Sequential(*layers), devices=used, model_run_config=config)
    monkeypatch.setattr(pipe._rp_engine.planner, "fits", lambda: fits)
    inputs = torch.ones(microbatches, WIDTH // 4)
    cursor = pipe._rp_engine.round_robin.cursor
    for _ in range(3):  # calls 1, 2, 4, 8, ... also try rows, for the proofs of rows and of the loss
        pipe._rp_engine.round_robin.cursor = cursor
        start(used)
        with Timeline() as timeline:
            pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.close()

    found = measure_layers(layers, (inputs[:1],))
    step = step_plan(plan, found, pipe.model, num_microbatch=microbatches, tokens=microbatches, measured=costs)
    here = dataclasses.replace(machine(devices, link=link), kind="cpu")
    predicted = simulate(step, here, stays=fits).run
    assert_predicted(predicted, used)
    busy = sum(totals.busy for totals in device_totals(timeline.records))
    assert predicted.bubble == pytest.approx(1 - busy / devices / max(device.now for device in used), abs=0.01)


ROOM = {"none": 0, "the first frozen one": 1, "frozen": 3, "frozen and one that trains": 4, "auto": "auto"}


@pytest.mark.parametrize("fits", [True, False], ids=["fits", "does not fit"])
@pytest.mark.parametrize(("devices", "copies"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("room", ROOM)
def test_parameters_that_stay_are_copied_as_often_as_simulated(room, devices, copies, fits, monkeypatch):
    """The engine in a later step, after an optimizer wrote what trains: bytes of each link, and the time they take."""
    stamp_mailboxes(monkeypatch)
    width, link, microbatches = WIDTH // 4, 1e4, 3
    seconds = [0.5, 1.0, 1.0, 1.0, 3.0]
    layers = [TimedLayer(width, one).requires_grad_(place in (0, 4)) for place, one in enumerate(seconds)]
    layers[0].register_buffer("scale", torch.ones(width))
    size = 4 * width * width
    keep = ROOM[room] if room == "auto" else ROOM[room] * size / 1e9
    plan = ModelExecutePlan([range(2), range(2, 4)], [range(4, 5), range(2, 4), range(1, 2), range(1)], copies)
    config = RoundPipeRunConfig(
        num_microbatch=microbatches, loss_reduction="mean", execute_plan=plan, keep_parameters=keep
    )
    used = [LogicalDevice(f"virtual:{index}", link) for index in range(devices)]
    pipe = RoundPipe(nn.Sequential(*layers), devices=used, model_run_config=config)
    planner = pipe._rp_engine.planner
    memory = 40 * size  # of which 60 % are for parameters
    monkeypatch.setattr(planner, "fits", lambda: fits)
    monkeypatch.setattr(planner, "memory_limit", lambda: 0.6 * memory / 1e9)
    optimizer = torch.optim.SGD([layers[0].weight, layers[4].weight], lr=0.1)
    inputs = torch.ones(microbatches, width)
    # Each device has seen what it comes to, the round begins anew, and the call tries no rows, as 1, 2, 4, 8, ... do.
    for _ in range(7 if devices == 3 else 3):
        start(used)
        first = pipe._rp_engine.round_robin.cursor
        pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    pipe.close()
    assert first == 0

    found = measure_layers(layers, (inputs[:1],))
    costs = [LayerCost(one, 3 * one) for one in seconds]
    step = step_plan(plan, found, pipe.model, num_microbatch=microbatches, tokens=microbatches, measured=costs)
    here = dataclasses.replace(machine(devices, link=link, memory=memory), kind="cpu")
    predicted = simulate(step, here, stays=fits, keep_parameters=keep)
    assert_predicted(predicted.run, used)
    if room != "none":
        assert predicted.run.bytes_up < simulate(step, here, stays=fits).run.bytes_up


def test_bytes_of_a_link_are_those_that_are_copied(step):
    """Layers that stay go up once, others for each visit; gradients go down once, activations per microbatch."""
    weights, passed = 4 * PARAMETERS, 4 * ROWS * WIDTH
    staying = simulate(step, machine())
    moving = simulate(step, machine(), stays=False)
    assert staying.stays
    # into each of the four stages, and gradients into the last two;
    # out of the first three, and what layer 1 starts from when it goes back
    up = MICROBATCHES * (4 + 2) * passed
    assert staying.run.links == [(3 * weights + up, 3 * weights + MICROBATCHES * 4 * passed)]
    assert moving.run.bytes_up - staying.run.bytes_up == 2 * weights
    with pytest.raises(ConfigError, match='keep_parameters must be a number of GB of at least 0, or "auto", found -1'):
        simulate(step, machine(), keep_parameters=-1)


def test_the_optimizer_waits_for_the_run_or_goes_next_to_it(step):
    """Seven numbers a parameter at 10 MB/s."""
    optimizer = 7 * 4 * 3 * PARAMETERS / 1e7
    after, late, exact = (simulate(step, machine(link=1e9), is_async=how) for how in (False, True, "exact"))
    assert after.optimizer_seconds == pytest.approx(optimizer)
    assert after.seconds == pytest.approx(after.run.time + optimizer)
    assert late.seconds == max(late.run.time, optimizer)
    assert late.seconds < exact.seconds < after.seconds
    # the last layer, forward and backward, and the backward of those before it, come after its update
    assert exact.seconds >= optimizer + 3 * 2 * 2 * ROWS * PARAMETERS / 1e9


def test_bubbles_are_all_of_the_time_without_computation(step):
    """Transfers, optimizer, and dependencies."""
    for how, call in ((False, 0.0), (False, 0.01), ("exact", 0.0), ("exact", 0.01)):
        found = simulate(step, machine(2, call=call), is_async=how)
        computed = found.run.busy / 2 / found.seconds
        assert sum(found.bubbles.values()) + computed == pytest.approx(1)
    # a run that waits for updates inside of it waits for the optimizer
    quick = simulate(step, machine(2, link=1e12), is_async="exact")
    alone = simulate(step, machine(2, link=1e12)).run.time
    assert quick.bubbles["optimizer"] == pytest.approx(1 - alone / quick.seconds)
    found = simulate(step, machine(2))
    assert found.bubbles["optimizer"] == pytest.approx(found.optimizer_seconds / found.seconds)
    assert found.bubbles["transfer"] == pytest.approx((found.run.time - found.unhindered.time) / found.seconds)


def test_what_is_busy_longest_depends_on_the_rows():
    """Copies of parameters take the same time for any number of rows, computation grows with them."""
    rates = machine(host_rate=1e12, link=1e8)
    found = {}
    for rows in (2, 128):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(3)])
        layers = measure_layers(list(model), (torch.empty(rows, WIDTH, device="meta"),))
        plan = ModelExecutePlan([range(2)], [range(2, 3), range(1, 2), range(1)])
        planned = step_plan(plan, layers, model, num_microbatch=MICROBATCHES, tokens=MICROBATCHES * rows)
        found[rows] = simulate(planned, rates, stays=False)
        # forward of two layers; 6 of the fused one and of layer 1; layer 0 needs no gradient of its input
        operations = (2 * 2 + 6 + 6 + 4) * PARAMETERS * MICROBATCHES * rows
        assert found[rows].busy["compute"] == pytest.approx(operations / rates.flops)
        # parameters of five layers; a microbatch goes up to each stage, with a gradient to those that go back
        copied = 5 * 4 * PARAMETERS + 6 * 4 * WIDTH * MICROBATCHES * rows
        assert found[rows].busy["link up"] == pytest.approx(copied / rates.link)
    assert [one.bottleneck for one in found.values()] == ["link up", "compute"]


def test_what_a_call_costs_the_host_counts(step):
    """Virtual devices compute after the call, accelerators meanwhile; all share one interpreter."""
    virtual, card = machine(kind="virtual", call=0.3), machine(call=0.3)
    virtual = dataclasses.replace(virtual, kind="cpu")
    free = simulate(step, dataclasses.replace(virtual, call=0.0))
    found = simulate(step, virtual)
    # two layers in the forward stage, a third of a call each; three going back, two thirds
    assert found.run.time - free.run.time == pytest.approx(MICROBATCHES * 0.3 * (2 / 3 + 3 * 2 / 3))
    assert found.busy["interpreter"] == pytest.approx(3 * MICROBATCHES * 0.3)
    called = simulate(step, card)
    assert called.run.busy == pytest.approx(MICROBATCHES * 0.3 * (2 / 3 + 3 * 2 / 3))
    assert called.bottleneck == "interpreter"
    # measured seconds take the place of operations, with the forward that is computed again in the backward
    measured = [LayerCost(0.5, 2.0), LayerCost(0.25, 1.0), LayerCost(0.125, 0.5)]
    found = simulate(dataclasses.replace(step, measured=measured), machine())
    assert found.run.busy == MICROBATCHES * (0.5 + 0.25 + 0.5 + 1.0 + 2.0)


def test_peaks_are_those_of_the_estimate_of_memory(step):
    """A layer on its own, with its gradient; a card has the next one too."""
    (virtual,) = simulate(step, dataclasses.replace(machine(), kind="cpu"), stays=False).device_memory
    (card,) = simulate(step, machine(), stays=False).device_memory
    assert virtual.parameters + virtual.gradients >= 2 * 4 * PARAMETERS
    assert card.arriving >= virtual.arriving == 0
    assert simulate(step, machine()).host_memory.optimizer == 2 * 4 * 3 * PARAMETERS


# -- a state on a disk of known rates ----------------------------------------------------------------------------------


WIDE, FEW, LAYERS = 256, 8, 4
MATRIX = 4 * WIDE * WIDE  # bytes in float32


def with_disk(**rates):
    quick = {"flops": 1e15, "link": 1e15, "host_rate": 1e15, **rates}
    return dataclasses.replace(machine(kind="virtual", **quick), kind="cpu")


def planned(optim_dtype=None, dtype=torch.float32, measured=None, plan=None):
    """A matrix per layer, two forward stages and one for each layer going back."""
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False, device="meta", dtype=dtype) for _ in range(LAYERS)])
    sums = optim_dtype or dtype
    inputs = (torch.empty(FEW, WIDE, device="meta", dtype=dtype),)
    layers = measure_layers(list(model), inputs, gradient_dtype=lambda parameter: sums)
    plan = plan or ModelExecutePlan([range(2), range(2, 3)], [range(3, 4), range(2, 3), range(1, 2), range(1)])
    count = {"num_microbatch": 2, "tokens": 2 * FEW}
    return step_plan(plan, layers, model, optim_dtype=optim_dtype, measured=measured, **count)


def test_bytes_are_those_of_the_parts():
    """bfloat16 with master weights: what is on the disk, and what passes there in a run, for the norm, in the step."""
    disk = simulate(planned(torch.float32, torch.bfloat16), with_disk(disk_read=1e9, disk_write=1e9), host="disk").disk
    whole = LAYERS * MATRIX
    assert disk.nbytes == whole // 2 + whole + whole + 2 * whole
    assert disk.read_in_run == (2 * LAYERS - 1) * MATRIX // 2  # the last layer comes once
    assert (disk.written_in_run, disk.read_for_norm) == (whole, whole)
    assert disk.read_in_step == whole // 2 + 4 * whole
    assert disk.written_in_step == whole // 2 + 3 * whole
    assert disk.resident < 0.6 * disk.nbytes  # two layers of four


def test_a_disk_that_is_not_the_limit_changes_little():
    """One without time costs none; one of a fourth of the time of computing costs a seventh at most."""
    step, rates = planned(), {"flops": 1e7, "link": 1e6, "host_rate": 1e7}
    quick = with_disk(**rates, disk_read=1e18, disk_write=1e18)
    for is_async in (False, "exact"):
        expected = simulate(step, with_disk(**rates), is_async=is_async, stays=False).seconds
        assert simulate(step, quick, is_async=is_async, host="disk").seconds == pytest.approx(expected, rel=1e-6)
    slow = {"flops": 1e8, "host_rate": 1e9, "disk_read": 2e9, "disk_write": 2e9}
    on_disk, in_memory = simulate(step, with_disk(**slow), host="disk"), simulate(step, with_disk(**slow))
    assert on_disk.busy["disk"] > 0.01 * in_memory.seconds
    assert on_disk.busy["disk"] < 0.25 * on_disk.busy["compute"]
    assert on_disk.seconds <= 1.15 * in_memory.seconds


def test_a_slow_disk_is_what_a_step_waits_for():
    """Nothing else takes time: all that is read, in order; without rates, the error has the line that measures them."""
    for rate in (1e6, 5e5):
        found = simulate(planned(), with_disk(disk_read=rate, disk_write=1e18), host="disk")
        read = found.disk.read
        assert found.seconds == pytest.approx(read / rate, rel=1e-6)
        assert (found.bottleneck, found.busy["disk"]) == ("disk", pytest.approx(read / rate))
    with pytest.raises(ConfigError, match=r"roundpipe doctor --disk DIR --machine FILE"):
        simulate(planned(), with_disk(), host="disk")


def test_a_step_on_a_disk_takes_as_long_as_simulated(folder_on_disk, monkeypatch):
    """On a disk whose reads and writes take a time that is known, so long that computing counts little."""
    read_rate, write_rate = 4e6, 6e6
    fetch, write_out = disk.fetch, disk.write_out
    reading, writing = threading.Lock(), threading.Lock()

    def slow_fetch(start, end):
        with reading:  # two reads at once take the time of both
            time.sleep((end - start) / read_rate)
        return fetch(start, end)

    def slow_write(file, offset, nbytes):
        with writing:
            time.sleep(nbytes / write_rate)
        write_out(file, offset, nbytes)

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)])
    memory = DiskMemory(folder_on_disk, together=1)
    for number, layer in enumerate(model):
        layer.weight.data = memory.copy((number,), layer.weight)
    plan = ModelExecutePlan([range(2), range(2, 3)], [range(3, 4), range(2, 3), range(1, 2), range(1)])
    config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean", execute_plan=plan)
    pipe = RoundPipe(model, devices="virtual:1", model_run_config=config, host=f"disk:{folder_on_disk}")
    with OptimizerCtx():
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    inputs = torch.randn(2 * FEW, WIDE)

    def step():
        pipe.forward_backward((inputs,), label=inputs, loss_fn=nn.functional.mse_loss)
        torch.nn.utils.clip_grad_norm_(pipe.optim_parameters(), 1e9)
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        memory.settle()

    for _ in range(3):  # the optimizer makes its state, and the pipeline looks at layers and the loss
        step()
    monkeypatch.setattr(disk, "fetch", slow_fetch)
    monkeypatch.setattr(disk, "write_out", slow_write)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    monkeypatch.undo()
    pipe.close()
    simulated = simulate(planned(plan=plan), with_disk(disk_read=read_rate, disk_write=write_rate), host="disk")
    last_layer = 3 * MATRIX / write_rate  # whose write this test waits for
    assert min(seconds) == pytest.approx(simulated.seconds + last_layer, rel=0.15)
