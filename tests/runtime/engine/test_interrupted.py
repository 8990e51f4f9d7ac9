"""Ctrl-C at any moment, hundreds of times, to a process that trains: nothing is half done, and nothing hangs."""

import random
import signal
import time

import pytest

from tests import fresh_process
from tests.cases import cases

pytestmark = pytest.mark.slow

TRAINING = "tests.runtime.fine_tune.interrupted_training"


@pytest.mark.parametrize("kind", cases(["fused", "classic", "async"], quick=["fused"]))
def test_an_interrupted_call_did_all_or_nothing(kind):
    """After KeyboardInterrupt gradients and buffers are those from before the call, or those from behind it."""
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
        assert process.wait(timeout=60) == 0
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
