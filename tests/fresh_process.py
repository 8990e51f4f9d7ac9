"""Programs in a process of their own, where torch is imported and nothing else is.

    done = fresh_process.run("-c", "import yobx_flatten; print(1)")  # as `python -c`, with its exit status and output
    with fresh_process.start("-m", "roundpipe_runtime", "train") as program:  # one that gets signals meanwhile
        program.send_signal(signal.SIGINT)

A new interpreter imports torch for two seconds, a fork of a process that has imported it starts at once. So the first
program of a process of tests starts such a process, and each program runs in a fork of it. It has no thread and has
called nothing of torch. A test about the import of torch itself, or about options of the interpreter, starts an
interpreter of its own.

Programs that train spend more time on what the first step imports, and transformers, than on their work: with
``imported=TRAINER`` they are forks of a second process that has imported what a training and the Trainer need.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from tests import deprecated_names

_MODULES = {
    "torch": ["_dynamo", "distributed.checkpoint", "distributed.pipelining", "distributed.tensor"],
    "safetensors": ["torch"],
    "transformers": ["trainer", "modeling_layers"],
}
TRAINER = ", ".join(f"{top}.{name}" for top, names in _MODULES.items() if find_spec(top) for name in names)
"""Modules for programs that train: the first step of an optimizer imports `torch._dynamo`, with all of sympy."""

ROOT = Path(__file__).parents[1]

# Runs as `python -c`, so that the forks have the module search path of `python -c`.
_SERVER = """
import gc, json, os, runpy, signal, socket, sys, types
gc.disable()
import {imported}

# a fork would go through all of it in search of cycles, and copy every page: four fifths of what its end takes
gc.freeze()
gc.enable()
stream = socket.socket(fileno=int(sys.argv[1])).makefile("rw")
for line in stream:
    request = json.loads(line)
    # here, so that a terminal is in use before the one who asked closes it; it controls no process
    outputs = [os.open(file, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY) for file in request["files"]]
    child = os.fork()
    if not child:
        break
    for output in outputs:
        os.close(output)
    print(child, file=stream, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=stream, flush=True)
else:
    sys.exit()

stream.close()
# a shell that runs the tests in the background has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
for number, output in enumerate(outputs, start=1):
    os.dup2(output, number)
    os.close(output)
os.chdir(request["cwd"])
os.environ.clear()
os.environ.update(request["env"])
option, program, *sys.argv[1:] = request["arguments"]
if option == "-m":
    sys.argv[0] = program
    sys.path[0] = os.getcwd()
    runpy.run_module(program, run_name="__main__", alter_sys=True)
else:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), vars(main))
"""


class _Server:
    """The process that is forked."""

    def __init__(self, imported: str) -> None:
        self._socket, other = socket.socketpair()
        with other:
            command = [sys.executable, "-c", _SERVER.format(imported=imported), str(other.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True
            )

    def start(self, request: Mapping[str, object]) -> int:
        """Start a program; return its process."""
        self._socket.sendall(f"{json.dumps(request)}\n".encode())
        return self.number(timeout=240)

    def number(self, timeout: float) -> int:
        """Return the process of the program, and then its exit status; raise `TimeoutError` if it takes longer."""
        self._socket.settimeout(timeout)
        line = b""
        while not line.endswith(b"\n"):  # byte by byte, so that what comes next is still in the socket
            part = self._socket.recv(1)
            assert part, "the process that is forked has ended"
            line += part
        return int(line)

    def is_done(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])

    def kill(self) -> None:
        """End it with the program that it runs."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


# by what they have imported
_servers: dict[str, _Server] = {}


class Program:
    """A program that runs, and what can be asked of it, inside of a `with`, whose end is also its own."""

    def __init__(self, server: str, request: Mapping[str, object], folder: tempfile.TemporaryDirectory[str]) -> None:
        self.returncode: int | None = None  # as `subprocess` states it; `None` while it runs
        self._server, self._folder = server, folder
        self._pid = _servers[server].start(request)

    @property
    def stdout(self) -> str:
        return Path(self._folder.name, "stdout").read_text()

    @property
    def stderr(self) -> str:
        return Path(self._folder.name, "stderr").read_text()

    def poll(self) -> int | None:
        """Return the exit status, or `None` while it runs."""
        return self.wait() if self.returncode is None and _servers[self._server].is_done() else self.returncode

    def wait(self, timeout: float = 240) -> int:
        """Return the exit status; a program that takes longer is killed, and `TimeoutError` raised."""
        if self.returncode is None:
            try:
                self.returncode = _servers[self._server].number(timeout)
            except BaseException:
                self.returncode = -signal.SIGKILL
                _servers.pop(self._server).kill()
                raise
        return self.returncode

    def wait_for(self, is_there: Callable[[], bool], timeout: float = 240) -> None:
        """Return when the program has done something; fail with what it wrote to stderr if it ends before."""
        deadline = time.monotonic() + timeout
        while not is_there():
            assert self.poll() is None or is_there(), self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.005)

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended after it was asked
                os.kill(self._pid, number)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            self.wait()
        deprecated_names.hear(self.stderr)
        self._folder.cleanup()


def start(
    *arguments: str | Path,
    cwd: str | Path = ROOT,  # where the program finds the modules of the tests
    env: Mapping[str, str] | None = None,  # by default that of the tests
    imported: str = "torch",  # or TRAINER
    terminal: str | None = None,  # the path of a terminal to write to; by default a file each for stdout and stderr
    together: bool = False,  # whether `stdout` also holds what is written to stderr, in order
) -> Program:
    """Start a program, with arguments as those of Python, in a fork of a process that has imported torch."""
    if imported not in _servers:
        _servers[imported] = _Server(imported)
    folder = tempfile.TemporaryDirectory()
    files = [Path(folder.name, name) for name in ("stdout", "stderr")]
    for file in files:
        file.touch()
    if together:
        files[1] = files[0]
    request = {
        "arguments": list(map(str, arguments)),
        "cwd": str(cwd),
        "env": dict(os.environ if env is None else env),
        "files": [terminal] * 2 if terminal else list(map(str, files)),
    }
    return Program(imported, request, folder)


def run(
    *arguments: str | Path,
    cwd: str | Path = ROOT,
    env: Mapping[str, str] | None = None,
    imported: str = "torch",
    timeout: float = 240,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a program as :func:`start` does, to its end; after `timeout` seconds it is killed."""
    with start(*arguments, cwd=cwd, env=env, imported=imported) as program:
        status = program.wait(timeout)
        done = subprocess.CompletedProcess(arguments, status, program.stdout, program.stderr)
    assert not check or status == 0, done.stderr
    return done


@atexit.register
def _close() -> None:
    while _servers:
        _servers.popitem()[1].close()
