"""RoundPipeTrainer in two processes: the losses of a Trainer with DDP, one folder of checkpoints."""

import pytest

from tests import fresh_process
from tests.runtime.distributed.processes import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("trainer")
    return run_ranks(
        "tests.runtime.distributed.trainer_ranks:in_ranks", 2, str(folder), imported=fresh_process.TRAINER, timeout=240
    )


@pytest.mark.parametrize("name", ["loss", "eval_loss", "grad_norm"])
def test_numbers_are_those_of_the_trainer_with_ddp(found, name):
    """Each rank has its batch, tokens count over all of them, two batches are accumulated."""
    for rank in found:
        assert rank["ours"][name] == pytest.approx(rank["plain"][name], rel=1e-6 if name != "grad_norm" else 1e-5)


def test_weights_are_those_of_the_trainer_with_ddp(found):
    """They differ by the rounding of float32 alone."""
    assert max(rank["distance"] for rank in found) < 5e-6


def test_a_training_goes_on_from_its_checkpoint(found):
    """Rank 0 writes it, all resume from it, and the weights are bitwise those of an undisturbed training."""
    assert [rank["resumed"] for rank in found] == [True, True]
    assert {"checkpoint-2", "checkpoint-4"} <= set(found[0]["files"])
