"""SIGTERM ends a command with one line and status 143, and leaves what was there, whenever it comes."""

import os
import signal
import subprocess
import sys

import pytest

from tests import fresh_process
from yobx_flatten.terminal.running import Terminated, terminable

if os.name != "posix":
    pytest.skip("Windows has no SIGTERM", allow_module_level=True)

# The process sends itself the signal at one of the things that it does to files of a folder.
EXPORT = """
import os, signal, sys
from yobx_flatten.__main__ import main

folder, at = os.path.abspath(sys.argv[1]), int(sys.argv[2])
count = 0

def note(event, given):
    global count
    if event not in ("open", "os.rename", "os.remove", "os.mkdir") or not isinstance(given[0], (str, bytes)):
        return
    if event == "open" and not (given[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    if folder in os.path.abspath(os.fsdecode(given[0])):
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGTERM)

sys.addaudithook(note)
status = main(["export", "llama", "-o", folder + "/model", "--overwrite", "--proof", "sample"])
print("events", count)
sys.exit(status)
"""


def export(folder, at):
    return fresh_process.run("-c", EXPORT, folder, str(at), check=False, imported=fresh_process.TRAINER)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.slow
def test_an_export_that_is_terminated_leaves_the_old_folder_alone(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    done = export(folder, 0)
    assert done.returncode == 0, done.stderr
    events = int(done.stdout.split()[-1])
    before = contents(folder)
    for at in (2, events // 2, events * 3 // 4):
        ended = export(folder, at)
        assert ended.returncode == 143, ended.stderr
        assert ended.stderr.splitlines()[-1] == "yobx-flatten: terminated, nothing was written"
        assert "Traceback" not in ended.stderr
        assert contents(folder) == before


IMPORT = """
import os, signal, sys
class Signal:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Signal())
sys.argv = {argv!r}
from {package}.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", ["torch", "torch.export"])
@pytest.mark.parametrize(
    ("package", "argv"),
    [("yobx_flatten", ["yobx-flatten", "list"]), ("roundpipe_runtime", ["roundpipe", "plan", "--help"])],
)
def test_a_command_that_is_terminated_in_its_imports_prints_a_line(package, argv, at):
    text = IMPORT.format(at=at, argv=argv, package=package)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 143
    assert done.stderr == f"{argv[0]}: terminated, nothing was written\n"


def test_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_of_the_program_stays():
    """A server that runs a command in its process has its own way to end."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with terminable():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_a_fork_ends_as_it_did():
    """Its parent ends it, as pools of workers do, and waits for its status."""
    with terminable():
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
