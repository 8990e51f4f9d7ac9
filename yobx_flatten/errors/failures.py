"""Catch errors of any class from code of users and other libraries; format and log them.

Only the functions of this file catch all errors; any other ``except Exception`` has a comment with the reason.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

_T = TypeVar("_T")
_U = TypeVar("_U")


def result_or(run: Callable[[], _T], otherwise: Callable[[Exception], _U]) -> _T | _U:
    # otherwise: returns the result for an error; each caller explains why the error may be dropped
    try:
        return run()
    except Exception as error:  # the result reports the error
        return otherwise(error)


@contextlib.contextmanager
def raised_as(error_of: Callable[[Exception], Exception | None], *own: type[Exception]) -> Iterator[None]:
    """Convert an error of a ``with`` block to an error of this package, with the original error as its cause."""
    # error_of: returns the new error; `None` for the original error
    # own: classes that are not converted
    try:
        yield
    except own:
        raise
    except BaseException as error:  # Ctrl-C is raised again
        # a panic of a Rust library is not an `Exception`, and its class cannot be imported
        is_failure = isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"
        found = error_of(cast("Exception", error)) if is_failure else None
        if found is None:
            raise
        raise found from error


@contextlib.contextmanager
def noted_on_failure(note_for: Callable[[Exception], str]) -> Iterator[None]:
    """Add a note to any exception that a ``with`` block raises; an empty note is not added."""
    try:
        yield
    except Exception as error:
        if note := note_for(error):
            error.add_note(note)
        raise


@contextlib.contextmanager
def undone_on_failure(undo: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    except BaseException:  # also Ctrl-C and the end of the process
        undo()
        raise


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message that is not blank; if all lines are blank, the class name.

    >>> first_line(ValueError("\n  cannot open model.onnx \nat line 3")), first_line(KeyboardInterrupt())
    ('cannot open model.onnx', 'KeyboardInterrupt')
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def format_bytes(count: float) -> str:
    """Format a number of bytes with the units of SI: 1 kB is 1000 bytes.

    >>> format_bytes(40), format_bytes(2300), format_bytes(8e9), format_bytes(1.38e12)
    ('40 bytes', '2.3 kB', '8 GB', '1.38 TB')
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def table(rows: Iterable[Sequence[str]], *, align: str = "", indent: str = "  ", width: int | None = None) -> list[str]:
    """Format a table, given as rows of cells, as lines of text with aligned columns.

    >>> for line in table([["case", "steps", "worst"], ["batch 3", "2", "logits"], ["batch 12", "why"]], indent="| "):
    ...     print(line)
    | case      steps  worst
    | batch 3   2      logits
    | batch 12  why
    >>> for line in table([["model.layers.0", "9 MB"], ["head", "12.5 MB"]], align="<>", indent="| ", width=20):
    ...     print(line)
    | ...yers.0     9 MB
    | head       12.5 MB
    """
    # rows: the cells of each row; the first row can be a header. The last cell of a row is never padded, so a row can
    # end early with a sentence.
    # align: one sign per column, `"<"` for the left and `">"` for the right. Default: all to the left.
    # width: most characters of a line, for which the first cells are shortened at their start. Default: no limit.
    cells = [list(row) for row in rows]
    signs = align.ljust(max(map(len, cells), default=0), "<")
    widths = [0] * len(signs)
    for row in cells:
        for column, cell in enumerate(row):
            if column < len(row) - 1 or signs[column] == ">":
                widths[column] = max(widths[column], len(cell))
    if width is not None:
        widths[0] = min(widths[0], width - len(indent) - sum(2 + other for other in widths[1:]))
        for row in cells:
            if len(row[0]) > widths[0]:
                row[0] = "..." + row[0][3 - widths[0] :]
    lines = ("  ".join(f"{c:{sign}{wide}}" for c, sign, wide in zip(row, signs, widths, strict=False)) for row in cells)
    return [f"{indent}{line}".rstrip() for line in lines]


# `extra=` of a log record that starts a step of a long call, for progress bars
STEP = {"step": True}

_LOGGER = logging.getLogger("yobx_flatten")
# the level of messages that the current call shows; all threads share the level of the logger
_WANTED: contextvars.ContextVar[int] = contextvars.ContextVar("yobx_flatten_verbose", default=sys.maxsize)


@contextlib.contextmanager
def verbosity(verbose: int) -> Iterator[None]:
    """In a ``with`` block, show this thread's log messages: ``INFO`` for ``verbose=1``, also ``DEBUG`` for 2."""
    level = sys.maxsize if not verbose else logging.INFO if verbose == 1 else logging.DEBUG
    before = _WANTED.set(min(level, _WANTED.get()))
    try:
        yield
    finally:
        _WANTED.reset(before)


def say(level: int, message: str, *args: object) -> None:
    """Log a message; in a block of :func:`verbosity`, write it to stderr if logging has no handlers."""
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, message, *args, stacklevel=2)
    elif level >= _WANTED.get():
        file, line, function, _ = _LOGGER.findCaller(stacklevel=2)
        record = _LOGGER.makeRecord(_LOGGER.name, level, file, line, message, args, None, function)
        (_LOGGER if _LOGGER.hasHandlers() else logging.StreamHandler()).handle(record)


@contextlib.contextmanager
def without_records(unwanted: Mapping[str, str]) -> Iterator[None]:
    """In a ``with`` block, hide log messages that start with a given prefix, one prefix for each logger name."""

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(unwanted[record.name])

    logs = [logging.getLogger(name) for name in unwanted]
    for log in logs:
        log.addFilter(is_news)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(is_news)
