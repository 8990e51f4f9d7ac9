"""The demo of the runtime as a user meets it."""

import pytest
import torch

from roundpipe_runtime import Record, Timeline, demo
from roundpipe_runtime.__main__ import main


def test_the_demo_trains_both_ways_and_draws_the_pipeline(capsys, monkeypatch):
    """Exit status 0; a row per step with equal losses, the time of both, a row per device; plain text in a log."""
    monkeypatch.delenv("COLUMNS", raising=False)
    threads = torch.get_num_threads()
    assert main(["demo", "--steps", "5"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "\x1b" not in shown.out
    lines = shown.out.splitlines()
    rows = [line.split() for line in lines if line.strip()[:2] in ("0 ", "4 ") and len(line.split()) == 5]
    assert [int(row[0]) for row in rows] == [0, 4]
    assert all(float(row[1]) == pytest.approx(float(row[2]), abs=1e-5) for row in rows)
    assert float(rows[1][2]) < float(rows[0][2])
    assert " ms plain in one thread, " in shown.out
    drawn = {line.split()[0]: line.split()[1] for line in lines if line.startswith("virtual:")}
    assert sorted(drawn) == ["virtual:0", "virtual:1"]
    assert set("FB") <= set("".join(drawn.values())) <= set("FRLBud.")
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_wider_than_the_terminal(capsys, monkeypatch, columns):
    """80 columns hold all of it, and 120 are used."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["demo", "--steps", "1"]) == 0
    widths = [len(line) for line in capsys.readouterr().out.splitlines()]
    assert columns - 4 <= max(widths) <= columns


def test_the_drawing_has_a_legend_of_what_it_shows(capsys, monkeypatch):
    """A letter that is not in the drawing is not explained."""
    monkeypatch.setenv("COLUMNS", "40")
    timeline = Timeline()
    timeline.records = [Record(0, 0, "a", "forward", 0.0, 0.5), Record(1, 0, "b", "loss", 0.5, 1.0)]
    demo._draw(demo._console(), timeline)
    first, second, axis, legend = capsys.readouterr().out.splitlines()
    assert (first, second) == ("a " + "F" * 18 + "." * 18, "b " + "." * 18 + "L" * 18)
    assert axis.split() == ["0", "1000.0", "ms"]
    assert legend.split() == ["F", "forward", "L", "loss", ".", "waiting"]


def test_losses_that_differ_end_the_demo_with_1(capsys, monkeypatch):
    """The verdict says so, and NaN counts as a difference."""
    monkeypatch.setattr(demo, "_timed", lambda step, *batch: (step(*batch) and float("nan"), 0.001))
    assert main(["demo", "--steps", "1"]) == 1
    assert "THE LOSSES DIFFER." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "answer"),
    [(["demo", "--steps", "0"], "'0' is no number from 1 on"), (["train"], "invalid choice: 'train'")],
)
def test_what_cannot_be_is_refused(asked, answer, capsys):
    """Exit status 2, and the reason on stderr."""
    with pytest.raises(SystemExit) as left:
        main(asked)
    assert left.value.code == 2
    assert answer in capsys.readouterr().err


def test_no_command_shows_the_help_and_is_an_error(capsys):
    """Asked for nothing: the help on stderr, exit status 2."""
    assert main([]) == 2
    assert "usage: python -m roundpipe_runtime" in capsys.readouterr().err


def test_a_missing_library_is_named_with_the_command_that_installs_it(capsys, monkeypatch):
    """Without rich: exit status 2, and one line."""
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == 2
    shown = capsys.readouterr().err
    assert shown == "roundpipe_runtime: the demo needs rich: pip install 'yobx-flatten[cli]' (or '.[cli]' in a clone)\n"
