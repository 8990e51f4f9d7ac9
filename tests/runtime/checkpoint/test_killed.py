"""A training that is killed at any moment continues bit for bit."""

import os
import signal
from functools import cache

import pytest

from tests import fresh_process
from tests.cases import cases

pytestmark = pytest.mark.slow
if not hasattr(os, "fork"):
    pytest.skip("attempts are forked, which this system cannot", allow_module_level=True)

# `make kills` asks for thirty.
KILLS = int(os.environ.get("ROUNDPIPE_KILLS", "4"))
PROGRAM = "tests.runtime.checkpoint.killed_training"


def training(folder, *options, program=PROGRAM, timeout=600):
    return fresh_process.run(
        "-m", program, folder, *map(str, options), timeout=timeout, imported=fresh_process.TRAINER
    ).stdout


def losses(folder):
    """Each step with its loss, as hexadecimal digits; a step that was done twice is there once if it came out equal."""
    lines = (folder / "losses").read_text().splitlines()
    return sorted({tuple(line.split()) for line in lines}, key=lambda line: int(line[0]))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    @cache
    def run(kind, steps):
        folder = tmp_path_factory.mktemp(kind)
        printed = training(folder, "--kind", kind, "--steps", steps, "--devices", 2)
        return losses(folder), (folder / "final").read_text(), printed.split()[-4]

    return run


def same_end(folder, expected):
    return (losses(folder), (folder / "final").read_text()) == expected[:2]


@pytest.mark.parametrize("at", cases(["time", "file"], quick=["file"]))
@pytest.mark.parametrize("kind", ["adam", "scaled", "disk"])
def test_kills_change_no_bit(tmp_path, uninterrupted, kind, at):
    """Dropout, Adam, a scheduler, accumulation; bfloat16, masters, a scaler; a state on a disk; 1 to 3 devices."""
    expected = uninterrupted("half" if kind == "disk" else kind, 3 * KILLS)
    options = ["--kind", kind, "--at", at, "--devices", "1,2,3", "--steps", 3 * KILLS, "--pace", expected[2]]
    printed = training(tmp_path, *options, "--kills", KILLS, "--seed", 5)
    if at == "file" and kind != "disk":  # a time may be after the end, on a machine that has become quicker
        assert int(printed.split()[0]) > KILLS / 2
    assert same_end(tmp_path, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "final", "losses"]


def test_a_new_interpreter_goes_on(tmp_path, uninterrupted):
    program = ("-m", PROGRAM, tmp_path, "--steps", "12", "--here", "--devices", "2")
    with fresh_process.start(*program, imported=fresh_process.TRAINER) as process:
        process.wait_for(lambda: (tmp_path / "losses").exists() and len(losses(tmp_path)) >= 4)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "final").exists()
    training(tmp_path, "--steps", 12, "--here", "--devices", 3)
    assert same_end(tmp_path, uninterrupted("adam", 12))


# `make kills` asks for thirty.
KILLS_OF_RANKS = int(os.environ.get("ROUNDPIPE_KILLS", "2"))
RANKS = "tests.runtime.checkpoint.killed_ranks"


@pytest.mark.extended  # `roundpipe train` is killed each time, in tests/runtime/cli/test_train_ranks.py
@pytest.mark.parametrize(("kind", "ranks"), [("masters", "2,3,1"), ("views", "3,2")])
def test_kills_of_ranks_change_no_bit(tmp_path, kind, ranks):
    kills = KILLS_OF_RANKS // 2 + (KILLS_OF_RANKS % 2 if kind == "masters" else 0)
    steps = max(8, 2 * kills)
    options = ["--kind", kind, "--steps", steps]
    training(tmp_path / "calm", *options, program=RANKS, timeout=3600)
    training(tmp_path / "killed", *options, "--kills", kills, "--ranks", ranks, program=RANKS, timeout=3600)
    assert losses(tmp_path / "killed") == losses(tmp_path / "calm")
    assert [step for step, _ in losses(tmp_path / "calm")] == [str(step) for step in range(steps)]
    assert (tmp_path / "killed" / "final").read_text() == (tmp_path / "calm" / "final").read_text()
