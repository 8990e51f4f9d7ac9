"""RoundPipeTrainer in two processes: the losses of a Trainer with DDP, one folder of checkpoints."""

from pathlib import Path

import pytest
import torch

from tests import fresh_process
from tests.runtime.distributed.processes import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("trainer")
    ranks = run_ranks("tests.runtime.distributed.trainer_ranks:in_ranks", 2, str(folder), timeout=240)
    return [{**rank, "folder": folder} for rank in ranks]


@pytest.fixture
def one_thread():
    """Each rank has one thread of torch, and on some machines the bits of a product depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["loss", "eval_loss", "grad_norm"])
def test_numbers_are_those_of_the_trainer_with_ddp(found, name):
    for rank in found:
        assert rank["ours"][name] == pytest.approx(rank["plain"][name], rel=1e-6 if name != "grad_norm" else 1e-5)


def test_rows_that_come_one_by_one_are_those_of_the_trainer_with_ddp(found):
    """Of an `IterableDataset`, which accelerate cuts among the processes."""
    for rank in found:
        plain, ours = rank["streams"]
        assert ours == pytest.approx(plain, rel=1e-6)
        assert len(plain) == 2


def test_weights_are_those_of_the_trainer_with_ddp(found):
    """They differ by the rounding of float32 alone."""
    assert max(rank["distance"] for rank in found) < 5e-6


def test_a_training_goes_on_from_its_checkpoint(found):
    """Rank 0 writes it, all resume from it, and the weights are bitwise those of an undisturbed training."""
    assert [rank["resumed"] for rank in found] == [True, True]
    assert {"checkpoint-2", "checkpoint-4"} <= set(found[0]["files"])


def test_state_is_in_shards(found):
    checkpoint = Path(found[0]["folder"], "ours", "checkpoint-4")
    assert len(list((checkpoint / "shards").iterdir())) == 2
    assert not (checkpoint / "optimizer.pt").exists()


@pytest.mark.parametrize("where", ["train", "eval"])
def test_a_row_that_one_process_cannot_read_is_an_error_of_all(found, where):
    """With its rank and cause, while the others would wait for its batch."""
    (other, text, _), (own, cause, _) = (rank["bad rows"][where] for rank in found)
    assert (own, "cannot be read" in cause) == ("OSError", True)
    assert other == "DistributedError"
    assert "Rank 1 failed" in text
    assert "OSError: row" in text
    assert max(rank["bad rows"][where][2] for rank in found) < 20


@pytest.mark.extended  # another launcher
def test_accelerate_starts_the_same_training(found, tmp_path):
    launch = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["-m", "tests.runtime.distributed.launched"]
    program = "from accelerate.commands.accelerate_cli import main; import sys; sys.argv = sys.argv[1:]; main()"
    done = fresh_process.run("-c", program, *launch, str(tmp_path), timeout=240, imported=fresh_process.TRAINER)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        expected = torch.load(found[0]["folder"] / "ours" / f"{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / f"{rank}.pt"), expected, strict=True))


@pytest.mark.parametrize("resumed", [False, True], ids=["from the start", "from a checkpoint of two"])
def test_one_process_with_as_many_groups_has_the_same_bits(found, resumed, tmp_path, one_thread):
    from roundpipe_runtime import RoundPipeTrainer
    from tests.runtime.distributed.trainer_ranks import UNEVEN, Rows, train

    folder = found[0]["folder"]
    resume = str(folder / "uneven" / "checkpoint-4") if resumed else False
    options = {"devices": "virtual:1", "microbatches": 2, "replicas": 2}
    one = train(RoundPipeTrainer, tmp_path, 6, resume=resume, data=Rows(UNEVEN), **options)
    assert one["loss"] == found[0]["uneven"] == found[1]["uneven"]
    for rank in (0, 1):
        of_rank = torch.load(folder / "uneven" / f"{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(one["weights"], of_rank, strict=True))
