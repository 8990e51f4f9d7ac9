"""What a user types who follows a page: its blocks in order, from the built site or from the page's source."""

import html.parser
import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from tests.test_docs_guide import FENCE, NAMED

_HEADING = re.compile(r"^##+ (.*)$", re.MULTILINE)
_TYPED = ("python", "console", "bash")


class Block(NamedTuple):
    kind: str  # "python", "console", "bash" or "text"
    text: str
    section: str  # the heading above it, in plain letters; empty above the first


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in their order, of the built site (``.html``) or its source (``.md``)."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".html":
        built = _BuiltPage()
        built.feed(text)
        return [block for block in built.blocks if block.kind in (*_TYPED, "text")]
    headings = [(found.start(), found[1]) for found in _HEADING.finditer(FENCE.sub(lambda m: " " * len(m[0]), text))]
    found = []
    for fence in FENCE.finditer(text):
        above = [title for start, title in headings if start < fence.start()]
        if fence[1] in (*_TYPED, "text"):
            found.append(Block(fence[1], fence[2], re.sub("[`*]", "", above[-1]) if above else ""))
    return found


class _BuiltPage(html.parser.HTMLParser):
    """Collects the blocks of a page of the site, as a reader copies them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self._kind = self._section = ""
        self._part: str | None = None  # "pre" or "heading", while its letters come
        self._letters: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = (dict(attrs).get("class") or "").split()
        kinds = [name.removeprefix("highlight-") for name in names if name.startswith("highlight-")]
        if tag == "div" and kinds:
            self._kind = kinds[0]
        elif tag == "pre" and self._kind:
            self._part, self._letters = "pre", []
        elif tag in ("h2", "h3", "h4"):
            self._part, self._letters = "heading", []
        elif tag == "a" and "headerlink" in names and self._part == "heading":
            self._section, self._part = "".join(self._letters), None

    def handle_data(self, data: str) -> None:
        if self._part:
            self._letters.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre" and self._part == "pre":
            self.blocks.append(Block(self._kind, "".join(self._letters), self._section))
            self._part, self._kind = None, ""


def in_sections(blocks: Iterable[Block], sections: Collection[str]) -> list[Block]:
    """Return the blocks of the sections that a task needs; without one, those of the whole page."""
    blocks = list(blocks)
    missing = set(sections) - {block.section for block in blocks}
    assert not missing, f"the page has no block below {sorted(missing)}, but {sorted({b.section for b in blocks})}"
    return [block for block in blocks if not sections or block.section in sections]


def program_of(blocks: Iterable[Block]) -> str:
    """Return one program that does what a user does who types the blocks: Python, and lines of a shell next to it.

    A block that begins with the name of a file is written to that file; one that ends with an error, as the page shows,
    must end with it. What a shell prints is in `printed_by_shell`. What pip installs is there already.
    """
    blocks = list(blocks)
    lines = [_START]
    for block, after in zip(blocks, [*blocks[1:], Block("", "", "")], strict=True):
        if block.kind == "python":
            shown = after.text if after.kind == "text" else ""
            error = re.search(r"^(\w+(?:Error|Exception)): ", shown, re.MULTILINE)
            if named := NAMED.match(block.text):
                lines.append(f"_pathlib.Path({named[1]!r}).write_text({block.text!r}, encoding='utf-8')")
            elif error:
                lines.append(f"_fails({block.text!r}, {error[1]!r})")
            else:
                lines.append(block.text)
        lines += [f"_type({line!r})" for line in shell_lines(block)]
    return "\n".join(lines)


_START = """
import pathlib as _pathlib, subprocess as _subprocess

printed_by_shell = []


def _type(line):
    done = _subprocess.run(line, shell=True, check=True, stdout=_subprocess.PIPE, text=True)
    printed_by_shell.append(done.stdout)


def _fails(source, name):
    try:
        exec(source, globals())
    except Exception as error:
        assert type(error).__name__ == name, error
    else:
        raise AssertionError(f"{name} was not raised by\\n{source}")

"""


def shell_lines(block: Block) -> list[str]:
    """Return what is typed into a shell; what pip installs is left out."""
    if block.kind == "console":
        typed = re.findall(r"^\$ (.*)$", block.text, re.MULTILINE)
    else:
        typed = block.text.splitlines() if block.kind == "bash" else []
    return [line for line in typed if line and shlex.split(line)[0] != "pip"]
