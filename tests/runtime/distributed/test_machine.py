"""Whether a process of this machine has ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roundpipe_runtime.distributed.ranks.machine import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked through /proc")


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
    assert here._replace(started="0").has_ended()
