"""What commands print when their reader has ended, and on terminals that lack characters."""

import io
import os
import subprocess
import sys

import pytest

from yobx_flatten.terminal.output import say, say_json, table
from yobx_flatten.terminal.running import lasting_streams


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_are_missing_are_printed_by_their_number(monkeypatch, encoding):
    """And the stream is as before afterwards."""
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
    """Of both streams; the exit status is that of the work, and Python is silent at its end."""
    line = f'"{sys.executable}" -c \'{PROGRAM}\' "{tmp_path / "done"}" 2>&1 | head -n 1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["line 0", "7"]
    assert done.stderr == ""
    assert (tmp_path / "done").exists()
