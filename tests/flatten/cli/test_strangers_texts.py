"""Texts that a stranger chose are shown; a terminal does not obey them."""

import json

import pytest
import torch
from typer.testing import CliRunner

from yobx_flatten import save_nested
from yobx_flatten.cli.app import app
from yobx_flatten.terminal.output import printable, say, say_json, table
from yobx_flatten.terminal.running import UserError, explain_failure

# clears the screen, sets the title, a bell, a line that covers another one, C1, and text that reads backwards
ATTACK = "a\x1b[2J\x1b]0;title\x07\rok\x9b31m\u202egnp"
SHOWN = r"a\x1b[2J\x1b]0;title\x07\rok\x9b31m\u202egnp"


def obeyed(text):
    return [letter for letter in text if (ord(letter) < 32 and letter not in "\n\t") or letter in "\x7f\x9b\u202e"]


def test_names_in_a_file_are_spelled_out(tmp_path):
    save_nested(tmp_path / "a.onnx", {ATTACK: torch.ones(2), "b": {ATTACK: 3}})
    drawn = CliRunner().invoke(app, ["explain", str(tmp_path / "a.onnx")])
    assert drawn.exit_code == 0
    assert obeyed(drawn.output) == []
    assert "gnp" in drawn.output
    as_json = CliRunner().invoke(app, ["explain", str(tmp_path / "a.onnx"), "--json"])
    assert obeyed(as_json.output) == []
    assert "gnp" in json.loads(as_json.output)[0]["lines"][1]


@pytest.mark.parametrize("error", [UserError(ATTACK), ValueError(ATTACK), FileNotFoundError(2, "no file", ATTACK)])
def test_errors_are_spelled_out(error, capsys):
    error.add_note(ATTACK)
    explain_failure(error, debug=False)
    shown = capsys.readouterr().err
    assert obeyed(shown) == []
    assert SHOWN in shown


def test_tables_and_json_are_spelled_out(capsys):
    table(["name", "value"], [[ATTACK, "1"]])
    assert obeyed(capsys.readouterr().out) == []
    say_json({"name": ATTACK})
    shown = capsys.readouterr().out
    assert obeyed(shown) == []
    assert json.loads(shown) == {"name": ATTACK}


def test_other_text_stays():
    text = "Grüße\t日本語\nไทย 🙂\u200d\u200f"
    assert printable(text) == text
    assert printable("a\r\nb") == "a\nb"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_model_writes_is_spelled_out_on_a_terminal_only(capsys, monkeypatch, is_terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    say(ATTACK, is_result=True)
    assert capsys.readouterr().out == (SHOWN if is_terminal else ATTACK) + "\n"
