"""The file of metrics: a line for each record, whole at any time, and continued where a checkpoint was."""

import errno
import json
import math
import pathlib

import pytest

from roundpipe_runtime.fine_tune import EvalRecord, StepRecord
from roundpipe_runtime.fine_tune.records import MetricsFile
from tests import fresh_process


def step(number, loss=2.5):
    return StepRecord(
        step=number,
        loss=loss,
        tokens=16,
        tokens_per_s=8.0,
        lr=0.1,
        grad_norm=1.5,
        seconds=2.0,
        process_bytes=1000,
        device_bytes=None,
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_record_is_a_line_at_once(tmp_path):
    """Whoever reads the file while it grows sees whole lines."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write(step(1))
        assert lines(path) == [
            {
                "step": 1,
                "loss": 2.5,
                "tokens": 16,
                "tokens_per_s": 8.0,
                "lr": 0.1,
                "grad_norm": 1.5,
                "seconds": 2.0,
                "process_bytes": 1000,
                "device_bytes": None,
            }
        ]
        file.write(EvalRecord(1, 2.25, 32, 0.5))
    assert lines(path)[1] == {"step": 1, "eval_loss": 2.25, "eval_tokens": 32, "seconds": 0.5}


def test_infinity_is_null(tmp_path):
    """JSON has no word for it."""
    with MetricsFile(tmp_path / "m.jsonl") as file:
        file.write(step(1, math.inf))
    assert lines(tmp_path / "m.jsonl")[0]["loss"] is None


def test_a_new_run_begins_a_new_file(tmp_path):
    path = tmp_path / "m.jsonl"
    for _ in range(2):
        with MetricsFile(path) as file:
            file.write(step(1))
    assert len(lines(path)) == 1


@pytest.mark.parametrize("end", ["", '{"step": 4, "lo', "garbage\n", '{"other": 1}\n', "[]\n"])
def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path, end):
    """A run that was killed has written further, or half a line."""
    path = tmp_path / "m.jsonl"
    with MetricsFile(path) as file:
        for number in (1, 2, 3):
            file.write(step(number))
        file.write(EvalRecord(2, 2.0, 8, 0.1))
    path.write_text(path.read_text() + end)
    with MetricsFile(path, step=2) as file:
        file.write(step(3, 9.0))
    assert [(row["step"], row.get("loss")) for row in lines(path)] == [(1, 2.5), (2, 2.5), (2, None), (3, 9.0)]


def test_a_resumed_run_without_a_file_begins_one(tmp_path):
    with MetricsFile(tmp_path / "m.jsonl", step=7) as file:
        file.write(step(8))
    assert [row["step"] for row in lines(tmp_path / "m.jsonl")] == [8]


@pytest.mark.parametrize("call", range(1, 4))
def test_a_resume_that_is_killed_leaves_the_lines_of_before(tmp_path, call):
    """Whatever renames, writes and flushes there are: the file has all its lines, or those up to the checkpoint."""
    path = tmp_path / "m.jsonl"
    with MetricsFile(path) as file:
        for number in range(1, 101):
            file.write(step(number))
    program = (
        "import os, pathlib\n"
        "from yobx_flatten.files import scratch\n"
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
    path = tmp_path / "m.jsonl"
    with MetricsFile(path) as file:
        for number in range(1, 11):
            file.write(step(number))

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            MetricsFile(path, step=6)
    assert len(lines(path)) == 10
