"""Tests on the reference accelerator, in a process that has it: ``docs/dev/accelerator.md``."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.build import reason_not_to_build
from tests.cases import cases

_ROOT = Path(__file__).parents[2]

# What runs in one process. The order of the work is checked each time; `make accelerator` runs all of it and more.
_ORDER = "tests/accelerator/on_late"
_DEVICE = tuple(f"tests/gpu/test_{name}.py" for name in ("bits", "device", "training"))
_RUNS = {
    "order": ("not extended", f"{_ORDER}/test_order.py"),
    "parts": ("not extended", _ORDER, f"--deselect={_ORDER}/test_order.py"),
    "device": ("not extended", *_DEVICE),
    "extended": ("extended", _ORDER, *_DEVICE),
}

pytestmark = pytest.mark.skipif(reason_not_to_build() is not None, reason=str(reason_not_to_build()))


@pytest.mark.slow
@pytest.mark.timeout(900)  # all tests of a process, and perhaps the compiler
@pytest.mark.parametrize("run", cases(_RUNS, quick=["order"]))
def test_on_the_reference_accelerator(run):
    """All pass. A process of its own, since torch.accelerator.is_available() is true in it from its start."""
    which, *paths = _RUNS[run]
    options = ["-p", "tests.accelerator.plugin", "-p", "no:cacheprovider", "-n", "0", "-q", "-m", which]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *paths], cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
