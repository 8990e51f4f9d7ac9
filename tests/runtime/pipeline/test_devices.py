"""Memory, measured costs and devices that pipelines share."""

import copy
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from torch import nn

from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, Timeline, VirtualDevice
from roundpipe_runtime.engine import planner
from roundpipe_runtime.errors import DeviceError, StageError
from tests.modules import module_class
from tests.runtime.small import allocated, batch, near, near_gradients, relative_error, same_bits, small_model, state

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


def test_a_run_leaves_no_activation_behind(wrap):
    model, (inputs, labels) = small_model(norm=True, dropout=0.2), batch(9)
    alive = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    pipe = wrap(model)
    gc.collect()
    gc.disable()
    try:
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        F.mse_loss(pipe(inputs, roundpipe_run_config=MEAN), labels).backward()
        pipe(inputs, roundpipe_run_config=MEAN)  # and never backward
        for device in pipe.devices:
            device.worker.submit(int).result()  # its last stage has left, too
        assert len(alive) > 60
        assert not [reference for reference in alive if reference() is not None]
        assert sum(allocated(device) for device in pipe.devices) == 0
    finally:
        gc.enable()


def test_a_model_four_times_larger_than_its_devices_trains():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(32)])
    plain, inputs = copy.deepcopy(model), torch.randn(6, 32)
    expected = plain(inputs).square().mean()
    expected.backward()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    small = [VirtualDevice(f"virtual:{n}", check=True, memory_limit=size // 4) for n in range(2)]
    pipe = RoundPipe(model, devices=small, model_run_config=MEAN)
    loss = pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
    assert near(loss, expected.detach())
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(relative_error(p.grad, q.grad) < 1e-5 for p, q in pairs)


@pytest.mark.parametrize(("room", "uploads"), [(None, 1), (40, 1), (2, 2)])
def test_what_fits_stays_between_forward_and_backward(room, uploads):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    device = VirtualDevice("virtual:0", check=True, memory_limit=room and room * size)
    plain, inputs = copy.deepcopy(model), torch.randn(6, 16)
    plain(inputs).square().mean().backward()
    plan = ModelExecutePlan([range(4), range(4, 6)], [range(6, 8), range(3, 6), range(3)])
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, execute_plan=plan)
    pipe = RoundPipe(model, devices=[device], model_run_config=config)
    with Timeline() as timeline:
        pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
    found = [record.layer for record in timeline.records if record.kind == "upload"]
    assert [found.count(layer) for layer in range(8)] == [uploads] * 6 + [1, 1]
    assert near_gradients(model, plain)
    assert device.allocated == 0


def test_the_plan_follows_what_was_measured_in_training(wrap):
    """A forward alone says nothing: one row in inference is quicker than a batch."""
    pipe = wrap(small_model())
    guessed = [cost.forward for cost in pipe.layer_costs()]
    inputs, labels = batch(6)
    for _ in range(3):
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    before = pipe.layer_costs()
    assert max(cost.forward for cost in before) < 1 < min(guessed)
    assert isinstance(ModelExecutePlan.auto("fused", pipe), ModelExecutePlan)
    with torch.no_grad():
        pipe(inputs[:1])
    assert pipe.layer_costs() == before


def test_the_fused_stage_is_measured(wrap):
    model, plan = small_model(), ModelExecutePlan([range(6)], [range(6, 7), range(6)])
    pipe, (inputs, labels) = wrap(model), batch(6)
    model[6].register_forward_hook(lambda *_: time.sleep(0.01))

    def slow_loss(outputs, targets):
        time.sleep(0.1)
        return F.mse_loss(outputs, targets)

    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, execute_plan=plan)
    pipe.forward_backward((inputs,), label=labels, loss_fn=slow_loss, run_config=config)
    last = pipe.layer_costs()[6]
    assert last.forward >= 0.01
    assert last.backward >= 0.11


class _Watched(nn.Linear):
    threads: ClassVar[set[int]] = set()

    def forward(self, x):
        if torch.is_grad_enabled():  # and not of rows that are tried
            self.threads.add(threading.get_ident())
        return super().forward(x)


@pytest.mark.parametrize(("brief", "threads"), [(1.0, 1), (0.0, 2)])
def test_one_thread_computes_brief_layers(wrap, monkeypatch, brief, threads):
    monkeypatch.setattr(planner, "_BRIEF", brief)
    torch.manual_seed(0)
    model = nn.Sequential(*[_Watched(8, 8) for _ in range(6)])
    pipe, inputs, labels = wrap(model), torch.randn(6, 8), torch.randn(6, 8)

    def step():
        _Watched.threads.clear()
        pipe.zero_grad()
        loss = pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        return [loss, *(parameter.grad.clone() for parameter in model.parameters())]

    first = step()
    assert len(_Watched.threads) == 2
    for _ in range(5):
        assert same_bits(step(), first)
        assert len(_Watched.threads) == threads


def test_two_threads_may_share_devices(devices):
    inputs, labels = batch(6)
    models = [small_model(seed=seed) for seed in (0, 1)]  # made here: both would draw from one generator
    found = {}

    def train(number):
        model = copy.deepcopy(models[number])
        pipe = RoundPipe(model, devices=devices, model_run_config=MEAN)
        for _ in range(5):
            pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
        found[number] = state(model)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, (0, 1), timeout=60))
    together = dict(found)
    for number in (0, 1):
        train(number)
        assert same_bits(together[number], found[number])


def test_one_pipeline_in_two_threads_loses_no_gradient(wrap):
    model = small_model()
    plain = copy.deepcopy(model)
    pipe = wrap(model)
    batches = [batch(6, seed) for seed in range(8)]

    def work(number):
        for inputs, labels in batches[number::2]:
            pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, (0, 1), timeout=60))
    for inputs, labels in batches:
        F.mse_loss(plain(inputs), labels).backward()
    assert near_gradients(model, plain)


def test_the_next_run_starts_on_the_device_after_the_last_one(devices, wrap):
    inputs, labels = batch(6)
    plan = ModelExecutePlan([range(6)], [range(6, 7), range(6)])
    config = RoundPipeRunConfig(execute_plan=plan, loss_reduction="mean")
    pipe = wrap(small_model())
    starts = []
    for _ in range(3):
        with Timeline() as timeline:
            pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
        starts.append(next(record.device for record in timeline.records if record.stage == 0))
    assert starts == [devices[3 * run % len(devices)].name for run in range(3)]


def test_a_pipeline_inside_of_a_layer_needs_devices_of_its_own(wrap):
    """On the same devices it would wait for itself: an error says so."""
    inner = wrap(nn.Linear(4, 3))
    outer = module_class("Outer", lambda self, x: inner(x))()
    with pytest.raises(StageError, match="its own devices"):
        wrap(outer)(batch(4)[0])


def test_closing_one_pipeline_leaves_its_devices_to_the_other():
    before = set(threading.enumerate())
    first = RoundPipe(small_model(), devices="virtual:2")
    second = RoundPipe(small_model(), devices=first.devices)
    inputs, _ = batch(6)
    expected = first(inputs).detach()
    first.close()
    assert torch.equal(second(inputs), expected)
    with pytest.raises(DeviceError, match="was closed, by this pipeline"):
        first(inputs)
    second.close()
    assert set(threading.enumerate()) <= before
    names = "|".join(device.name for device in first.devices)
    with pytest.raises(DeviceError, match=rf"({names}) was closed, .*\n    RoundPipe\(model, devices="):
        second(inputs)
