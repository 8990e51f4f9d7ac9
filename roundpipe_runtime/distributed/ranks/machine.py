"""Find the processes on this machine, notice when one of them ends or is stopped, and cut connections of this one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
from pathlib import Path
from typing import NamedTuple

_ENDED = ("Z", "X")  # states of a process that has ended, of which its parent may not have heard yet


def this_machine() -> str:
    """Return a name that processes share if they run on one machine, and a unique name if that is not known."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    return f"{socket.gethostname()} {os.getpid()}"


class Process(NamedTuple):
    """A process of a machine."""

    machine: str  # name of the machine
    number: int  # number of the process
    started: str  # when it was started, as the kernel counts: numbers are used again

    @classmethod
    def here(cls) -> Process:
        """Return this process."""
        return cls(this_machine(), os.getpid(), _state(os.getpid())[1])

    def has_ended(self) -> bool:
        """Report whether the process has ended; it must be one of this machine."""
        state, started = _state(self.number)
        return state in _ENDED or started != self.started

    def is_stopped(self) -> bool:
        """Report whether a signal has stopped the process (SIGSTOP, Ctrl-Z); it must be one of this machine."""
        return _state(self.number) == ("T", self.started)  # a debugger's is "t"

    def end(self) -> None:
        """End the process, also one that is stopped; it must be one of this machine."""
        with contextlib.suppress(OSError):
            os.kill(self.number, signal.SIGKILL)


def _state(number: int) -> tuple[str, str]:
    """The state of a process, and when it was started; nothing for one that is not there."""
    with contextlib.suppress(OSError):
        # the name of the program, in parentheses, may hold anything
        fields = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    return "X" if Path("/proc/self/stat").exists() else "", ""


def cut_connections() -> None:
    """Close all connections of this process (Linux), also those of gloo, so that waiting threads get an error."""
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or one that listens: gloo ends the process with that
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
                        one.shutdown(socket.SHUT_RDWR)
