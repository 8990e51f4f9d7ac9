"""What the terminal shows of tables, numbers and stages, also when its reader ended or lacks characters."""

import io
import json
import os
import subprocess
import sys

import pytest

from tests import fresh_process
from yobx_flatten.terminal.output import say, say_json, table
from yobx_flatten.terminal.running import lasting_streams

ROWS = [["a", "first[0]", "1.5"], ["b", "second one", "-"]]


def test_a_table_has_columns_where_its_longest_words_fit_side_by_side(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    table(["name", "what", "MB"], ROWS)
    heading, rule, *rows = capsys.readouterr().out.splitlines()
    assert set(rule.strip()) == {"─"}
    assert [line.split() for line in (heading, *rows)] == [["name", "what", "MB"], *(" ".join(r).split() for r in ROWS)]
    assert heading.index("what") == rows[0].index("first[0]") == rows[1].index("second")


def test_a_row_takes_several_lines_where_they_do_not_fit(monkeypatch, capsys):
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
    shown = fresh_process.run("-c", STAGES)
    assert shown.stderr.splitlines() == ["reading", "writing", "exporting a.onnx"]
    assert shown.stdout == "0 []\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_are_missing_are_printed_by_their_number(monkeypatch, encoding):
    held = io.BytesIO()
    stream = io.TextIOWrapper(held, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with lasting_streams():
        say("fian\u00e9 \u2713 \udcff")
        say_json({"a": "\u00e9\u2713"})
        table(["a", "b"], [["\u2713", "x"]])
    assert sys.stdout is stream
    assert stream.errors == "strict"
    text = held.getvalue().decode(encoding)
    accent, mark = ("\u00e9" if encoding != "ascii" else r"\xe9"), ("\u2713" if encoding == "utf-8" else r"\u2713")
    assert text.splitlines()[0] == rf"fian{accent} {mark} \udcff"
    shown = '"\u00e9\u2713"' if encoding == "utf-8" else r'"\u00e9\u2713"'  # JSON has a spelling of its own
    assert text.splitlines()[2] == f'  "a": {shown}'
    assert mark in text.splitlines()[-1]


PROGRAM = """
import sys
from yobx_flatten.terminal.output import say, table, progress
from yobx_flatten.terminal.running import lasting_streams
with lasting_streams():
    for number in range(20_000):
        say(f"line {number}")
    table(["a", "b"], [["1", "2"]])
    with progress("first") as show:
        show("second")
    print("more", file=sys.stderr)
    open(sys.argv[1], "w").close()
sys.exit(7)
"""


@pytest.mark.skipif(os.name != "posix", reason="the line is one of a shell")
def test_work_goes_on_when_its_reader_has_ended(tmp_path):
    line = f'"{sys.executable}" -c \'{PROGRAM}\' "{tmp_path / "done"}" 2>&1 | head -n 1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["line 0", "7"]
    assert done.stderr == ""
    assert (tmp_path / "done").exists()
