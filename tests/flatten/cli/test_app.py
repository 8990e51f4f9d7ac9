"""All commands: help, missing libraries, what becomes of an error, texts of strangers, SIGTERM, and tables."""

import errno
import importlib.util
import io
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from tests import fresh_process
from tests.transformers_versions import is_older_than
from yobx_flatten import ReplayError, __version__, save_nested
from yobx_flatten.__main__ import main
from yobx_flatten.cli import app as app_file
from yobx_flatten.cli.app import app, is_object_name
from yobx_flatten.core.terminal import command_line
from yobx_flatten.errors import install_line

COMMANDS = [
    "demo", "export", "verify", "adapter", "generate", "chat", "check", "explain", "list", "env", "bench", "matrix",
]  # fmt: skip

reference = runpy.run_path(str(pathlib.Path(__file__).parents[3] / "docs" / "command_reference.py"))["reference"]


def run(*arguments, **options):
    return fresh_process.run("-m", "yobx_flatten", *arguments, check=False, **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
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
        (command_line.Terminated(), 143, "yobx-flatten: terminated, nothing was written\n"),
        (ReplayError("differs\n  case by case"), 1, "differs\n  case by case"),
        (OSError(errno.ENOSPC, "No space left on device", "m.onnx"), 2, "the disk is full, writing m.onnx"),
        (RuntimeError("PytorchStreamWriter failed: No space left on device"), 2, "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "there"), 2, "there: Permission denied"),
        (ZeroDivisionError("division by zero\nmore"), 2, "ZeroDivisionError: division by zero (--debug shows where)"),
        (MemoryError(), 2, "out of memory"),
    ],
)
def test_every_error_has_a_line_and_a_status(error, status, words, capsys):
    assert command_line.explain_failure(error, debug=False) == status
    assert words in capsys.readouterr().err


def test_without_typer_the_line_that_installs_it_is_shown(monkeypatch, capsys):
    """The command is there as soon as the package is; its libraries may not be."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else name)
    assert main(["env"]) == 2
    assert capsys.readouterr().err == f"yobx-flatten: the command line needs typer: {install_line('cli')}\n"


def test_env_list_and_bench_print_what_there_is_as_a_table_and_as_json(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["yobx-flatten"] == __version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert main(["env"]) == 0
    assert ["yobx-flatten", __version__] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main(["list", "--kind", "layer", "--json"]) == 0
    rows = {row["cls"].rpartition(".")[2]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["DynamicSlidingWindowLayer"]["code"] == "W"
    assert main(["list", "--kind", "cache"]) == 0
    assert "DynamicCache" in capsys.readouterr().out
    assert main(["bench"]) == 0
    names = capsys.readouterr().out.split()
    assert "generate" in names
    assert main(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == names


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_list_breaks_no_word(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    words = {"DynamicSlidingWindowLayer", "layer"}
    if not is_older_than("5.23"):  # the longest name of a leaf
        words.add("indexer_cumulative_length")
    assert words <= set(shown.replace(",", " ").split())
    assert [line for line in shown.splitlines() if len(line) > width and len(line.split()) > 2] == []


@pytest.mark.parametrize("name", ["bench", "matrix"])
def test_an_installed_copy_says_that_the_repository_is_needed_and_its_help_leaves_them_out(
    name, monkeypatch, capsys, tmp_path
):
    with monkeypatch.context() as patched:
        patched.setattr(app_file, "clone", lambda: None)
        installed = app_file._app()
    assert f" {name} " not in CliRunner().invoke(installed, ["--help"]).output
    assert f"### {name}" not in reference(installed)
    monkeypatch.setattr(app_file, "__file__", str(tmp_path / "site-packages" / "yobx_flatten" / "cli" / "x.py"))
    assert main([name]) == 2
    assert "is part of the repository, not of the installed package" in capsys.readouterr().err


def test_the_module_is_the_command_in_a_fresh_process():
    shown = run("--version")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"yobx_flatten {__version__}\n", "")
    assert run().returncode == 2
    shown = run("matrix", "--columns", "no_such_column")
    assert shown.returncode == 2
    assert "no_such_column" in shown.stderr
    asked = {"_YOBX_FLATTEN_COMPLETE": "complete_bash", "COMP_WORDS": "yobx-flatten e", "COMP_CWORD": "1"}
    assert run(env={**os.environ, **asked}).stdout.split() == ["export", "explain", "env"]


def test_the_guide_has_every_command_and_option():
    """Lines of a docstring would stay in the help, each with a rest below it where the window is narrower."""
    assert [command.name for command in app.registered_commands if "\n" in command.help.replace("\n\n", "")] == []
    written = reference(app)
    assert [line.removeprefix("### ") for line in written.splitlines() if line.startswith("### ")] == COMMANDS
    rows = [line.split("|")[1:3] for line in written.splitlines() if line.startswith("| `")]
    assert [name for name, text in rows if not text.strip()] == []
    assert "| `--to` | Write ONNX files or torch.export programs. Default: `onnx`. |" in written


def test_a_reader_that_goes_away_is_no_error():
    root = pathlib.Path(__file__).parent
    command = f"{sys.executable} -m yobx_flatten list --json | head -n 1"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=root, timeout=240)
    assert (shown.stdout, shown.stderr) == ("[\n", "")


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


@pytest.mark.parametrize(
    "error", [command_line.UserError(ATTACK), ValueError(ATTACK), FileNotFoundError(2, "no file", ATTACK)]
)
def test_errors_tables_and_json_are_spelled_out(error, capsys):
    error.add_note(ATTACK)
    command_line.explain_failure(error, debug=False)
    shown = capsys.readouterr().err
    assert obeyed(shown) == []
    assert SHOWN in shown
    command_line.table(["name", "value"], [[ATTACK, "1"]])
    assert obeyed(capsys.readouterr().out) == []
    command_line.say_json({"name": ATTACK})
    shown = capsys.readouterr().out
    assert obeyed(shown) == []
    assert json.loads(shown) == {"name": ATTACK}


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_model_writes_is_spelled_out_on_a_terminal_only(capsys, monkeypatch, is_terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    command_line.say(ATTACK, is_result=True)
    assert capsys.readouterr().out == (SHOWN if is_terminal else ATTACK) + "\n"


if os.name != "posix":
    pytest.skip("Windows has no SIGTERM", allow_module_level=True)

# The process sends itself the signal at one of the things that it does to files of a folder.
EXPORT = """
import os, signal, sys
from yobx_flatten.__main__ import main

folder, at = os.path.abspath(sys.argv[1]), int(sys.argv[2])
count = 0

def note(event, given):
    global count
    if event not in ("open", "os.rename", "os.remove", "os.mkdir") or not isinstance(given[0], (str, bytes)):
        return
    if event == "open" and not (given[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    if folder in os.path.abspath(os.fsdecode(given[0])):
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGTERM)

sys.addaudithook(note)
status = main(["export", "llama", "-o", folder + "/model", "--overwrite", "--proof", "sample"])
print("events", count)
sys.exit(status)
"""


def export(folder, at):
    return fresh_process.run("-c", EXPORT, folder, str(at), check=False, imported=fresh_process.TRAINER)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.slow
def test_an_export_that_is_terminated_leaves_the_old_folder_alone(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    done = export(folder, 0)
    assert done.returncode == 0, done.stderr
    events = int(done.stdout.split()[-1])
    before = contents(folder)
    for at in (2, events // 2, events * 3 // 4):
        ended = export(folder, at)
        assert ended.returncode == 143, ended.stderr
        assert ended.stderr.splitlines()[-1] == "yobx-flatten: terminated, nothing was written"
        assert "Traceback" not in ended.stderr
        assert contents(folder) == before


IMPORT = """
import os, signal, sys
class Signal:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Signal())
sys.argv = {argv!r}
from {package}.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", ["torch", "torch.export"])
@pytest.mark.parametrize(
    ("package", "argv"),
    [("yobx_flatten", ["yobx-flatten", "list"]), ("roundpipe_runtime", ["roundpipe", "plan", "--help"])],
)
def test_a_command_that_is_terminated_in_its_imports_prints_a_line(package, argv, at):
    text = IMPORT.format(at=at, argv=argv, package=package)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 143
    assert done.stderr == f"{argv[0]}: terminated, nothing was written\n"


def test_the_handler_is_put_back_and_one_of_the_program_or_of_a_fork_stays():
    """A server that runs a command in its process has its own way to end; so has a pool, which waits for a status."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(command_line.Terminated), command_line.terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with command_line.terminable():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    with command_line.terminable():
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


ROWS = [["a", "first[0]", "1.5"], ["b", "second one", "-"]]


def test_a_table_has_columns_where_its_longest_words_fit_and_rows_of_several_lines_elsewhere(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    command_line.table(["name", "what", "MB"], ROWS)
    heading, rule, *rows = capsys.readouterr().out.splitlines()
    assert set(rule.strip()) == {"─"}
    assert [line.split() for line in (heading, *rows)] == [["name", "what", "MB"], *(" ".join(r).split() for r in ROWS)]
    assert heading.index("what") == rows[0].index("first[0]") == rows[1].index("second")
    monkeypatch.setenv("COLUMNS", "14")
    command_line.table(["name", "what", "MB"], ROWS)
    assert capsys.readouterr().out.splitlines() == ["a  first[0]", "    MB: 1.5", "b  second one"]


def test_json_has_no_infinite_number_and_other_text_stays(capsys):
    """`null` stands for them, since JSON has none; what it does not know either is text."""
    command_line.say_json({"a": [float("nan"), float("inf"), 1.5], 2: (None, True), "kind": int})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "2": [None, True], "kind": "<class 'int'>"}
    text = "Grüße\t日本語\nไทย 🙂\u200d\u200f"
    assert (command_line.printable(text), command_line.printable("a\r\nb")) == (text, "a\nb")


STAGES = """
import logging
from yobx_flatten.core.terminal.command_line import progress

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
    with command_line.lasting_streams():
        command_line.say("fian\u00e9 \u2713 \udcff")
        command_line.say_json({"a": "\u00e9\u2713"})
        command_line.table(["a", "b"], [["\u2713", "x"]])
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
from yobx_flatten.core.terminal.command_line import say, table, progress
from yobx_flatten.core.terminal.command_line import lasting_streams
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


def test_work_goes_on_when_its_reader_has_ended(tmp_path):
    line = f'"{sys.executable}" -c \'{PROGRAM}\' "{tmp_path / "done"}" 2>&1 | head -n 1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["line 0", "7"]
    assert done.stderr == ""
    assert (tmp_path / "done").exists()


def test_a_drive_is_not_the_module_of_an_object():
    assert [is_object_name(text) for text in ("my_inputs:make", "C:/models", "llama")] == [True, False, False]
