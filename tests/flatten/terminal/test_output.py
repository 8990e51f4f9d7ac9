"""What the terminal shows of tables, numbers and stages."""

import json

from tests import fresh_process
from yobx_flatten.terminal.output import say_json, table

ROWS = [["a", "first[0]", "1.5"], ["b", "second one", "-"]]


def test_a_table_has_columns_where_its_longest_words_fit_side_by_side(monkeypatch, capsys):
    """What is in brackets is text."""
    monkeypatch.setenv("COLUMNS", "60")
    table(["name", "what", "MB"], ROWS)
    heading, rule, *rows = capsys.readouterr().out.splitlines()
    assert set(rule.strip()) == {"─"}
    assert [line.split() for line in (heading, *rows)] == [["name", "what", "MB"], *(" ".join(r).split() for r in ROWS)]
    assert heading.index("what") == rows[0].index("first[0]") == rows[1].index("second")


def test_a_row_takes_several_lines_where_they_do_not_fit(monkeypatch, capsys):
    """The first two cells name it; a cell that states nothing is left out."""
    monkeypatch.setenv("COLUMNS", "14")
    table(["name", "what", "MB"], ROWS)
    assert capsys.readouterr().out.splitlines() == ["a  first[0]", "    MB: 1.5", "b  second one"]


def test_json_has_no_infinite_number(capsys):
    """`null` stands for them, since JSON has none; what it does not know either is text."""
    say_json({"a": [float("nan"), float("inf"), 1.5], 2: (None, True), "kind": int})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "2": [None, True], "kind": "<class 'int'>"}


STAGES = """
import logging
from yobx_flatten.terminal.output import progress

logger = logging.getLogger("yobx_flatten")
with progress("opening") as show:
    show("reading", 1, 3)
    show("reading", 2, 3)
    show("writing")
    logger.info("exporting %s", "a.onnx", extra={"step": True})
    logger.info("registered something")
print(logger.level, logger.handlers)
"""


def test_stages_are_lines_where_there_is_no_terminal():
    """One for each, however often it is shown; what the package logs of registrations is none."""
    shown = fresh_process.run("-c", STAGES)
    assert shown.stderr.splitlines() == ["reading", "writing", "exporting a.onnx"]
    assert shown.stdout == "0 []\n"
