"""Ctrl-C and SIGTERM: noted once, at once the second time, and as before outside the block."""

import os
import signal
import threading
import time

import pytest

from roundpipe_runtime.fine_tune.job import Interruption
from tests import fresh_process

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_noted(number, status, capfd):
    """With the exit status of a process that it ends; a line says what happens."""
    with Interruption() as interruption:
        assert interruption.status == 0
        os.kill(os.getpid(), number)
        assert interruption.status == status
    assert "stopping after this step; press Ctrl-C again to quit now" in capfd.readouterr().err


def test_the_handlers_of_before_come_back():
    """Also after an exception."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ZeroDivisionError), Interruption():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_another_thread_is_left_alone():
    """Python gives signals to the main thread only."""
    before, found = signal.getsignal(signal.SIGINT), []

    def work():
        with Interruption() as interruption:
            found.append((interruption.status, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(0, before)]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_signal_ends_the_process(number, status):
    """Whatever its threads are doing."""
    program = """
import sys, threading, time
from roundpipe_runtime.fine_tune.job import Interruption
threading.Thread(target=time.sleep, args=(60,)).start()
with Interruption() as interruption:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if interruption.status:
            print("noted", flush=True)
            time.sleep(60)
"""
    with fresh_process.start("-c", program) as process:
        process.wait_for(lambda: process.stdout == "ready\n")
        process.send_signal(number)
        process.wait_for(lambda: process.stdout == "ready\nnoted\n")
        begin = time.monotonic()
        process.send_signal(number)
        assert process.wait() == status
        assert time.monotonic() - begin < 30
        assert "left at once" in process.stderr
