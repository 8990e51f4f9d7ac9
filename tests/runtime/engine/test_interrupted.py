"""Ctrl-C at any moment, hundreds of times, to a process that trains: nothing is half done, and nothing hangs."""

import contextlib
import itertools
import random
import signal
import time

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe
from roundpipe_runtime.engine.rows import set_apart
from roundpipe_runtime.huggingface.cutting.check import evaluating, own_gradients
from roundpipe_runtime.pipeline.live import OtherForward, with_own_forwards
from tests import fresh_process
from tests.cases import cases
from tests.ctrl_c import interrupt_at_line

pytestmark = pytest.mark.slow

TRAINING = "tests.runtime.fine_tune.interrupted_training"


@pytest.mark.parametrize("kind", cases(["fused", "classic", "async"], quick=["fused"]))
def test_an_interrupted_call_did_all_or_nothing(kind):
    with fresh_process.start("-m", TRAINING, kind, "moments", "3", imported=fresh_process.TRAINER) as process:
        process.wait_for(lambda: process.stdout == "ready\n")
        moments = random.Random(0)
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            time.sleep(moments.uniform(0.001, 0.012))
            process.send_signal(signal.SIGINT)
            if moments.random() < 0.5:  # and again, by somebody who does not want to wait
                time.sleep(moments.uniform(0, 0.001))
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, process.stderr
        _, interrupted, wrong, last = process.stdout.split()
    assert int(interrupted) > 20
    assert (wrong, last) == ("0", "True")


@pytest.mark.parametrize("kind", cases(["fused", "classic", "async"], quick=["async"]))
def test_an_interruption_before_any_line_does_all_or_nothing(kind):
    """Before every 37th line of those that run in the caller's thread; by hand, every one was tried."""
    found = fresh_process.run("-m", TRAINING, kind, "lines", "37", timeout=120, imported=fresh_process.TRAINER)
    ready, interrupted, wrong, last = found.stdout.split()
    assert ready == "ready"
    assert int(interrupted) > 100
    assert (wrong, last) == ("0", "True")


def interrupted_at_each_line(call, files):
    """Call with Ctrl-C before the first line of files, then before the second, until the call has no more lines."""
    for number in itertools.count():
        try:
            pressed = interrupt_at_line(number, call, files=files)
        except KeyboardInterrupt:
            pressed = True
        yield number
        if not pressed:
            return


@pytest.mark.usefixtures("python_handles_ctrl_c")
@pytest.mark.parametrize("call", ["forward", "forward_backward", "step"])
def test_gradients_are_on_after_an_interruption_while_torch_switches_them_off(call):
    """Torch's own block leaves them off if Ctrl-C comes while it is entered."""
    with contextlib.closing(RoundPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), devices="virtual:1")) as model:
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
        calls = {
            "forward": lambda: model(torch.ones(4, 2)),
            "forward_backward": lambda: model.forward_backward((torch.ones(4, 2),), loss_fn=lambda out, _: out.sum()),
            "step": lambda: model.step(optimizer.step),
        }
        calls["forward_backward"]()
        numbers = []
        for number in interrupted_at_each_line(calls[call], ("autograd/grad_mode.py",)):
            numbers.append(number)
            assert torch.is_grad_enabled()
    assert len(numbers) > 2


def changed_model():
    """A model with all that the blocks below change, and a function that tells whether it is as it was."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: None)
    hooks = model[0]._forward_hooks
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    forward = OtherForward(lambda *args: None, None)
    model[2].__dict__["forward"] = forward

    def is_as_before():
        return (
            all(module.training for module in model.modules())
            and model[0]._forward_hooks is hooks
            and [id(parameter.grad) for parameter in model.parameters()] == [id(one) for one in gradients]
            and model[2].__dict__.get("forward") is forward
        )

    return model, is_as_before


@pytest.mark.usefixtures("python_handles_ctrl_c")
@pytest.mark.parametrize(
    ("block", "files"),
    [
        (lambda model: set_apart([model]), ("engine/rows.py", "core/interrupts.py", "contextlib.py")),
        (evaluating, ("cutting/check.py", "core/interrupts.py", "contextlib.py", "nn/modules/module.py")),
        (own_gradients, ("cutting/check.py", "core/interrupts.py", "contextlib.py")),
        (with_own_forwards, ("pipeline/live.py", "core/interrupts.py", "contextlib.py")),
    ],
    ids=["set_apart", "evaluating", "own_gradients", "with_own_forwards"],
)
def test_a_model_is_as_before_the_block_whatever_line_was_interrupted(block, files):
    model, is_as_before = changed_model()
    assert is_as_before()

    def call():
        with block(model):
            assert not is_as_before()

    for number in interrupted_at_each_line(call, files):
        assert is_as_before(), number
    assert number > 10
