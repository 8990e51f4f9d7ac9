"""Log to ``yobx_flatten``; ``verbose=`` raises the level for one call and its thread."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
from collections.abc import Iterator, Mapping

# `extra=` of a record that begins a step of a long call, which progress bars show.
STEP = {"step": True}

_LOGGER = logging.getLogger("yobx_flatten")
# The level from which the caller wants to hear, whatever that of the logger is: all threads share the logger.
_WANTED: contextvars.ContextVar[int] = contextvars.ContextVar("yobx_flatten_verbose", default=sys.maxsize)


@contextlib.contextmanager
def verbosity(verbose: int) -> Iterator[None]:
    """Pass this thread's log records in the block to the handlers: 1 for ``INFO``, 2 for ``DEBUG``."""
    level = sys.maxsize if not verbose else logging.INFO if verbose == 1 else logging.DEBUG
    before = _WANTED.set(min(level, _WANTED.get()))
    try:
        yield
    finally:
        _WANTED.reset(before)


def say(level: int, message: str, *args: object) -> None:
    """Log a message; with `verbosity` and without configured logging it goes to stderr."""
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, message, *args, stacklevel=2)
    elif level >= _WANTED.get():
        file, line, function, _ = _LOGGER.findCaller(stacklevel=2)
        record = _LOGGER.makeRecord(_LOGGER.name, level, file, line, message, args, None, function)
        (_LOGGER if _LOGGER.hasHandlers() else logging.StreamHandler()).handle(record)


@contextlib.contextmanager
def without_records(unwanted: Mapping[str, str]) -> Iterator[None]:
    """Keep records off the terminal whose text begins as stated, by the name of the logger."""

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
