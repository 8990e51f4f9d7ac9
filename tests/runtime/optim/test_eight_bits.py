"""Moments in 8 bits, by torchao."""

import importlib.util

import pytest

from tests import fresh_process


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_moments_in_8_bits_have_the_bits_of_a_synchronous_step_also_when_resumed(tmp_path):
    """A hidden step, and a checkpoint of it, are those of a training without either."""
    done = fresh_process.run("-m", "tests.runtime.optim.eight_bits", str(tmp_path / "saved"), timeout=300)
    assert done.returncode == 0, done.stderr
