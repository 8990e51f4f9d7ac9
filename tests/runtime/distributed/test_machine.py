"""Whether a process of this machine has ended, or is stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roundpipe_runtime.distributed.ranks.alarm import Alarm, Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked through /proc")


def test_a_process_that_is_stopped_may_go_on_until_its_time_is_over():
    alarm = Alarm(None, 0, 1)
    with subprocess.Popen(["sleep", "60"]) as child:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        other = Process(Process.here().machine, child.pid, started)
        alarm._processes, alarm.patience = {0: Process.here(), 1: other, 2: other._replace(started="0")}, 2.0
        for _ in range(3):
            child.send_signal(signal.SIGSTOP)
            wait_for(other.is_stopped)
            for _ in range(4):
                alarm._end_stopped()
            assert alarm._stopped == {1: 2.0}
            child.send_signal(signal.SIGCONT)
            wait_for(lambda: not other.is_stopped())
            alarm._end_stopped()
            assert alarm._stopped == {}
            assert child.poll() is None
        child.send_signal(signal.SIGSTOP)
        wait_for(other.is_stopped)
        for _ in range(5):
            alarm._end_stopped()
        assert child.wait(10) == -signal.SIGKILL
        alarm._end_stopped()
        assert (alarm.seconds_stopped(1), alarm.seconds_stopped(2)) == (2.5, 0.0)


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_process_has_ended_before_its_parent_hears_of_it():
    """Its number is still taken then; and another process with the number of one that ended is not that one."""
    here = Process.here()
    with subprocess.Popen(["sleep", "60"]) as child:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        other = Process(here.machine, child.pid, started)
        assert not other.has_ended()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert other.has_ended()
        child.wait()
        assert other.has_ended()
    assert not here.has_ended()
    assert not here.is_stopped()
    assert here._replace(started="0").has_ended()
