"""Several processes: the Trainer, own losses, and long rows that processes share."""

from pathlib import Path

import pytest
import torch

from tests import fresh_process
from tests.runtime.distributed.processes import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
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


def test_numbers_are_those_of_the_trainer_with_ddp(trained):
    """Also of rows that come one by one."""
    for rank in trained:
        for name in ("loss", "eval_loss", "grad_norm"):
            assert rank["ours"][name] == pytest.approx(rank["plain"][name], rel=1e-6 if name != "grad_norm" else 1e-5)
        assert rank["distance"] < 5e-6
        plain, ours = rank["streams"]
        assert ours == pytest.approx(plain, rel=1e-6)
        assert len(plain) == 2


def test_a_training_goes_on_from_its_checkpoint_whose_state_is_in_shards(trained):
    assert [rank["resumed"] for rank in trained] == [True, True]
    folder = Path(trained[0]["folder"], "ours")
    assert {"checkpoint-2", "checkpoint-4"} <= {path.name for path in folder.iterdir()}
    assert len(list((folder / "checkpoint-4" / "shards").iterdir())) == 2
    assert not (folder / "checkpoint-4" / "optimizer.pt").exists()


@pytest.mark.parametrize("where", ["train", "eval"])
def test_a_row_that_one_process_cannot_read_is_an_error_of_all(trained, where):
    """With its rank and cause, while the others would wait for its batch."""
    (other, text, _), (own, cause, _) = (rank["bad rows"][where] for rank in trained)
    assert (own, "cannot be read" in cause) == ("OSError", True)
    assert other == "DistributedError"
    assert "Rank 1 failed" in text
    assert "OSError: row" in text
    assert max(rank["bad rows"][where][2] for rank in trained) < 20


@pytest.mark.extended  # another launcher
def test_accelerate_starts_the_same_training(trained, tmp_path):
    launch = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["-m", "tests.runtime.distributed.trainer_ranks"]
    program = "from accelerate.commands.accelerate_cli import main; import sys; sys.argv = sys.argv[1:]; main()"
    done = fresh_process.run("-c", program, *launch, str(tmp_path), timeout=240, imported=fresh_process.TRAINER)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        expected = torch.load(trained[0]["folder"] / "ours" / f"{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / f"{rank}.pt"), expected, strict=True))


@pytest.mark.parametrize("resumed", [False, True], ids=["from the start", "from a checkpoint of two"])
def test_one_process_with_as_many_groups_has_the_same_bits(trained, resumed, tmp_path, one_thread):
    from roundpipe_runtime import RoundPipeTrainer
    from tests.runtime.distributed.trainer_ranks import UNEVEN, Rows, train

    folder = trained[0]["folder"]
    resume = str(folder / "uneven" / "checkpoint-4") if resumed else False
    options = {"devices": "virtual:1", "microbatches": 2, "replicas": 2}
    one = train(RoundPipeTrainer, tmp_path, 6, resume=resume, data=Rows(UNEVEN), **options)
    assert one["loss"] == trained[0]["uneven"] == trained[1]["uneven"]
    for rank in (0, 1):
        of_rank = torch.load(folder / "uneven" / f"{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(one["weights"], of_rank, strict=True))


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.extended)])
def own_losses(request, tmp_path_factory):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    folder = tmp_path_factory.mktemp("trainer")
    return run_ranks("tests.runtime.distributed.trainer_ranks:own_losses", request.param, str(folder), timeout=240)


@pytest.mark.parametrize("name", ["function", "subclass"])
def test_own_losses_are_those_of_the_trainer_with_ddp(own_losses, name):
    for rank in own_losses:
        logged, plain, distant = rank[name]
        assert len(plain) == 6
        assert logged == pytest.approx(plain, rel=1e-5)
        assert distant < 5e-6


def test_an_error_in_the_loss_of_one_process_ends_all(own_losses):
    """With its rank and cause, while the others would wait. Rows of a group in another process cannot be compared."""
    (other, text), (own, cause) = (rank["failed"] for rank in own_losses[:2])
    assert (own, "a loss of one process" in cause) == ("KeyError", True)
    assert (other, "Rank 1 failed" in text) == ("DistributedError", True)
    for kind, text in (rank["replicas"] for rank in own_losses):
        assert (kind, "Leave replicas=4 out" in text) == ("ConfigError", True)


def test_trainers_of_trl_train_as_with_ddp(tmp_path):
    pytest.importorskip("trl", reason="these are its trainers")
    pytest.importorskip("peft", reason="the module with these trainings needs it")
    ranks = run_ranks("tests.runtime.distributed.trainer_ranks:trl_in_ranks", 2, str(tmp_path), timeout=240)
    for rank in ranks:
        for ours, plain, distant in rank.values():
            assert len(plain) == 6
            for one, other in zip(ours, plain, strict=True):
                assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
            assert distant < 1e-5


MODULE = "tests.runtime.distributed.long_rows_ranks"


@pytest.fixture(scope="module", params=[2, 3])
def found(request):
    return run_ranks(f"{MODULE}:in_ranks", request.param, timeout=240)


@pytest.mark.parametrize("name", ["llama", "queries share keys", "tied", "short rows", "adapters"])
def test_trainings_are_those_of_whole_rows(found, name):
    """Steps with odd lengths, rows that end early, and tokens without labels, in float64."""
    if name == "adapters" and len(found) == 3:
        pytest.skip("this model has four heads, which three processes cannot share")
    for rank in found:
        one = rank[name]
        assert one["losses"] == pytest.approx(one["expected"], rel=1e-6)  # the model's loss is in float32
        assert one["distance"] < 1e-6
        assert not one["whole"]
        assert one["attention"]
        assert one["sent"] > 0
    assert all(rank[name]["losses"] == found[0][name]["losses"] for rank in found)
    assert all(rank["again"] for rank in found)  # each run has the same bits


def test_each_device_has_its_share_of_the_activations():
    for own, whole in run_ranks(f"{MODULE}:memory", 2, timeout=100):
        assert 0.45 * whole < own < 0.6 * whole


def test_an_error_of_one_process_ends_the_call_of_all():
    ranks = run_ranks(f"{MODULE}:failures", 2, timeout=100)
    assert [rank["layer"][0] for rank in ranks] == ["DistributedError", "KeyError"]
    assert "Rank 1 failed" in ranks[0]["layer"][1]
    for rank in ranks:
        assert rank["gradients"] == 0
        assert rank["batches"][0] == "DistributedError"
        assert "the batch is" in rank["batches"][1]
        assert rank["next"][0] == pytest.approx(rank["next"][1], rel=1e-6)


def test_what_cannot_be_cut_is_refused_in_one_line():
    messages = {
        "heads": "4 query heads and 1 key/value heads, which 2 processes cannot share",
        "router": "output_router_logits = False",
        "devices": "one device in each process, found 2",
        "left": "padded on the left",
        "padding": "Labels of padding must be -100",
        "positions": "also has position_ids",
        "window": "attends to 8 tokens of a row of 12",
    }
    for rank in run_ranks(f"{MODULE}:refusals", 2, timeout=100):
        assert rank.keys() == messages.keys()
        assert {kind for kind, _ in rank.values()} <= {"ConfigError", "StageError"}
        assert all(messages[name] in text for name, (_, text) in rank.items())
