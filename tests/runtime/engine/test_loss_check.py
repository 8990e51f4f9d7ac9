"""The check of a loss function leaves no trace: generators, buffers and other threads are as without its calls."""

import random
import threading

import numpy
import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.device.generator import generator_lock
from roundpipe_runtime.engine.loss_check import LossChecks
from tests.runtime.small import batch, near

F = nn.functional


def check(loss_fn, outputs, labels):
    found = LossChecks().of(loss_fn, "mean")
    found.offer(outputs, labels, len(outputs), len(outputs))


def states():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def test_nobody_draws_while_a_loss_is_checked():
    """A layer of another thread that draws nothing would be taken for one that does, and one that draws for another."""
    taken = []

    def loss_fn(outputs, labels):
        def take():
            lock = generator_lock()
            taken.append(lock.acquire(timeout=0.05))
            if taken[-1]:
                lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return F.mse_loss(outputs, labels)

    check(loss_fn, *(batch(3)[1],) * 2)
    assert set(taken) == {False}


def test_generators_are_as_they_were():
    """A loss may draw from torch, Python and NumPy, and from one that it holds."""
    own = torch.Generator().manual_seed(5)

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = own

        def forward(self, outputs, labels):
            noise = torch.rand(()) + random.random() + numpy.random.rand() + torch.rand((), generator=self.own)
            return F.mse_loss(outputs, labels) + 0 * noise

    before = states(), own.get_state().tolist()
    check(Noisy(), batch(3)[1], torch.zeros(3, 3))
    assert (states(), own.get_state().tolist()) == before


@pytest.mark.parametrize("devices", ["virtual:1", "virtual:2"])
def test_a_loss_that_begins_to_draw_is_counted_once(devices):
    """It is called a second time with its seed, and the mean of the first time is not another mean of the loss."""
    calls = []

    def loss_fn(outputs, labels):
        noise = torch.rand(()) if "second" in calls else torch.zeros(())
        return F.mse_loss(outputs, labels) + 0 * noise

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    inputs, labels = batch(8)
    expected = F.mse_loss(model(inputs), labels)
    pipe = RoundPipe(
        model, devices=devices, model_run_config=RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)
    )
    for call in ("first", "second"):
        calls.append(call)
        assert near(pipe.forward_backward((inputs,), label=labels, loss_fn=loss_fn), expected)
    pipe.close()


def test_an_error_for_some_rows_is_the_function_s_own():
    """It comes before the warning that the function could not be checked with these rows."""

    def loss_fn(outputs, labels):
        if labels.isnan().any():
            raise ValueError("not a number")
        return nn.functional.mse_loss(outputs, labels)

    labels = torch.ones(5, 1)
    labels[2] = torch.nan  # the third row: with it the check has as many as it needs
    pipe = RoundPipe(nn.Sequential(nn.Linear(1, 1)), devices="virtual:1")
    config = RoundPipeRunConfig(num_microbatch=5, loss_reduction="mean")
    with pytest.raises(ValueError, match="not a number"):
        pipe.forward_backward((torch.ones(5, 1),), label=labels, loss_fn=loss_fn, run_config=config)
    pipe.close()
