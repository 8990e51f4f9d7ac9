"""What a process of the matrix does: the columns of one type, or loading what another process stored.

Every column is announced and answered with one line of JSON, written at once, so that the parent knows where a process
ended that was killed.
"""

from __future__ import annotations

import json
import logging
import pathlib
import re
import time
import traceback
import warnings
from typing import Any, TextIO

__all__ = ["STORED", "be_quiet", "first_line", "load_stored", "run_columns", "run_type"]

# the column whose second half runs in another process
STORED = "save and load"


def first_line(error: BaseException) -> str:
    r"""Return the exception's type and the first 200 characters of what it states.

    torch's ONNX exporter states the same of everything, and what it means by it in the cause.

    >>> first_line(ValueError("no such thing\nbecause"))
    'ValueError: no such thing because'
    """
    if type(error).__module__.startswith("torch.onnx"):
        while error.__cause__ is not None:
            error = error.__cause__
    said = re.sub(r"\S*/site-packages/", "", " ".join(str(error).split()))  # the place of a library differs
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


def run_type(
    name: str, way: str, columns: list[str], known: dict[str, bool | None], folder: pathlib.Path, events: TextIO
) -> None:
    """Run columns of one type in this process.

    Args:
        name: the type.
        way: a name of `ways.WAYS`.
        columns: which ones, in order.
        known: whether columns passed earlier.
        folder: where files may be written.
        events: gets a line before and after each column.
    """
    be_quiet()
    from .cases import Trial
    from .ways import WAYS

    run_columns(Trial(name, WAYS[way], folder), columns, known, events)


def load_stored(way: str, folder: pathlib.Path, events: TextIO) -> None:
    """Load what the column "save and load" stored; this process has seen no model."""
    be_quiet()
    from .cases import load
    from .ways import WAYS

    _run_column(STORED, lambda: load(WAYS[way], folder), events)


def run_columns(
    trial: Any, columns: list[str], known: dict[str, bool | None], events: TextIO, table: Any = None
) -> None:
    """Run columns in order; one whose predecessor did not pass is recorded as not tried.

    Args:
        trial: what a column is asked of.
        columns: their names.
        known: whether columns passed earlier.
        events: gets a line before and after each column.
        table: ``COLUMNS`` and ``NEEDS`` of another matrix than that of `cases`.
    """
    from . import cases

    functions, needs = table or (cases.COLUMNS, cases.NEEDS)
    passed = dict(known)
    for column in columns:
        needed = needs.get(column)
        if needed is not None and passed.get(needed) is not True:
            _say(events, column=column, result={"ok": None, "why": f"{needed} did not pass"})
        else:
            passed[column] = _run_column(column, lambda column=column: functions[column](trial), events)


def _run_column(column: str, ask: Any, events: TextIO) -> bool | None:
    from .cases import NoCacheError, SkipColumnError

    _say(events, start=column)
    start = time.monotonic()
    result: dict[str, Any]
    try:
        result = {"ok": True, **ask()}
    except (SkipColumnError, NoCacheError) as error:
        result = {"ok": None, "why": first_line(error)}
    except Exception as error:  # whatever goes wrong is what the matrix records
        result = {"ok": False, "why": first_line(error), "where": _where(error)}
    result["seconds"] = round(time.monotonic() - start, 2)
    _say(events, column=column, result=result)
    return result["ok"]


def _say(events: TextIO, **event: Any) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


def _where(error: BaseException) -> str:
    """The innermost frames: enough to find the place."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    short = [f"{'/'.join(pathlib.Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}" for frame in frames]
    return " < ".join(reversed(short))


def be_quiet() -> None:
    """Let nothing but results be said."""
    import torch
    import transformers

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
