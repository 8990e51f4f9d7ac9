"""All commands: help, names that do not exist, missing libraries, what becomes of an error."""

import errno
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests import fresh_process
from tests.transformers_versions import is_older_than
from yobx_flatten import ReplayError, __version__
from yobx_flatten.__main__ import main
from yobx_flatten.cli import app as app_file
from yobx_flatten.cli.app import app, reference
from yobx_flatten.errors.dependencies import install_line
from yobx_flatten.terminal.running import Terminated, explain_failure

COMMANDS = [
    "demo", "export", "verify", "adapter", "generate", "chat", "check", "explain", "list", "env", "bench", "matrix",
]  # fmt: skip


def run(*arguments, **options):
    return fresh_process.run("-m", "yobx_flatten", *arguments, check=False, **options)


def test_the_terminal_breaks_the_lines_of_the_help():
    """Lines of a docstring would stay, each with a rest below it where the window is narrower."""
    for command in app.registered_commands:
        assert "\n" not in command.help.replace("\n\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["exprt"], "No such command 'exprt'"),
        (["demo", "--models", "llama,lama"], "unknown model 'lama'; choose from llama, gemma3, mistral, t5"),
        (["demo", "--outptu", "here"], "No such option: --outptu"),
        (["export"], "Missing argument 'MODEL'"),
        (["export", "llama"], "Missing option '--output'"),
        (["export", "llama", "-o", "x", "--to", "tf"], "'--to': 'tf' is not one of"),
        (["list", "--kind", "lair"], "unknown kind 'lair'; choose from layer, cache"),
        (["list", "--import", "no_such_module"], "the module no_such_module cannot be imported"),
        (["bench", "speed"], "unknown benchmark 'speed'; choose from"),
        (["verify", "no_such_folder"], "There is no folder no_such_folder"),
        (["generate", "no_such_folder", "--prompt", "x"], "There is no folder no_such_folder"),
        (["generate", ".", "--prompt", "x", "--temperature", "0"], "temperature must be a number above 0"),
        (["explain", "no_such_file"], "there is no file no_such_file"),
        (["check", "lama"], "'lama' is neither a folder nor a type of model that transformers has. Did you mean llama"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("yobx-flatten: ")
    assert shown.err.count("\n") == 1
    assert words in shown.err
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_stack_trace_wherever_it_stands(capsys):
    for arguments in (["--debug", "explain", "nowhere"], ["explain", "nowhere", "--debug"]):
        assert main(arguments) == 2
        assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted, nothing was written\n"),
        (KeyboardInterrupt("interrupted; a.onnx is whole"), 130, "yobx-flatten: interrupted; a.onnx is whole\n"),
        (Terminated(), 143, "yobx-flatten: terminated, nothing was written\n"),
        (ReplayError("differs\n  case by case"), 1, "differs\n  case by case"),
        (OSError(errno.ENOSPC, "No space left on device", "m.onnx"), 2, "the disk is full, writing m.onnx"),
        (RuntimeError("PytorchStreamWriter failed: No space left on device"), 2, "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "there"), 2, "there: Permission denied"),
        (ZeroDivisionError("division by zero\nmore"), 2, "ZeroDivisionError: division by zero (--debug shows where)"),
        (MemoryError(), 2, "out of memory"),
    ],
)
def test_every_error_has_a_line_and_a_status(error, status, words, capsys):
    assert explain_failure(error, debug=False) == status
    assert words in capsys.readouterr().err


def test_without_typer_the_line_that_installs_it_is_shown(monkeypatch, capsys):
    """The command is there as soon as the package is; its libraries may not be."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else name)
    assert main(["env"]) == 2
    shown = capsys.readouterr().err
    assert shown == f"yobx-flatten: the command line needs typer: {install_line('cli')}\n"


def test_env_knows_what_is_installed(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["yobx-flatten"] == __version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert main(["env"]) == 0
    assert ["yobx-flatten", __version__] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_list_is_the_flattening_list(capsys):
    assert main(["list", "--kind", "layer", "--json"]) == 0
    rows = {row["cls"].rpartition(".")[2]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["DynamicSlidingWindowLayer"]["code"] == "W"
    assert main(["list", "--kind", "cache"]) == 0
    assert "DynamicCache" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_list_breaks_no_word(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    words = {"DynamicSlidingWindowLayer", "layer"}
    if not is_older_than("5.23"):  # the longest name of a leaf
        words.add("indexer_cumulative_length")
    assert words <= set(shown.replace(",", " ").split())
    wide = [line for line in shown.splitlines() if len(line) > width and len(line.split()) > 2]
    assert wide == []


def test_bench_lists_what_there_is(capsys):
    assert main(["bench"]) == 0
    names = capsys.readouterr().out.split()
    assert "generate" in names
    assert main(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == names


@pytest.mark.parametrize("name", ["bench", "matrix"])
def test_the_help_of_an_installed_copy_leaves_them_out(name, monkeypatch):
    """They can only say where they are; a clone lists them."""
    monkeypatch.setattr(app_file, "is_installed_copy", lambda: True)
    installed = app_file._app()
    assert f" {name} " not in CliRunner().invoke(installed, ["--help"]).output
    assert f"### {name}" not in reference(installed)


@pytest.mark.parametrize("name", ["bench", "matrix"])
def test_an_installed_copy_says_that_the_repository_is_needed(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(app_file, "__file__", str(tmp_path / "site-packages" / "yobx_flatten" / "cli" / "x.py"))
    assert main([name]) == 2
    assert "is part of the repository, not of the installed package" in capsys.readouterr().err


def test_the_module_is_the_command_in_a_fresh_process():
    shown = run("--version")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"yobx_flatten {__version__}\n", "")
    assert run().returncode == 2


def test_the_guide_has_every_command_and_option():
    written = reference(app)
    assert [line.removeprefix("### ") for line in written.splitlines() if line.startswith("### ")] == COMMANDS
    rows = [line.split("|")[1:3] for line in written.splitlines() if line.startswith("| `")]
    assert [name for name, text in rows if not text.strip()] == []
    assert "| `--to` | Write ONNX files or torch.export programs. Default: `onnx`. |" in written


def test_matrix_hands_its_arguments_on():
    shown = run("matrix", "--columns", "no_such_column")
    assert shown.returncode == 2
    assert "no_such_column" in shown.stderr


def test_a_reader_that_goes_away_is_no_error():
    root = pathlib.Path(__file__).parent
    command = f"{sys.executable} -m yobx_flatten list --json | head -n 1"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=root, timeout=240)
    assert (shown.stdout, shown.stderr) == ("[\n", "")


def test_completion_is_offered():
    asked = {"_YOBX_FLATTEN_COMPLETE": "complete_bash", "COMP_WORDS": "yobx-flatten e", "COMP_CWORD": "1"}
    import os

    shown = run(env={**os.environ, **asked})
    assert shown.stdout.split() == ["export", "explain", "env"]
