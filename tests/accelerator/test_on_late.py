"""Tests on the reference accelerator, in a process that has it: ``docs/dev/accelerator.md``."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.build import reason_not_to_build
from tests.cases import cases

_ROOT = Path(__file__).parents[2]

# Those of the order of work, and a few others; `make accelerator` runs all.
_TESTS = [
    "tests/accelerator/on_late",
    *(f"tests/gpu/test_{name}.py" for name in ("bits", "device", "training")),
]

pytestmark = pytest.mark.skipif(reason_not_to_build() is not None, reason=str(reason_not_to_build()))


@pytest.mark.slow
@pytest.mark.timeout(900)  # all tests of a process, and perhaps the compiler
@pytest.mark.parametrize("which", cases(["not extended", "extended"], quick=["not extended"]))
def test_on_the_reference_accelerator(which):
    """All pass. A process of its own, since torch.accelerator.is_available() is true in it from its start."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.accelerator.plugin",
            "-p",
            "no:cacheprovider",
            "-n",
            "0",
            "-q",
            "-m",
            which,
            *_TESTS,
        ],
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
