"""A training from its first step to its last: what is written when, and what a signal does."""

import errno
import json
import math
import os
import shutil
import signal
import threading
import time

import pytest

from roundpipe_runtime.fine_tune import FineTuneError, Outcome, Settings, StepRecord, Training, check_disk, run
from roundpipe_runtime.fine_tune.job import Interruption
from tests import fresh_process
from tests.runtime import tiny_training as tiny

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")


def training(**options):
    chosen = {"batch": 4, "microbatches": 2, "steps": 7, "devices": "virtual:1", "check": False, "eval_every": 3}
    return Training(tiny.source().load(), tiny.blocks(), Settings(**{**chosen, **options}))


def saved(folder):
    return {int(path.name.removeprefix("checkpoint-")): str(path) for path in folder.glob("checkpoint-*")}


def interrupts(step, number=signal.SIGINT):
    return lambda record: record.step == step and isinstance(record, StepRecord) and os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "m.jsonl"
    with training() as made:
        run(made, metrics=path)
    return tiny.metrics_of(path)


def test_all_steps_are_done_and_shown_in_order(tmp_path):
    shown = []
    with training() as made:
        outcome = run(made, checkpoints=tmp_path / "c", metrics=tmp_path / "m.jsonl", show=shown.append)
    assert outcome == Outcome(0, None, None)
    assert not (tmp_path / "c").exists()
    assert [(record.step, isinstance(record, StepRecord)) for record in shown] == [
        *[(1, True), (2, True), (3, True), (3, False)],
        *[(4, True), (5, True), (6, True), (6, False), (7, True), (7, False)],
    ]
    expected = [(r.step, "loss", r.loss) if isinstance(r, StepRecord) else (r.step, "eval", r.eval_loss) for r in shown]
    assert tiny.metrics_of(tmp_path / "m.jsonl") == expected


@pytest.mark.parametrize(
    ("at_end", "keep", "steps"), [(False, None, [2, 4, 6]), (True, None, [2, 4, 6, 7]), (False, 2, [4, 6])]
)
def test_checkpoints_come_every_so_many_steps(tmp_path, at_end, keep, steps):
    with training(eval_every=None) as made:
        outcome = run(made, checkpoints=tmp_path, every=2, keep=keep, at_end=at_end)
    assert sorted(saved(tmp_path)) == steps
    assert outcome.checkpoint == saved(tmp_path)[steps[-1]]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_behind_the_step_and_its_evaluation(tmp_path, number, status, whole, capfd):
    """With a line that says what happens, and a checkpoint, from which another training goes on to the same losses."""
    with training() as made:
        outcome = run(made, checkpoints=tmp_path / "c", metrics=tmp_path / "m.jsonl", show=interrupts(3, number))
        assert (outcome.status, made.step) == (status, 3)
    assert "stopping after this step; press Ctrl-C again to quit now" in capfd.readouterr().err
    assert list(saved(tmp_path / "c")) == [3]
    assert tiny.metrics_of(tmp_path / "m.jsonl")[-1][:2] == (3, "eval")
    with training(devices="virtual:2") as made:
        assert made.restore(tmp_path / "c")
        assert run(made, checkpoints=tmp_path / "c", metrics=tmp_path / "m.jsonl").status == 0
    assert tiny.metrics_of(tmp_path / "m.jsonl") == whole


@pytest.mark.parametrize(("step", "every", "status", "steps"), [(2, 2, 130, [2]), (7, None, 0, [])])
def test_a_signal_at_a_checkpoint_or_in_the_last_step_writes_no_further_one(tmp_path, step, every, status, steps):
    """In the last step all is done, so nothing is to be resumed."""
    with training(eval_every=None) as made:
        assert run(made, checkpoints=tmp_path, every=every, show=interrupts(step)).status == status
    assert list(saved(tmp_path)) == steps


def test_the_signals_of_another_thread_are_left_alone():
    """Python gives signals to the main thread only."""
    before, found = signal.getsignal(signal.SIGINT), []

    def work():
        with Interruption() as interruption:
            found.append((interruption.status, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(0, before)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_signal_ends_the_process(number, status):
    program = """
import sys, threading, time
from roundpipe_runtime.fine_tune.job import Interruption
threading.Thread(target=time.sleep, args=(60,)).start()
with Interruption() as interruption:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if interruption.status:
            print("noted", flush=True)
            time.sleep(60)
"""
    with fresh_process.start("-c", program) as process:
        process.wait_for(lambda: process.stdout == "ready\n")
        process.send_signal(number)
        process.wait_for(lambda: process.stdout == "ready\nnoted\n")
        begin = time.monotonic()
        process.send_signal(number)
        assert process.wait() == status
        assert time.monotonic() - begin < 30
        assert "left at once" in process.stderr


def test_an_error_leaves_the_metrics_of_the_steps_before(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]

    def fail(record):
        if record.step == 2:
            raise ZeroDivisionError

    with training(eval_every=None) as made, pytest.raises(ZeroDivisionError):
        run(made, checkpoints=tmp_path / "c", metrics=tmp_path / "m.jsonl", show=fail)
    assert [row[0] for row in tiny.metrics_of(tmp_path / "m.jsonl")] == [1, 2]
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize(("steps", "recorded"), [(7, 5), (2, 2)])
def test_a_timeline_holds_one_step(tmp_path, steps, recorded):
    """The fifth, or the last: a viewer of traces opens it."""
    with training(steps=steps) as made:
        outcome = run(made, checkpoints=tmp_path / "c", timeline=tmp_path / "t.json")
    assert outcome.recorded == recorded
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"forward", "loss", "backward"} <= {event.get("cat") for event in events}
    losses = [event for event in events if event.get("cat") == "loss"]
    assert len(losses) == 2  # one for each microbatch


# -- what was trained is not thrown away -------------------------------------------------------------------------------


def test_an_evaluation_that_fails_takes_no_step_with_it(tmp_path, monkeypatch):
    """The model is saved before it, and a checkpoint after the error, which goes on to the same evaluation."""
    done = []
    with training(eval_every=None) as made, monkeypatch.context() as patch:
        patch.setattr(made.trainer, "_loss_of", lambda batch: done.append("evaluation") or 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            run(made, checkpoints=tmp_path / "c", save_model=lambda: done.append("model"))
    assert done == ["model", "evaluation"]
    place = saved(tmp_path / "c")[7]
    notes = ["The trained model is saved.", f"The first 7 steps are saved in {place}. To continue: --resume"]
    assert caught.value.__notes__ == notes
    with training(eval_every=None, steps=8) as made:  # one more
        assert made.restore(tmp_path / "c")
        run(made, checkpoints=tmp_path / "c", metrics=tmp_path / "m.jsonl", save_model=lambda: done.append("again"))
    assert done[2:] == ["again"]


@pytest.mark.parametrize("failing", ["layer", "loss"])
def test_a_step_that_fails_takes_none_before_with_it(tmp_path, monkeypatch, failing, whole):
    """From the checkpoint that the note names, the training goes on to the same bits."""
    with training() as made:

        def fails():
            return made.step == 4

        if failing == "layer":
            made.pipeline.cut.model.model.layers[1].register_forward_hook(lambda *call: 1 / 0 if fails() else None)
        else:
            finite = made.trainer._finite
            monkeypatch.setattr(made.trainer, "_finite", lambda what, x: finite(what, math.nan if fails() else x))
        with pytest.raises((FineTuneError, ZeroDivisionError)) as caught:
            run(made, checkpoints=tmp_path / "c", metrics=tmp_path / "m.jsonl")
    said = f"The first 4 steps are saved in {saved(tmp_path / 'c')[4]}. To continue: --resume"
    assert caught.value.__notes__[-1] == said
    with training() as made:
        assert made.restore(tmp_path / "c")
        run(made, checkpoints=tmp_path / "c", metrics=tmp_path / "m.jsonl")
    assert tiny.metrics_of(tmp_path / "m.jsonl") == whole


def test_a_step_that_failed_half_way_is_not_counted_when_it_is_repeated(tmp_path):
    """The loss of the microbatch before the error would be added to those of the same step, restored and run again."""
    with training(accumulate=2) as made:
        run(made, metrics=tmp_path / "whole.jsonl")
    with training(accumulate=2) as made:
        finite, losses = made.trainer._finite, []

        def fails(what, found):
            losses.append((made.step, what))
            if losses.count((4, "loss")) == 2 and losses[-1] == (4, "loss"):
                raise MemoryError("once")
            return finite(what, found)

        made.trainer._finite = fails
        with pytest.raises(MemoryError):
            run(made, checkpoints=tmp_path / "c", metrics=tmp_path / "m.jsonl")
        assert made.restore(tmp_path / "c")
        run(made, checkpoints=tmp_path / "c", metrics=tmp_path / "m.jsonl")
    assert tiny.metrics_of(tmp_path / "m.jsonl") == tiny.metrics_of(tmp_path / "whole.jsonl")


def test_an_optimizer_that_fails_in_its_step_leaves_no_checkpoint(tmp_path):
    """Some parameters are those of the next step, so there is nothing that could be resumed."""
    with training() as made:

        def step(optimizer, args, kwargs):
            if made.step == 4:
                raise MemoryError("in the middle")

        made.optimizer.register_step_post_hook(step)  # all of it is written, and the step is not counted
        with pytest.raises(MemoryError, match="in the middle") as caught:
            run(made, checkpoints=tmp_path / "c")
    assert not any("are saved in" in note for note in getattr(caught.value, "__notes__", ()))
    assert not (tmp_path / "c").exists()


def test_a_model_that_cannot_be_saved_is_in_a_checkpoint(tmp_path):
    """And where that cannot be written either, the first error stays the first."""

    def full():
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    with training() as made, pytest.raises(OSError, match=r"No space left.*model\.safetensors") as caught:
        run(made, checkpoints=tmp_path / "c", save_model=full)
    assert str(saved(tmp_path / "c")[7]) in caught.value.__notes__[0]

    def full_and_taken():
        (tmp_path / "taken").touch()  # where checkpoints were to be
        full()

    with training() as made, pytest.raises(OSError, match=r"No space left.*model\.safetensors") as caught:
        run(made, checkpoints=tmp_path / "taken", save_model=full_and_taken)
    assert caught.value.__notes__[0].startswith("The first 7 steps could not be saved: ")


@pytest.mark.parametrize("place", ["file", "file/c", "file/a/b"])
def test_a_folder_of_checkpoints_that_cannot_be_written_is_found_before_the_first_step(tmp_path, place):
    """From Python, as on the command line; a folder that is not there yet is made by the first checkpoint."""
    (tmp_path / "file").touch()
    with training() as made, pytest.raises(FineTuneError, match="it cannot be written: file is not a folder"):
        run(made, checkpoints=tmp_path / place)
    assert made.step == 0
    with training(steps=1) as made:
        run(made, checkpoints=tmp_path / "new" / "c", at_end=True)
    assert (tmp_path / "new" / "c" / "checkpoint-1").is_dir()


def test_a_training_at_its_end_saves_its_model(tmp_path):
    with training(steps=2) as made:
        run(made, checkpoints=tmp_path, at_end=True)
    done = []
    with training(steps=2) as made:
        assert made.restore(tmp_path)
        run(made, checkpoints=tmp_path, save_model=lambda: done.append(made.step))
    assert done == [2]


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(tmp_path, monkeypatch):
    """The model, and checkpoints with two moments of each parameter, next to what is free."""
    model = tiny.source().load()
    numbers = sum(p.numel() for p in model.parameters())
    folders = (tmp_path / "new" / "out", tmp_path / "c")
    needed = {0: 4 * numbers, 3: (4 + 3 * 12) * numbers}
    for kept, size in needed.items():
        for free in (size + 10_000, size - 1):  # buffers are some more
            monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: shutil._ntuple_diskusage(free, 0, free))
            if free > size:
                check_disk(model, Settings(), *folders, kept=kept)
                continue
            with pytest.raises(FineTuneError, match=r"is too small: the model .* are free\. Make room, or name a fold"):
                check_disk(model, Settings(), *folders, kept=kept)
