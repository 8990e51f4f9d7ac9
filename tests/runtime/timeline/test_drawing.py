"""A timeline on the terminal."""

import pytest

from roundpipe_runtime import Record, Timeline
from roundpipe_runtime.timeline.record import draw_on
from yobx_flatten.terminal.output import console


def timeline_of(*records: Record) -> Timeline:
    timeline = Timeline()
    timeline.records = list(records)
    return timeline


def test_the_drawing_has_a_legend_of_what_it_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    draw_on(console(), timeline_of(Record(0, 0, "a", "forward", 0.0, 0.5), Record(1, 0, "b", "loss", 0.5, 1.0)))
    first, second, axis, legend = capsys.readouterr().out.splitlines()
    assert (first, second) == ("a " + "F" * 18 + "." * 18, "b " + "." * 18 + "L" * 18)
    assert axis.split() == ["0", "1000.0", "ms"]
    assert legend.split() == ["F", "forward", "L", "loss", ".", "waiting"]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(capsys, monkeypatch, columns):
    """Of a wide one, 120 columns are used."""
    monkeypatch.setenv("COLUMNS", str(columns))
    draw_on(console(), timeline_of(*[Record(0, 0, f"cuda:{n}", "forward", n, n + 1.0) for n in range(8)]))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= min(columns, 120)
