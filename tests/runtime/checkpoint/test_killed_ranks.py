"""A training of several ranks, one of which is killed at random, ends bitwise as the run that was not killed."""

import os

import pytest

from tests import fresh_process

pytest.importorskip("safetensors", reason="safetensors is not installed")

pytestmark = pytest.mark.slow

# `make kills` asks for thirty.
KILLS = int(os.environ.get("ROUNDPIPE_KILLS", "2"))
PROGRAM = "tests.runtime.checkpoint.killed_ranks"


def training(folder, *options):
    return fresh_process.run(
        "-m", PROGRAM, folder, *map(str, options), timeout=3600, imported=fresh_process.TRAINER
    ).stdout


def losses(folder):
    """Each step with its loss, as hexadecimal digits; a step that was done twice is there once if it came out equal."""
    lines = (folder / "losses").read_text().splitlines()
    return sorted({tuple(line.split()) for line in lines}, key=lambda line: int(line[0]))


@pytest.mark.extended  # `roundpipe train` is killed each time, in tests/runtime/cli/test_train_ranks.py
@pytest.mark.parametrize(("kind", "ranks"), [("masters", "2,3,1"), ("views", "3,2")])
def test_kills_of_ranks_change_no_bit(tmp_path, kind, ranks):
    kills = KILLS // 2 + (KILLS % 2 if kind == "masters" else 0)
    steps = max(8, 2 * kills)
    training(tmp_path / "calm", "--kind", kind, "--steps", steps)
    training(tmp_path / "killed", "--kind", kind, "--steps", steps, "--kills", kills, "--ranks", ranks)
    assert losses(tmp_path / "killed") == losses(tmp_path / "calm")
    assert [step for step, _ in losses(tmp_path / "calm")] == [str(step) for step in range(steps)]
    assert (tmp_path / "killed" / "final").read_text() == (tmp_path / "calm" / "final").read_text()
