"""Checkpoints that several processes write, and that any number of processes reads."""

import re

import pytest
from torch.distributed.checkpoint import state_dict_loader

from roundpipe_runtime import RoundPipeWarning, list_checkpoints, load_checkpoint, save_checkpoint
from tests.runtime.checkpoint.sharded_ranks import Training, pipeline
from tests.runtime.distributed.processes import run_ranks

pytestmark = pytest.mark.slow

RANKS = "tests.runtime.checkpoint.sharded_ranks"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(home):
    training = Training()
    training.go_on(2)
    training.save(home / "one")
    model = pipeline(replicas=5)
    save_checkpoint(home / "groups", model)
    return run_ranks(f"{RANKS}:two", 2, str(home))


@pytest.fixture(scope="module")
def three(home, two):
    shard = sorted((sorted((home / "two").iterdir())[-1] / "shards").iterdir())[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    return run_ranks(f"{RANKS}:three", 3, str(home))


def test_two_processes_go_on_with_a_checkpoint_of_one_and_write_theirs_in_the_background(two):
    for rank in two:
        assert rank["nothing there"] is None
        assert rank["loaded"] == {"step": 2}
        assert rank["same"]
        assert rank["then"]
        assert rank["kept"] == ["checkpoint-00000002", "checkpoint-00000003"]


def test_a_process_that_cannot_write_or_load_ends_all_of_them(two):
    written, loaded = ([rank[what] for rank in two] for what in ("failed", "failed to load"))
    full, bad = "OSError: [Errno 28] No space left on device", "ValueError: a bad scheduler"
    assert written == [[f"CheckpointError: Rank 1 of 2 failed: {full}", True], [full, True]]
    assert loaded == [[f"CheckpointError: Rank 1 of 2 failed: {bad}", True, True], [bad, True, True]]


def test_the_number_of_groups_is_kept_and_one_process_without_groups_is_warned(home, two):
    """It takes the sums in another order; the line to type has their number."""
    assert [rank["groups"] for rank in two] == [5, 5]
    model = pipeline()
    with pytest.warns(RoundPipeWarning, match=r"RoundPipe\(..., replicas=5\)"):
        load_checkpoint(home / "groups", model)
    given = pipeline(replicas=5)
    load_checkpoint(home / "groups", given)
    assert given.replicas == 5


def test_three_processes_go_on_with_a_checkpoint_of_two(three):
    for rank in three:
        assert rank["loaded"] == {"step": 4}
        assert rank["same"]
        assert rank["then"]
    assert re.search("shards/shard-00002-.* was changed after it was written", three[0]["warned"][0])
    assert [rank["warned"] for rank in three[1:]] == [[], []]


def test_one_process_without_a_group_goes_on_with_a_checkpoint_of_three(home, three, tmp_path):
    """And writes one of today's, without shards."""
    training = Training()
    assert training.load(home / "three") == {"step": 5}
    assert training.is_as_never_stopped()
    checkpoint = training.save(tmp_path)
    assert not (checkpoint.path / "shards").exists()
    again = Training()
    assert again.load(checkpoint) == {"step": 5}
    assert again.is_as_never_stopped()
    training.go_on(1)
    assert training.is_as_never_stopped()


def test_the_files_are_safetensors_and_json_and_the_place_in_the_data_is_read_without_the_shards(
    home, three, monkeypatch
):
    (checkpoint,) = (home / "three").iterdir()
    names = sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())
    shards = [f"shards/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2, 3)]
    assert names == ["checkpoint.json", "model.safetensors", *shards, "training.json", "training.safetensors"]

    def load(found, **options):
        assert not found

    monkeypatch.setattr(state_dict_loader, "load", load)
    assert [checkpoint.data for checkpoint in list_checkpoints(home / "three")] == [{"step": 5}]
