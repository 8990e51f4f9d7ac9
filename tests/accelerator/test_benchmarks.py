"""The benchmark of simulated devices runs on the reference accelerator."""

import json
import os

import pytest

from tests import fresh_process
from tests.accelerator.build import reason_not_to_build

needs_backend = pytest.mark.skipif(reason_not_to_build() is not None, reason=str(reason_not_to_build()))


def run(*arguments, **environment):
    """A program in a fork of a process that has imported transformers: most of its time would be that import."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return fresh_process.run(*arguments, env=environment, imported=fresh_process.TRAINER)


@needs_backend
@pytest.mark.slow
def test_a_model_is_simulated():
    arguments = ("--model", "tiny", "--microbatches", "2", "--tokens", "64", "--steps", "2")
    found = json.loads(run("-m", "benchmarks.simulated", *arguments, LATE_DRY="1", LATE_DEVICES="2").stdout)
    assert 0 < found["milliseconds"] < 1000
    assert all(0 < share < 1 for share in found["busy"].values())
