"""The programs of the guide run, page by page, and print what the page says."""

import contextlib
import doctest
import io
import itertools
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

GUIDE = Path(__file__).parent.parent / "docs" / "guide"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Program(NamedTuple):
    """One ```python block, where it starts, and the ```text block behind it, if that is the next block."""

    line: int
    source: str
    printed: str | None


def programs_of(text: str) -> list[Program]:
    blocks = [(m[1], m[2], text[: m.start()].count("\n") + 2) for m in FENCE.finditer(text)]
    blocks.append(("", "", 0))
    return [
        Program(line, source, following if kind_after == "text" else None)
        for (kind, source, line), (kind_after, following, _) in itertools.pairwise(blocks)
        if kind == "python"
    ]


def run(program: Program, page: str, namespace: dict[str, Any]) -> str:
    """Run one block and return what it printed; an exception ends it and is printed as Python prints it."""
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


PAGES = [path for path in sorted(GUIDE.glob("*.md")) if programs_of(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_page_prints_what_it_says(page, tmp_path, monkeypatch):
    """Each block prints the text block behind it, and nothing if there is none."""
    pytest.importorskip("transformers")
    text = page.read_text(encoding="utf-8")
    for library in ("jax", "optree"):
        if f"import {library}" in text:
            pytest.importorskip(library, reason=f"{library} is not installed")
    if "onnx" in text:
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for program in programs_of(text):
        found = run(program, page.name, namespace)
        expected = program.printed or ""
        assert doctest.OutputChecker().check_output(expected, found, FLAGS), (
            f"{page.name}:{program.line}\nexpected:\n{textwrap.indent(expected, '    ')}\n"
            f"printed:\n{textwrap.indent(found, '    ')}"
        )


def test_a_text_block_belongs_to_the_program_right_before_it():
    """A block of another kind in between leaves the program without expected output."""
    page = "```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nx = 1\n```\n\n```bash\nls\n```\n```text\n2\n```\n"
    assert programs_of(page) == [Program(2, "print(1)\n", "1\n"), Program(10, "x = 1\n", None)]


def test_every_page_but_the_words_has_programs():
    """A page that loses its fences would pass unseen otherwise."""
    without = {path.stem for path in GUIDE.glob("*.md")} - {path.stem for path in PAGES}
    assert without == {"index", "words"}
