"""`tests.fresh_process` runs a program as a new interpreter would, after the import of torch."""

import signal
import subprocess
import sys
import time

import pytest

from tests import fresh_process

# What a program can see of its process.
LOOKS = """
import dataclasses, json, os, pathlib, sys

@dataclasses.dataclass
class Here:
    value: int

import tests.flatten.pair
print(json.dumps([__name__, sys.argv[1:], Here.__module__, os.getcwd(), os.environ.get("SAID"), sys.path[0]]))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


def test_a_program_finds_what_a_new_interpreter_gives_it(monkeypatch):
    monkeypatch.setenv("SAID", "so")
    command = ["-c", LOOKS, "one", "two words"]
    expected = subprocess.run([sys.executable, *command], cwd=fresh_process.ROOT, capture_output=True, text=True)
    found = fresh_process.run(*command, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (3, expected.stdout, expected.stderr)
    assert expected.returncode == 3


def test_only_torch_is_imported():
    names = ["torch", "yobx_flatten", "roundpipe_runtime", "tests", "transformers", "optree", "jax", "onnx", "pytest"]
    program = f"import sys, threading; print(*(name in sys.modules for name in {names}), threading.active_count())"
    assert fresh_process.run("-c", program).stdout.split() == ["True", *["False"] * 8, "1"]


def test_what_the_trainer_needs_is_imported_where_that_is_asked_for():
    names = ["transformers.trainer", "yobx_flatten", "roundpipe_runtime", "tests", "pytest"]
    program = f"import sys, threading; print(*(name in sys.modules for name in {names}), threading.active_count())"
    done = fresh_process.run("-c", program, imported=fresh_process.TRAINER)
    assert done.stdout.split() == ["True", *["False"] * 4, "1"]


def test_a_program_that_was_started_gets_signals():
    program = "import time; print('here', flush=True)\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('there')"
    with fresh_process.start("-c", program) as started:
        started.wait_for(lambda: started.stdout == "here\n")
        assert started.poll() is None
        started.send_signal(signal.SIGINT)
        assert (started.wait(), started.stdout) == (0, "here\nthere\n")
    with fresh_process.start("-c", program) as started:
        started.send_signal(signal.SIGKILL)
        assert started.wait() == started.poll() == -9


def test_both_outputs_can_be_read_in_order():
    program = "import sys; print(1, flush=True); print(2, file=sys.stderr, flush=True); print(3)"
    with fresh_process.start("-c", program, together=True) as started:
        assert (started.wait(), started.stdout, started.stderr) == (0, "1\n2\n3\n", "")


def test_a_program_runs_no_longer_than_it_is_needed():
    with fresh_process.start("-c", "import time; time.sleep(60)") as started:
        pass
    assert started.returncode == -9
    with pytest.raises(AssertionError, match="ZeroDivisionError"), fresh_process.start("-c", "1 / 0") as started:
        started.wait_for(lambda: False)


def test_a_module_runs_as_main():
    command = ["-m", "calendar", "2026"]
    expected = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert fresh_process.run(*command).stdout == expected.stdout


def test_an_error_of_a_program_is_shown():
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        fresh_process.run("-c", "1 / 0")
    assert fresh_process.run("-c", "1 / 0", check=False).returncode == 1
    assert fresh_process.run("-c", "import os; os.abort()", check=False).returncode == -6


def test_a_program_that_hangs_is_killed(tmp_path):
    program = "import time\nwhile True: print(end='.', file=open('written', 'a')); time.sleep(0.01)"
    with pytest.raises(TimeoutError):
        fresh_process.run("-c", program, cwd=tmp_path, timeout=3)
    written = (tmp_path / "written").read_text()
    time.sleep(0.2)
    assert (tmp_path / "written").read_text() == written != ""
    assert fresh_process.run("-c", "print('next')").stdout == "next\n"
