"""The file of metrics, whole at any time, memory in use, the card of a model, and the picture of its losses."""

import errno
import json
import math
import pathlib

import pytest
import torch

from roundpipe_runtime import parse_devices
from roundpipe_runtime.fine_tune import EvalRecord, FineTuneError, StepRecord, model_card, save_curve
from roundpipe_runtime.fine_tune.records import MetricsFile, device_peak, process_memory
from tests import fresh_process
from tests.runtime import tiny_training as tiny

STEP = {"loss": 2.5, "tokens": 16, "tokens_per_s": 8.0, "lr": 0.1, "grad_norm": 1.5, "seconds": 2.0}
STEP |= {"process_bytes": 1000, "device_bytes": None}


def step(number, loss=2.5):
    return StepRecord(**{**STEP, "step": number, "loss": loss})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path, *records, **options):
    with MetricsFile(path, **options) as file:
        for record in records:
            file.write(record)
    return path


def test_each_record_is_a_line_at_once(tmp_path):
    """Whoever reads the file while it grows sees whole lines; JSON has no word for infinity; a new run begins anew."""
    path = written(tmp_path / "metrics.jsonl", step(7))
    with MetricsFile(path) as file:
        file.write(step(1))
        assert lines(path) == [{"step": 1, **STEP}]
        file.write(EvalRecord(1, 2.25, 32, 0.5))
        file.write(step(2, math.inf))
    assert lines(path)[1:] == [
        {"step": 1, "eval_loss": 2.25, "eval_tokens": 32, "seconds": 0.5},
        {"step": 2, **STEP, "loss": None},
    ]


@pytest.mark.parametrize("end", ["", '{"step": 4, "lo', "garbage\n", '{"other": 1}\n', "[]\n"])
def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path, end):
    """A run that was killed has written further, or half a line; without a file, it begins one."""
    path = written(tmp_path / "m.jsonl", step(1), step(2), step(3), EvalRecord(2, 2.0, 8, 0.1))
    path.write_text(path.read_text() + end)
    written(path, step(3, 9.0), step=2)
    assert [(row["step"], row.get("loss")) for row in lines(path)] == [(1, 2.5), (2, 2.5), (2, None), (3, 9.0)]
    assert len(lines(written(tmp_path / "new.jsonl", step(8), step=7))) == 1


@pytest.mark.parametrize("call", range(1, 4))
def test_a_resume_that_is_killed_leaves_the_lines_of_before(tmp_path, call):
    """Whatever renames, writes and flushes there are: the file has all its lines, or those up to the checkpoint."""
    path = written(tmp_path / "m.jsonl", *map(step, range(1, 101)))
    program = (
        "import os, pathlib\n"
        "from yobx_flatten.core.files import scratch\n"
        "from roundpipe_runtime.fine_tune.records import MetricsFile\n"
        f"left = [{call}]\n"
        "def dies(real):\n"
        "    def called(*args, **options):\n"
        "        left[0] -= 1\n"
        "        if not left[0]:\n"
        "            os._exit(9)\n"
        "        return real(*args, **options)\n"
        "    return called\n"
        "scratch.flush_tree, os.replace = dies(scratch.flush_tree), dies(os.replace)\n"
        f"MetricsFile({str(path)!r}, step=60)\n"
    )
    assert fresh_process.run("-c", program, check=False).returncode == (9 if call < 3 else 0)
    assert [line["step"] for line in lines(path)] == list(range(1, 101 if call < 3 else 61))


def test_a_resume_on_a_full_disk_leaves_the_lines_of_before(tmp_path, monkeypatch):
    path = written(tmp_path / "m.jsonl", *map(step, range(1, 11)))

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            MetricsFile(path, step=6)
    assert len(lines(path)) == 10


def test_memory_that_is_taken_is_seen_and_virtual_devices_have_none_of_their_own():
    before = process_memory()
    taken = torch.ones(2**25)
    assert process_memory() - before == pytest.approx(taken.nbytes, rel=0.1)
    assert device_peak(parse_devices("virtual:2")) is None


def records(count):
    return [*(step(n, float(count - n)) for n in range(1, count + 1)), EvalRecord(count, 0.5, 1, 1.0)]


def test_a_card_states_data_losses_options_and_versions():
    """Options that were not given are left out; a long training has a short table with its last step."""
    pytest.importorskip("transformers")
    card = model_card(tiny.source(), records(3), data="a.txt", options={"batch": 4, "lora": None})
    assert card.startswith("---\nlibrary_name: transformers\n")
    shown = card.splitlines()
    for line in ("# Trained from random weights of tiny", "a.txt", "| 1 | 2.0000 |  |", "| 3 | 0.0000 | 0.5000 |"):
        assert line in shown
    assert "- batch: 4" in shown
    assert not any("lora" in line for line in shown)
    assert any(line.startswith("- torch: ") for line in shown)
    shown = model_card(tiny.source(), records(1001), data="x", options={}).splitlines()
    rows = [line for line in shown if line.startswith("| ") and line[2].isdigit()]
    assert len(rows) <= 13
    assert rows[-1] == "| 1001 | 0.0000 | 0.5000 |"


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_losses_are_drawn_and_another_suffix_is_refused(tmp_path, name):
    pytest.importorskip("matplotlib")
    save_curve(records(5), tmp_path / name)
    assert (tmp_path / name).read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")
    with pytest.raises(FineTuneError, match=r"does not end in \.png, \.svg or \.pdf\. Change the ending: --plot"):
        save_curve(records(5), tmp_path / "a.doc")
