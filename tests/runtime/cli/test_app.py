"""All commands of `roundpipe`: help, names that do not exist, missing libraries, what becomes of an error."""

import importlib.metadata
import importlib.util
import pathlib
import runpy
import tomllib

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from roundpipe_runtime import ConfigError
from roundpipe_runtime.__main__ import main
from roundpipe_runtime.cli.app import app
from tests import fresh_process
from yobx_flatten import __version__
from yobx_flatten.errors import install_line

ROOT = pathlib.Path(__file__).parents[3]
COMMANDS = ["demo", "plan", "train", "timeline", "doctor"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_fits_a_terminal(name, monkeypatch, capsys):
    """80 columns, and flags without types. A line break of a docstring would stay, also in a narrower window."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: roundpipe {name}" in shown
    assert "--json" in shown
    assert not [word for word in ("<bool>", "<str>", "<path>", "<list[str]>") if word in shown]
    assert max(len(line) for line in shown.splitlines()) <= 80
    (command,) = (one for one in app.registered_commands if one.name == name)
    assert "\n" not in command.help.replace("\n\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument 'MODEL'"),
        (["train", "x"], "Missing option '--output'"),
        (["train", "--model", "x"], "Missing option '--output'"),
        (["demo", "extra"], "Got unexpected extra argument"),
        (["demo", "--steps", "0"], "Invalid value for '--steps'"),
        (["demo", "--steps", "x"], "Invalid value for '--steps'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, words, refused):
    shown = refused(*arguments)
    assert shown.out == ""
    assert words in shown.err


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "roundpipe: interrupted, nothing was written\n"),
        (ConfigError("first\n    line to type"), 2, "roundpipe: first line to type\n"),
        (ZeroDivisionError("by zero"), 2, "roundpipe: ZeroDivisionError: by zero (--debug shows where)\n"),
    ],
)
def test_every_error_has_a_line_and_a_status(error, status, words, capsys, monkeypatch):
    """Those of the runtime say all that is needed; those that nobody foresaw are named."""
    import roundpipe_runtime.cli.demo as command

    def fail():
        raise error

    monkeypatch.setattr(command, "_build", fail)
    assert main(["demo"]) == status
    assert capsys.readouterr().err == words


def test_without_typer_the_line_that_installs_it_is_shown(monkeypatch, capsys):
    """The command is there as soon as the package is; its libraries may not be."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else name)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == f"roundpipe: the command line needs typer: {install_line('cli')}\n"


def test_the_module_is_the_command_in_a_fresh_process():
    """`python -m roundpipe_runtime`: version, and the help of a missing command with status 2."""
    shown = fresh_process.run("-m", "roundpipe_runtime", "--version", check=False)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"roundpipe_runtime {__version__}\n", "")
    shown = fresh_process.run("-m", "roundpipe_runtime", check=False)
    assert shown.returncode == 2
    assert "Usage: roundpipe" in shown.stdout + shown.stderr
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts["roundpipe"] == "roundpipe_runtime.__main__:main"
    assert importlib.metadata.version("yobx-flatten") == __version__


def test_the_guide_has_every_command_and_option():
    """The reference of the guide is written from the help; each option has a word of explanation."""
    written = runpy.run_path(str(ROOT / "docs" / "command_reference.py"))["reference"](app)
    assert [line.removeprefix("### ") for line in written.splitlines() if line.startswith("### ")] == COMMANDS
    rows = [line.split("|")[1:3] for line in written.splitlines() if line.startswith("| `")]
    assert [name for name, text in rows if not text.strip()] == []
    assert "| `--lr` | Peak learning rate. Default: `0.0003`. |" in written


def test_nobody_pays_for_a_command_that_was_not_asked_for():
    """Help comes without transformers, PEFT or datasets."""
    program = "import sys; from roundpipe_runtime.__main__ import main; main(['train', '--help']); " + (
        "sys.exit(any(name in sys.modules for name in ('transformers', 'peft', 'datasets')))"
    )
    assert fresh_process.run("-c", program).stderr == ""
