"""Turn an error into one line and an exit status.

======  =================================================================
0       success
1       a check failed
2       the request is invalid: a wrong name, a missing library
130     interrupted
143     ended by SIGTERM
======  =================================================================
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from ..errors import FlattenError, ReplayError
from ..errors.tried_versions import VersionDependentError, possible_cause, without_cause
from .output import printable

CHECK_FAILED, REFUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143


# names of options in other programs, each with the name of our option
_PAIRS = (
    "learning-rate=lr peak-lr=lr batch-size=batch train-batch-size=batch per-device-train-batch-size=batch "
    "gradient-accumulation-steps=accumulate num-train-epochs=epochs num-epochs=epochs max-steps=steps dataset=text "
    "max-length=length max-seq-length=length cutoff-len=length max-grad-norm=clip warmup-steps=warmup data=text "
    "precision=dtype output-dir=output max-new-tokens=tokens max-tokens=tokens"
)
_OTHER_NAMES = dict(pair.split("=") for pair in _PAIRS.split())


class UserError(FlattenError, ValueError):
    """The command line names an unknown file or option."""


def explain_failure(
    error: BaseException,
    *,
    debug: bool,
    program: str = "yobx-flatten",
    expected: tuple[type[Exception], ...] = (FlattenError,),
    is_reporter: Callable[[], bool] = lambda: True,
) -> int:
    """Print the error that ended a command on stderr, and return the exit status of the command."""
    # error: the text of a `KeyboardInterrupt` lists the files that were written before
    # expected: error classes with a complete message; other errors are shown with their class
    if debug:
        traceback.print_exception(error)
    error = interruption_behind(error) or error
    status, text = _status_and_text(error, expected)
    if is_reporter():
        sys.stderr.write(printable("\n".join([f"{program}: {text}", *getattr(error, "__notes__", ())])) + "\n")
    return status


def interruption_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the ``KeyboardInterrupt`` that caused an error, such as an error of an interrupted import, or ``None``."""
    below = error.__cause__ or error.__context__
    behind = None if below is None else interruption_behind(below)
    return error if isinstance(error, KeyboardInterrupt) else behind


def _status_and_text(error: BaseException, expected: tuple[type[Exception], ...]) -> tuple[int, str]:
    if isinstance(error, Terminated):
        return TERMINATED, str(error) or "terminated, nothing was written"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, str(error) or "interrupted, nothing was written"
    if isinstance(error, ReplayError):
        return CHECK_FAILED, str(error)  # with its report, case by case
    if isinstance(error, expected):
        line = possible_cause() if isinstance(error, VersionDependentError) else ""
        return REFUSED, _with(line, " ".join(without_cause(error).split()))
    # newer versions of typer contain their own copy of click
    if {base.__name__ for base in type(error).__mro__} & {"ClickException", "TyperException"}:
        return REFUSED, f"{_click_message(error)} (see --help)"
    if isinstance(error, OSError) or _is_disk_full(error):
        return REFUSED, _about_files(error)
    if isinstance(error, MemoryError):
        return REFUSED, "out of memory"
    first = next((line for line in str(error).splitlines() if line.strip()), "no message")
    return REFUSED, _with(possible_cause(), f"{type(error).__name__}: {first.strip()} (--debug shows where)")


def _with(line: str, text: str) -> str:
    return f"{text}\n{line}" if line else text


def _click_message(error: BaseException) -> str:
    formatted = getattr(error, "format_message", lambda: str(error))()
    if (typed := getattr(error, "option_name", None)) and type(error).__name__ == "NoSuchOption":
        context: Any = getattr(error, "ctx", None)
        known = [name for one in context.command.params for name in one.opts] if context else []
        formatted = f"No such option: {typed}.{meant_option(typed, known)}"
    # newer versions of typer check values with pydantic, which begins with the class of the error
    return " ".join(str(formatted).split()).replace(": Value error, ", ": ").rstrip(".")


def meant_option(typed: str, known: Iterable[str]) -> str:
    """Return "Did you mean ...?" for an option of similar meaning or spelling, or an empty string."""
    names = {name.strip("-"): name for name in known}
    name = typed.strip("-").replace("_", "-")
    close = [_OTHER_NAMES[name]] if _OTHER_NAMES.get(name) in names else difflib.get_close_matches(name, names, 1)
    return f" Did you mean {names[close[0]]}?" if close else ""


def _is_disk_full(error: BaseException) -> bool:
    # libraries in C++ and Rust raise their own classes, with the text of the system's error
    return "No space left on device" in str(error) or "os error 28" in str(error)


def _about_files(error: BaseException) -> str:
    place = getattr(error, "filename", None)
    if getattr(error, "errno", None) == errno.ENOSPC or _is_disk_full(error):
        return f"the disk is full{f', writing {place}' if place else ''}; nothing was left behind"
    reason = getattr(error, "strerror", None) or str(error)
    return f"{place}: {reason}" if place else str(reason)


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM; the text lists the files that were written before."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise :class:`Terminated` on SIGTERM in the with block, unless the process handles this signal itself."""
    # only the main thread receives signals
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked process, which SIGTERM ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
