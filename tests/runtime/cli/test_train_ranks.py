"""`roundpipe train` in two processes: the bits of one, one log, and one line about what is wrong."""

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

from roundpipe_runtime.__main__ import main
from roundpipe_runtime.fine_tune import model_source
from tests import fresh_process
from tests.runtime import tiny_training as tiny
from tests.runtime.cli.train_ranks import COMMAND
from tests.runtime.distributed.processes import run_ranks

pytestmark = pytest.mark.slow


def same_bits(one, other):
    return tiny.same_bits(*(model_source(folder).load().state_dict() for folder in (one, other)))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes show, and the folder in which one process has trained the same groups."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny.text_folder(folder / "texts")
    tiny.config_folder(folder / "conf")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        one = [*COMMAND, "texts", "--devices", "virtual:1", "--checkpoint", "of one", "--metrics", "one.jsonl"]
        assert main([*one, "-o", "one half", "--steps", "2", "--replicas", "2"]) == 0
    found = run_ranks("tests.runtime.cli.train_ranks:in_ranks", 2, str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        of_ranks = ["--checkpoint", "c", "--resume", "--metrics", "half.jsonl"]
        assert main([*COMMAND, "texts", "-o", "one", "--steps", "3", "--devices", "virtual:3", *of_ranks]) == 0
    return found, folder


def test_two_processes_have_the_bits_of_one(ranks):
    """Steps 1 and 2 in one process and step 3 in two, or the reverse. Groups are kept; each rank writes its shards."""
    _, folder = ranks
    assert same_bits(folder / "half", folder / "one half")
    assert same_bits(folder / "whole", folder / "one")
    assert tiny.metrics_of(folder / "half.jsonl")[:2] == tiny.metrics_of(folder / "one.jsonl")[:2]
    assert tiny.metrics_of(folder / "half.jsonl")[-2:] == tiny.metrics_of(folder / "whole.jsonl")[-2:]
    checkpoint = folder / "c" / "checkpoint-2"
    assert len(list((checkpoint / "shards").iterdir())) == 2
    assert not (checkpoint / "optimizer.pt").exists()


def test_there_is_one_log(ranks):
    found, folder = ranks
    for name in ("half", "goes on"):
        assert [rank[name]["status"] for rank in found] == [0, 0]
        assert [rank[name]["err"] for rank in found] == ["", ""]
        assert found[1][name]["out"] == ""
    shown = found[0]["half"]["out"]
    line = "steps: 2 of 5 rows in 2 groups of 2 microbatches in 2 processes, each on virtual:0, virtual:1"
    assert line in shown.splitlines()
    assert "step 2:  roundpipe timeline t.json t.1.json" in shown
    assert (folder / "t.1.json").exists()
    assert found[0]["goes on"]["out"].splitlines()[2] == "continuing after step 2"


MISTAKES = {
    "few groups": "A batch is split into 1 groups, so some of the 2 processes would have nothing to do. Start "
    "fewer processes, or use more groups: --replicas 2",
    "many groups": "A batch of 5 rows cannot be split into 6 groups. Use a larger batch, or fewer groups: "
    "--batch 6, or --replicas 5",
    "few rows": "A batch of 1 rows leaves some of the 2 processes without rows. Start fewer processes, or use a "
    "larger batch: --batch 2",
    "other texts": "The ranks differ: the text is '189 rows of 16 tokens, ",
    "no text": "Rank 1: There is no file gone.txt.",
    "another option": "The ranks differ: clip is '0.5' on rank 1, and '1.0' on rank 0.",
    "output": "whole exists. Name another folder, or replace it: --overwrite",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_of_one_rank(ranks, name):
    found = [rank[name] for rank in ranks[0]]
    assert [one["status"] for one in found] == [2, 2]
    shown = "".join(one["err"] for one in found)
    assert shown.startswith(f"roundpipe: {MISTAKES[name]}")
    assert shown.count("\n") == 1


def test_an_exception_in_a_layer_ends_all_ranks_at_once(ranks):
    """One line of one rank names rank, stage and layer."""
    found = [rank["layer"] for rank in ranks[0]]
    assert [one["status"] for one in found] == [2, 2]
    shown = "".join(one["err"] for one in found)
    assert shown.count("\n") == 1
    for word in ("Rank 1 failed", "BadRowError: a bad row", "In stage ", "layer 2 "):
        assert word in shown
    (failed,) = found[1]["failed"]
    # the machine may be busy; without an alarm it took the others three seconds
    assert max(one["ended"] for one in found) - failed < 2.5


def test_killed_ranks_go_on_by_themselves(ranks):
    """Under the agent of torchrun: each kill starts both ranks again, from the last checkpoint, to the same bits."""
    _, folder = ranks
    words = ("-m", "tests.runtime.cli.train_ranks", folder, "1:1:2", "0:2:3")
    done = fresh_process.run(*words, imported=fresh_process.TRAINER)
    assert [line for line in done.stdout.splitlines() if line.startswith("continuing")] == [
        "continuing after step 1",
        "continuing after step 2",
    ]
    calm = [row for row in tiny.metrics_of(folder / "half.jsonl") if row[:2] != (2, "eval")]  # it was stopped there
    assert tiny.metrics_of(folder / "ranks.jsonl") == calm
    assert same_bits(folder / "ranks", folder / "whole")
