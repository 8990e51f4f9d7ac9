"""Threads, pipelines and devices: who may share what, and what a closed pipeline reports."""

import copy
import threading

import pytest
import torch
from torch import nn

from roundpipe_runtime import DeviceError, ModelExecutePlan, RoundPipe, RoundPipeRunConfig, StageError, Timeline
from tests.runtime.small import batch, near, same_bits, small_model, state

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


def test_two_threads_may_share_devices(devices):
    inputs, labels = batch(6)
    found, errors = {}, []

    def train(seed, model):
        try:
            pipe = RoundPipe(model, devices=devices, model_run_config=MEAN)
            for _ in range(5):
                pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
            found[seed] = state(model)
        except BaseException as error:  # shown by the assertion
            errors.append(error)

    models = [small_model(seed=seed) for seed in (0, 1)]  # made here: both would draw from one generator
    threads = [threading.Thread(target=train, args=(seed, copy.deepcopy(models[seed]))) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    together = dict(found)
    for seed in (0, 1):
        train(seed, models[seed])
    assert all(same_bits(together[seed], found[seed]) for seed in (0, 1))


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


def test_a_closed_pipeline_says_so():
    pipe = RoundPipe(small_model(), devices="virtual:2")
    pipe(batch(6)[0])
    pipe.close()
    names = "|".join(device.name for device in pipe.devices)
    with pytest.raises(DeviceError, match=rf"({names}) was closed, .*\n    RoundPipe\(model, devices="):
        pipe(batch(6)[0])


def test_a_pipeline_inside_of_a_layer_needs_devices_of_its_own(devices, wrap):
    """On the same devices it would wait for itself: an error says so."""
    inner = wrap(nn.Linear(4, 3))

    class Outer(nn.Module):
        def forward(self, x):
            return inner(x)

    with pytest.raises(StageError, match="its own devices"):
        wrap(Outer())(batch(4)[0])


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


def test_one_pipeline_in_two_threads_loses_no_gradient(wrap):
    model = small_model()
    plain = copy.deepcopy(model)
    pipe = wrap(model)
    batches = [batch(6, seed) for seed in range(8)]

    def work(mine):
        for inputs, labels in mine:
            pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)

    threads = [threading.Thread(target=work, args=(batches[part::2],)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for inputs, labels in batches:
        F.mse_loss(plain(inputs), labels).backward()
    assert all(near(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
