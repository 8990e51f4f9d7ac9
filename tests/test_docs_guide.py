"""The programs of the guide run, page by page, and print what the page says; so do the lines typed into a shell."""

import contextlib
import doctest
import importlib
import io
import itertools
import re
import shlex
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import fresh_process
from tests.cases import cases

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parent.parent / "docs" / "guide"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# the kind of a directive of the site, ```{image} and the like, is its name in braces
FENCE = re.compile(r"^```([\w{}-]*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w+\.py)\n")


class Program(NamedTuple):
    line: int
    source: str
    printed: str | None
    kind: str = "python"
    is_alone: bool = False  # behind the words "In a fresh process:"


def programs_of(text: str) -> list[Program]:
    blocks = [(m[1], m[2], m.start()) for m in FENCE.finditer(text)]
    blocks.append(("", "", len(text)))
    return [
        Program(
            text[:start].count("\n") + 2,
            source,
            following if kind == "python" and kind_after == "text" else None,
            kind,
            text[:start].rstrip().lower().endswith("in a fresh process:"),
        )
        for (kind, source, start), (kind_after, following, _) in itertools.pairwise(blocks)
        if kind in ("python", "console", "bash")
    ]


def run(program: Program, page: str, namespace: dict[str, Any]) -> str:
    """Run one block and return what it printed; an exception ends it and is printed as Python prints it.

    A block that begins with the name of a file is that file; one behind "In a fresh process:" has a process of its own.
    """
    if named := NAMED.match(program.source):
        Path(named[1]).write_text(program.source, encoding="utf-8")
        return ""
    if program.is_alone:
        done = fresh_process.run("-c", program.source, cwd=Path.cwd(), check=False)
        assert done.returncode == 0, f"{page}:{program.line}\n{done.stderr}"
        return done.stdout
    printed = io.StringIO()
    # as many empty lines in front as the page has: tracebacks, and messages that quote a place, then fit the page
    code = compile("\n" * (program.line - 1) + program.source, page, "exec")
    with contextlib.redirect_stdout(printed):
        try:
            exec(code, namespace)
        except Exception as error:
            if program.printed is None:
                raise
            printed.write(f"{type(error).__name__}: {error}\n")
    return printed.getvalue()


def commands_of(program: Program) -> list[tuple[str, str]]:
    if program.kind == "bash":
        # torchrun is typed in tests/tasks, and a clone has an address once there is a public one
        elsewhere = ("pip ", "torchrun ", "git clone ")
        return [(line, "") for line in program.source.splitlines() if not line.startswith(elsewhere)]
    _, *parts = re.split(r"^\$ ", program.source, flags=re.MULTILINE)
    return [(typed, shown) for typed, _, shown in (part.partition("\n") for part in parts)]


def type_command(typed: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> str:
    program, *words = shlex.split(typed)
    if program == "python":  # a file that the page names
        return fresh_process.run(
            *("-m", Path(words[0]).stem, *words[1:]), cwd=Path.cwd(), imported=fresh_process.TRAINER
        ).stdout
    module = {"yobx-flatten": "yobx_flatten", "roundpipe": "roundpipe_runtime"}[program]
    if "^C" in shown.splitlines():
        return interrupted("-m", module, *words)
    main = importlib.import_module(f"{module}.__main__").main
    monkeypatch.setenv("COLUMNS", "80")
    # the one number of this machine that decides what is said
    monkeypatch.setattr("roundpipe_runtime.estimate.hardware.host_memory_available", lambda: 23_600_000_000)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as errors:
        status = main(words)
    # a plan that does not fit, or an installation without an accelerator, is shown, too
    assert status in ((0, 1) if shown else (0,)), f"{typed}\n{errors.getvalue()}"
    return printed.getvalue()


def interrupted(*command: str) -> str:
    first = re.compile(r"^step .*\n", re.MULTILINE)
    with fresh_process.start(*command, cwd=Path.cwd(), imported=fresh_process.TRAINER, together=True) as process:
        process.wait_for(lambda: first.search(process.stdout) is not None)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130, process.stdout
        return first.sub(r"\g<0>^C\n", process.stdout, count=1)


NUMBER = re.compile(r"\d[\d,.]*(e[-+]\d+)?")


def comparable(typed: str, text: str) -> str:
    command = typed.split()[1]
    if command == "doctor":
        return "\n".join(sorted(set(re.findall(r"^\w+ +(.+?):", text, re.MULTILINE)) - {"accelerators"}))
    if command == "timeline":
        text = "\n".join(line for line in text.splitlines() if re.match(r" *(device|stage|The slowest)\b", line))
    lines = [line for line in text.splitlines() if line.strip()]
    measured = command in ("plan", "train", "timeline")
    return "\n".join(NUMBER.sub("#", line) if measured else line for line in lines)


PAGES = [path for path in sorted(GUIDE.glob("*.md")) if programs_of(path.read_text(encoding="utf-8"))]


# pages that export models, each for ten seconds or more: what they show has tests of its own
LONG = ["block", "command_line", "export", "from_optimum", "generate", "lora", "quantize", "record", "runtimes"]


@pytest.mark.parametrize(
    "page", cases(PAGES, quick=[page for page in PAGES if page.stem not in LONG]), ids=lambda path: path.stem
)
def test_page_prints_what_it_says(page, tmp_path, monkeypatch):
    text = page.read_text(encoding="utf-8")
    for library in ("jax", "optree", "onnxruntime_genai"):
        if f"import {library}" in text:
            pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as for a program that is started there
    namespace: dict[str, Any] = {"__name__": "__main__"}
    programs = programs_of(text)
    for named in (NAMED.match(program.source) for program in programs):
        if named:  # one page's file is not another's
            monkeypatch.setitem(sys.modules, Path(named[1]).stem, None)
            del sys.modules[Path(named[1]).stem]
    for program in programs:
        place = f"{page.name}:{program.line}"
        if program.kind == "python":
            check(place, program.printed or "", run(program, page.name, namespace))
            continue
        for typed, shown in commands_of(program):
            wanted, told = (comparable(typed, part) for part in (shown, type_command(typed, shown, monkeypatch)))
            if shown:
                check(f"{place} $ {typed}", wanted, told)


def check(place: str, expected: str, found: str) -> None:
    assert doctest.OutputChecker().check_output(expected, found, FLAGS), (
        f"{place}\nexpected:\n{textwrap.indent(expected, '    ')}\nprinted:\n{textwrap.indent(found, '    ')}"
    )


def test_every_page_but_that_of_words_has_programs_whose_lines_fit_and_no_text_block_shows_input():
    assert {path.stem for path in GUIDE.glob("*.md")} - {path.stem for path in PAGES} == {"index", "words"}
    shown = re.compile(r"^(\$ |>>> |import \w|from \w+ import |def \w+\()", re.MULTILINE)
    found = [
        f"{path.name}: {block[2].splitlines()[0]}"
        for path in GUIDE.glob("*.md")
        for block in FENCE.finditer(path.read_text(encoding="utf-8"))
        if block[1] in ("text", "") and shown.search(block[2])
    ]
    assert found == []
    for page in (*GUIDE.glob("*.md"), GUIDE.parents[1] / "README.md"):
        programs = programs_of(page.read_text(encoding="utf-8"))
        lines = [line for program in programs if program.kind == "python" for line in program.source.splitlines()]
        assert [line for line in lines if len(line) > 88] == [], page


def test_a_text_block_belongs_to_the_program_right_before_it():
    """A block of another kind in between leaves the program without expected output."""
    page = "```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nx = 1\n```\n\n```bash\nls\n```\n```text\n2\n```\n"
    assert programs_of(page) == [
        Program(2, "print(1)\n", "1\n"),
        Program(10, "x = 1\n", None),
        Program(14, "ls\n", None, "bash"),
    ]
