"""Steps with their state on a disk: bytes and seconds by hand, and next to a pipeline on a disk of known rates."""

import dataclasses
import threading
import time

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.device import disk
from roundpipe_runtime.device.disk import DiskMemory
from roundpipe_runtime.estimate import Hardware, measure_layers, simulate, step_plan
from roundpipe_runtime.estimate.hardware import measure_disk

WIDTH, ROWS, LAYERS = 256, 8, 4
MATRIX = 4 * WIDTH * WIDTH  # bytes in float32


def machine(**rates):
    given = {"flops": 1e15, "link": 1e15, "memory": None, "host": None, "host_rate": 1e15, "origin": {}, **rates}
    return Hardware(names=("virtual:0",), kind="cpu", **given)


def planned(optim_dtype=None, dtype=torch.float32, measured=None, plan=None):
    """A matrix per layer, two forward stages and one for each layer going back."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device="meta", dtype=dtype) for _ in range(LAYERS)])
    sums = optim_dtype or dtype
    inputs = (torch.empty(ROWS, WIDTH, device="meta", dtype=dtype),)
    layers = measure_layers(list(model), inputs, gradient_dtype=lambda parameter: sums)
    plan = plan or ModelExecutePlan([range(2), range(2, 3)], [range(3, 4), range(2, 3), range(1, 2), range(1)])
    count = {"num_microbatch": 2, "tokens": 2 * ROWS}
    return step_plan(plan, layers, model, optim_dtype=optim_dtype, measured=measured, **count)


def test_bytes_are_those_of_the_parts():
    """bfloat16 with master weights: what is on the disk, and what passes there in a run, for the norm, in the step."""
    disk = simulate(planned(torch.float32, torch.bfloat16), machine(disk_read=1e9, disk_write=1e9), host="disk").disk
    whole = LAYERS * MATRIX
    assert disk.nbytes == whole // 2 + whole + whole + 2 * whole
    assert disk.read_in_run == (2 * LAYERS - 1) * MATRIX // 2  # the last layer comes once
    assert (disk.written_in_run, disk.read_for_norm) == (whole, whole)
    assert disk.read_in_step == whole // 2 + 4 * whole
    assert disk.written_in_step == whole // 2 + 3 * whole
    assert disk.resident < 0.6 * disk.nbytes  # two layers of four


def test_a_disk_that_takes_no_time_changes_nothing():
    """The seconds of memory, for each way to step."""
    step, rates = planned(), {"flops": 1e7, "link": 1e6, "host_rate": 1e7}
    quick = machine(**rates, disk_read=1e18, disk_write=1e18)
    for is_async in (False, "exact"):
        expected = simulate(step, machine(**rates), is_async=is_async, stays=False).seconds
        assert simulate(step, quick, is_async=is_async, host="disk").seconds == pytest.approx(expected, rel=1e-6)


def test_a_slow_disk_is_what_a_step_waits_for():
    """Nothing else takes time: all that is read, in order, and gradients that are written after the last of it."""
    rate = 1e6
    found = simulate(planned(), machine(disk_read=rate, disk_write=1e18), host="disk")
    read = found.disk.read
    assert found.seconds == pytest.approx(read / rate, rel=1e-6)
    assert (found.bottleneck, found.busy["disk"]) == ("disk", pytest.approx(read / rate))


def test_a_disk_that_is_not_the_limit_costs_a_seventh_at_most():
    """Of a step that computes for four times as long as its disk works."""
    slow = {"flops": 1e8, "host_rate": 1e9, "disk_read": 2e9, "disk_write": 2e9}
    step = planned()
    on_disk, in_memory = simulate(step, machine(**slow), host="disk"), simulate(step, machine(**slow))
    assert on_disk.busy["disk"] > 0.01 * in_memory.seconds
    assert on_disk.busy["disk"] < 0.25 * on_disk.busy["compute"]
    assert on_disk.seconds <= 1.15 * in_memory.seconds


def test_without_rates_it_is_not_simulated():
    """The error has the line that measures them."""
    with pytest.raises(ConfigError, match=r"roundpipe doctor --disk DIR --machine FILE"):
        simulate(planned(), machine(), host="disk")


def test_rates_are_measured(folder_on_disk):
    """Of any disk they are numbers above zero, and nothing is left there."""
    rates = measure_disk(folder_on_disk)
    assert min(rates) > 1e5
    assert list(folder_on_disk.iterdir()) == []


def test_a_step_takes_as_long_as_simulated(folder_on_disk, monkeypatch):
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
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    memory = DiskMemory(folder_on_disk, together=1)
    for number, layer in enumerate(model):
        layer.weight.data = memory.copy((number,), layer.weight)
    plan = ModelExecutePlan([range(2), range(2, 3)], [range(3, 4), range(2, 3), range(1, 2), range(1)])
    config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean", execute_plan=plan)
    pipe = RoundPipe(model, devices="virtual:1", model_run_config=config, host=f"disk:{folder_on_disk}")
    with OptimizerCtx():
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    inputs = torch.randn(2 * ROWS, WIDTH)

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
    simulated = simulate(planned(plan=plan), machine(disk_read=read_rate, disk_write=write_rate), host="disk")
    last_layer = 3 * MATRIX / write_rate  # whose write this test waits for
    assert min(seconds) == pytest.approx(simulated.seconds + last_layer, rel=0.15)


def test_the_machine_of_a_simulation_may_have_a_disk():
    """Half the rate of a disk, twice its seconds."""
    step = planned()
    one = simulate(step, machine(disk_read=1e6, disk_write=1e6), host="disk")
    half = simulate(step, dataclasses.replace(machine(disk_read=5e5, disk_write=5e5)), host="disk")
    assert half.seconds == pytest.approx(2 * one.seconds, rel=1e-3)
