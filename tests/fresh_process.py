"""Programs in a process of their own, where torch is imported and nothing else is.

    done = fresh_process.run("-c", "import yobx_flatten; print(1)")  # as `python -c`, with its exit status and output

A new interpreter imports torch for two seconds, a fork of a process that has imported it starts at once. So the first
program of a process of tests starts such a process, and each program runs in a fork of it. It has no thread and has
called nothing of torch. A test about the import of torch itself, or about options of the interpreter, starts an
interpreter of its own.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ROOT", "run"]

ROOT = Path(__file__).parents[1]

# Runs as `python -c`, so that the forks have the module search path of `python -c`.
_SERVER = """
import json, os, runpy, socket, sys, types
import torch

stream = socket.socket(fileno=int(sys.argv[1])).makefile("rw")
for line in stream:
    request = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=stream, flush=True)
else:
    sys.exit()

stream.close()
for number, file in enumerate(request["files"], start=1):
    os.dup2(os.open(file, os.O_WRONLY), number)
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

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        with other:
            command = [sys.executable, "-c", _SERVER, str(other.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True
            )
        self._stream = self._socket.makefile("rw")

    def run(self, request: Mapping[str, object], timeout: float) -> int:
        """Return the exit status; a program that takes longer is killed."""
        self._socket.settimeout(timeout)
        print(json.dumps(request), file=self._stream, flush=True)
        return int(self._stream.readline())

    def kill(self) -> None:
        """End it with the program that it runs."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self._stream.close()
        self._socket.close()
        self._process.wait()


_server: _Server | None = None


def run(
    *arguments: str | Path,
    cwd: str | Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a program in a fork of a process that has imported torch.

    Args:
        *arguments: as those of Python: `-c`, a program and its arguments, or `-m`, a module and its arguments.
        cwd: the working directory; by default the repository, where the program finds the modules of the tests.
        env: the environment; by default that of the tests.
        timeout: seconds after which the program is killed and `TimeoutError` raised.
        check: fail with what the program wrote to stderr if it does not exit with 0.

    Returns:
        What `subprocess.run` returns, with the output as text.
    """
    global _server
    if _server is None:
        _server = _Server()
        atexit.register(_close)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        request = {
            "arguments": list(map(str, arguments)),
            "cwd": str(cwd),
            "env": dict(os.environ if env is None else env),
            "files": list(map(str, files)),
        }
        try:
            status = _server.run(request, timeout)
        except BaseException:
            _server.kill()
            _server = None
            raise
        done = subprocess.CompletedProcess(arguments, status, *(file.read_text() for file in files))
    assert not check or status == 0, done.stderr
    return done


def _close() -> None:
    if _server is not None:
        _server.close()
