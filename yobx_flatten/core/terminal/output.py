"""Print lines, tables, JSON and progress bars for command lines."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Characters that a terminal interprets: C0 and C1 controls except for tab and line feed, and marks that change the
# direction of text. A name in an untrusted file may contain these characters (CWE-150).
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def console(*, stderr: bool = False) -> Console:
    """Return a rich console, with a width of 120 columns if the output is not a terminal."""
    from rich.console import Console

    made = Console(highlight=False, stderr=stderr)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made = Console(highlight=False, stderr=stderr, width=120)
    return made


def printable(text: str) -> str:
    r"""Return text with escaped control characters, which a terminal would interpret.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def say(text: str = "", *, end: str = "\n", is_result: bool = False) -> None:
    sys.stdout.write((text if is_result and not sys.stdout.isatty() else printable(text)) + end)
    sys.stdout.flush()


def say_json(value: object) -> None:
    """Print a value as JSON; infinite numbers and NaN, which JSON does not have, become ``null``."""
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(_finite(value), indent=2)
    say(_OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _finite(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(below) for below in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of plain text (square brackets are no markup); lines are never broken inside a word."""
    # rows: the cells of each row; the first two cells name the row. If the longest words of all columns do not fit in
    # one line, each row takes several lines.
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = list(zip(headings, *rows, strict=True))
    words = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    shown_on = console()
    if sum(words) + 2 * len(words) > shown_on.width:
        how: dict[str, Any] = {"width": shown_on.width, "break_long_words": False, "break_on_hyphens": False}
        lines = []
        for row in rows:
            named = zip(headings[2:], row[2:], strict=True)
            rest = "; ".join(f"{heading}: {cell}" for heading, cell in named if cell not in ("", "-"))
            lines += textwrap.wrap("  ".join(row[:2]), subsequent_indent="    ", **how)
            lines += textwrap.wrap(rest, initial_indent="    ", subsequent_indent="    ", **how)
        say("\n".join(lines))
        return
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading, longest in zip(headings, words, strict=True):
        made.add_column(heading, min_width=longest)
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    shown_on.print(made)


class _Lines(logging.Handler):
    """A log handler that shows steps logged by ``yobx_flatten`` in the progress bar."""

    def __init__(self, show: Any) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "step", False):
            numbers = (getattr(record, name, None) for name in ("total", "share"))
            self._show(record.getMessage(), getattr(record, "done", 0), *numbers)


@contextlib.contextmanager
def progress(first: str) -> Iterator[Any]:
    """Show the progress of a command on stderr: a bar, or one line per step if stderr is not a terminal."""
    # yields: a function that shows a step; steps that the package logs are shown automatically. A step with `done` and
    # `total` also shows the remaining time of the step, and a step with the finished `share` that of the command.
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    shown_on = console(stderr=True)
    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), BarColumn(20), TimeElapsedColumn(), TimeRemainingColumn(), text)
    logger = logging.getLogger("yobx_flatten")
    found = logger.level
    with Progress(*columns, console=shown_on, transient=True, disable=not shown_on.is_terminal) as bar:
        task = bar.add_task(first, total=None)
        last, begun, end = "", time.monotonic(), 0.0

        def show(text: str, done: int = 0, total: int | None = None, share: float | None = None) -> None:
            nonlocal last, end
            now = time.monotonic()
            end = end if share is None else begun + (now - begun) / share
            text = printable(text) + (f" (about {end - now:.0f} s left)" if end > now + 1 else "")
            if total is None:
                bar.tasks[0].total = None  # `update` ignores `total=None`
            bar.update(task, description=text, completed=done, total=total)
            if bar.disable and text != last:
                sys.stderr.write(text + "\n")
                sys.stderr.flush()
            last = text

        bar.update(task, description=first)
        lines = _Lines(show)
        logger.addHandler(lines)
        logger.setLevel(min(found or logging.INFO, logging.INFO))
        try:
            yield show
        finally:
            logger.setLevel(found)
            logger.removeHandler(lines)
