"""Tests of checkpoints of the Trainer: a kill leaves whole ones, and a run goes on from one."""

import json
import os
import shutil

import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

import warnings

from transformers import Trainer, TrainerCallback

from roundpipe_runtime import CheckpointError, CheckpointWarning, DamagedCheckpointError, load_checkpoint
from roundpipe_runtime.checkpoint.folder import MANIFEST, write_manifest
from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer
from roundpipe_runtime.huggingface.trainer.pipeline_trainer import newest_whole, remove_all_but
from tests import fresh_process
from tests.runtime.huggingface.trainer.trainer_runs import arguments, history, make_trainer
from tests.runtime.small import names

pytestmark = pytest.mark.slow

SAVING = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "no"}


def make(run, *steps, manifest=True):
    for step in steps:
        path = run / f"checkpoint-{step}"
        path.mkdir(parents=True)
        (path / "model.safetensors").write_text(f"weights {step}")
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        if manifest:
            write_manifest(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", ["trainer_state.json", "roundpipe.json", "fine_tune.json"])
@pytest.mark.parametrize("content", [None, "[1, 2]", "[" * 100_000, "a text"], ids=["pipe", "list", "deep", "text"])
def test_notes_of_a_checkpoint_that_are_something_else(tmp_path, name, content):
    from roundpipe_runtime.fine_tune.trainer import read_notes
    from roundpipe_runtime.huggingface.trainer.pipeline_trainer import _has_shards

    make(tmp_path, 2, 4, manifest=False)
    file = tmp_path / "checkpoint-4" / name
    file.unlink(missing_ok=True)
    if content is None:
        os.mkfifo(file)
    else:
        file.write_text(content)
    if name == "trainer_state.json":
        with pytest.warns(CheckpointWarning, match="missing or truncated"):
            assert newest_whole(tmp_path) == tmp_path / "checkpoint-2"
        return
    read = {"roundpipe.json": _has_shards, "fine_tune.json": read_notes}[name]
    assert not read(tmp_path / "checkpoint-2")
    with pytest.raises(DamagedCheckpointError, match=name):
        read(tmp_path / "checkpoint-4")


def test_checkpoints_of_a_plain_trainer_count(tmp_path):
    """They have no manifest; the file that is written last tells whether they are whole."""
    make(tmp_path, 2, 4, 6, manifest=False)
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text('{"global_st')
    (tmp_path / "checkpoint-4" / "checkpoint-is-incomplete.txt").write_text("")
    with pytest.warns(CheckpointWarning, match="missing or truncated") as caught:
        assert newest_whole(tmp_path) == tmp_path / "checkpoint-2"
    assert len(caught) == 2


def test_newest_is_that_of_most_steps_nothing_whole_is_an_error_and_nothing_at_all_is_none(tmp_path):
    """A training never starts anew in silence. Adapters in folders of their own are checked, too."""
    assert newest_whole(tmp_path) is None
    assert newest_whole(tmp_path / "not there") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path / "three", 9, 12, 3)
        assert newest_whole(tmp_path / "three") == tmp_path / "three" / "checkpoint-12"
    make(tmp_path, 3, manifest=False)
    path = tmp_path / "checkpoint-3"
    (path / "second").mkdir()
    (path / "second" / "adapter_model.safetensors").write_text("weights")
    write_manifest(path)
    assert newest_whole(tmp_path) == path
    (path / "second" / "adapter_model.safetensors").write_text("weight_")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(DamagedCheckpointError, match=r"is complete:\n(.|\n)*second/adapter_model"),
    ):
        newest_whole(tmp_path)


def test_what_a_kill_left_is_settled(tmp_path):
    make(tmp_path, 1)
    make(tmp_path / ".checkpoint-2.writing", 2)
    make(tmp_path / ".checkpoint-3.writing", 3, manifest=False)
    make(tmp_path / ".checkpoint-1.writing", 1)
    (tmp_path / ".checkpoint-0.leaving").mkdir()
    newest_whole(tmp_path)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize(("limit", "best", "expected"), [
    (None, None, [1, 2, 3, 4]), (0, None, [1, 2, 3, 4]), (2, None, [3, 4]), (2, 1, [1, 4]), (1, 2, [2, 4]),
    (1, 4, [4]), (9, 1, [1, 2, 3, 4]),
])  # fmt: skip
def test_the_newest_and_the_best_stay(tmp_path, limit, best, expected):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    remove_all_but(tmp_path, limit, None if best is None else str(tmp_path / f"checkpoint-{best}"))
    assert names(tmp_path) == [f"checkpoint-{step}" for step in expected]


def test_a_run_that_starts_anew_keeps_its_own(tmp_path):
    """The newest is the last that was written, also beside one with more steps; half ones count for nothing."""
    make(tmp_path, 500)
    os.utime(tmp_path / "checkpoint-500", (1, 1))
    make(tmp_path, 10)
    make(tmp_path, 11)
    (tmp_path / "checkpoint-11" / "model.safetensors").unlink()
    remove_all_but(tmp_path, 1, None)
    assert names(tmp_path) == ["checkpoint-10"]


@pytest.fixture
def trainer(tmp_path):
    def make_one(steps=4, **options):
        changes = {key: options.pop(key) for key in list(options) if key.startswith(("save", "eval", "load"))}
        return make_trainer("gpt2", arguments(tmp_path, steps, **{**SAVING, **changes}), RoundPipeTrainer, **options)

    return make_one


def test_files_are_those_of_the_trainer_and_a_manifest_and_a_damaged_one_that_was_asked_for_is_an_error(
    trainer, tmp_path
):
    """The path was given, so no other one is taken; the error says how to."""
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer(1).train(resume_from_checkpoint=True)
    trainer(1).train()
    make_trainer("gpt2", arguments(tmp_path / "plain", 1, **SAVING), Trainer).train()
    expected = {path.name for path in (tmp_path / "plain" / "checkpoint-1").iterdir()}
    found = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert found == expected | {MANIFEST, "roundpipe.json", "roundpipe.safetensors"}
    assert names(tmp_path) == ["checkpoint-1", "plain"]
    (tmp_path / "checkpoint-1" / "scheduler.pt").write_bytes(b"")
    with pytest.raises(
        DamagedCheckpointError, match=r"has 0 bytes.*\n    trainer.train\(resume_from_checkpoint=True\)"
    ):
        trainer(2).train(resume_from_checkpoint=tmp_path / "checkpoint-1")


def test_a_damaged_checkpoint_is_passed_over_and_written_again(trainer, tmp_path):
    whole = trainer()
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    weights = tmp_path / "checkpoint-3" / "optimizer.pt"
    weights.write_bytes(weights.read_bytes()[:-1])
    again = trainer()
    with pytest.warns(CheckpointWarning, match=r"checkpoint-3: optimizer.pt has \d+ bytes"):
        again.train(resume_from_checkpoint=True)
    assert history(again, "loss") == history(whole, "loss")
    assert all(map(torch.equal, again.model.state_dict().values(), whole.model.state_dict().values()))
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-4"
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]


def test_a_disk_that_is_full_leaves_what_was_there(trainer, tmp_path, monkeypatch):
    ours = trainer(3)

    def full(folder):
        if "checkpoint-2" in folder:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(ours, "_save_rng_state", full)
    with pytest.raises(OSError, match="No space left"):
        ours.train()
    assert names(tmp_path) == ["checkpoint-1"]


def test_the_best_checkpoint_is_known_by_its_place(trainer, tmp_path):
    best = {"save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    ours = trainer(3, **best)
    losses = {1: 3.0, 2: 1.0, 3: 2.0}
    ours.evaluate = lambda **kwargs: {"eval_loss": losses[ours.state.global_step]}
    seen = []

    class Looks(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen.append(names(tmp_path))

    ours.add_callback(Looks)
    ours.train()
    assert seen[-1] == ["checkpoint-2", "checkpoint-3"]
    assert ours.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    stored = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert stored["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")


def test_load_checkpoint_says_whose_it_is(tmp_path):
    make(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match=r"was written by a Trainer.*\n    trainer.train\(resume_from_checkpoint="
    ):
        load_checkpoint(tmp_path / "checkpoint-1", torch.nn.Linear(1, 1))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="attempts are forked, which this system cannot")
@pytest.mark.extended  # kills of the two commands and of a loop are tested each time
def test_kills_change_no_bit(tmp_path):
    wanted = int(os.environ.get("ROUNDPIPE_KILLS", "3"))
    steps = max(6, wanted)
    ends = []
    for kills in (0, wanted):
        folder = tmp_path / str(kills)
        options = ["--steps", str(steps), "--kills", str(kills)]
        program = "tests.runtime.huggingface.trainer.killed_trainer"
        done = fresh_process.run("-m", program, folder, *options, imported=fresh_process.TRAINER)
        losses = {tuple(line.split()) for line in (folder / "losses").read_text().splitlines()}
        assert sorted(int(line[0]) for line in losses) == list(range(1, steps + 1))  # what came twice came out equal
        ends.append((losses, (folder / "final").read_text()))
        assert set(names(folder / "run")) == {f"checkpoint-{steps - 1}", f"checkpoint-{steps}"}
    assert int(done.stdout.split()[0]) > wanted / 2
    assert ends[0] == ends[1]
