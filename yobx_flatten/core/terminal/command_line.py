"""Print lines, tables, JSON, progress bars and errors for command lines, and return an exit status in every case."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import inspect
import json
import logging
import os
import re
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from ... import errors
from . import ended_by_ctrl_c, handled

if TYPE_CHECKING:
    import typer
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
    r"""Return text in which control characters, which a terminal would interpret, are escaped.

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
    """Print a table of plain text. Lines are never broken inside a word."""
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


# -- run a command ---------------------------------------------------------------------------------------------------


def starting(
    program: str, start: Callable[[], Callable[[Sequence[str] | None], int]], argv: Sequence[str] | None
) -> int:
    """Import and run a command-line program, and return its exit status."""
    with terminable():
        try:
            with ended_by_ctrl_c(program):
                if missing := [name for name in ("typer", "rich") if not errors.is_installed(name)]:
                    wanted = " and ".join(missing)
                    sys.stderr.write(f"{program}: the command line needs {wanted}: {errors.install_line('cli')}\n")
                    return 2
                run = start()
        except (ImportError, RuntimeError, KeyboardInterrupt) as error:
            if interruption_behind(error) is None:
                raise
            return explain_failure(error, debug=False, program=program)
        return run(argv)


def reflow_help(app: typer.Typer) -> None:
    """Join the lines of each help paragraph, so that the text wraps at the width of the terminal."""
    for command in (app.registered_callback, *app.registered_commands):
        paragraphs = inspect.cleandoc(command.callback.__doc__ or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _without_types(get_params: Callable[[Any], list[Any]], context: typer.Context) -> list[Any]:
    """Return the parameters of a command, after hiding their types in the help text."""
    params = get_params(context)
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: ""
        elif getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""  # typer 0.29 shows `<bool>` for a flag
    return params


def run_app(
    app: typer.Typer,
    argv: Sequence[str] | None = None,
    *,
    program: str,
    expected: tuple[type[Exception], ...] = (errors.FlattenError,),
    is_reporter: Callable[[], bool] = lambda: True,
) -> int:
    """Run a command of a typer application, print its error as one line, and return its exit status."""
    with lasting_streams(), terminable():
        import typer

        given = list(sys.argv[1:] if argv is None else argv)
        fail = functools.partial(
            explain_failure, debug="--debug" in given, program=program, expected=expected, is_reporter=is_reporter
        )
        command: Any = typer.main.get_command(app)
        for one in (command, *getattr(command, "commands", {}).values()):
            one.get_params = functools.partial(_without_types, one.get_params)
        interruption: list[KeyboardInterrupt] = []
        invoke = command.invoke

        def invoke_and_notice(context: typer.Context) -> Any:
            # typer and click catch Ctrl-C, and some of their versions report nothing
            try:
                return invoke(context)
            except KeyboardInterrupt as error:
                interruption.append(error)
                raise

        command.invoke = invoke_and_notice
        words = [word for word in given if word != "--debug"]  # a command reads them as `context.obj`
        try:
            status = command.main(words, prog_name=program, standalone_mode=False, obj=words)
        except (Exception, KeyboardInterrupt) as error:
            if interruption:
                return fail(interruption[0])
            if type(error).__name__ == "NoArgsIsHelpError":  # the message of this error, the help, is printed already
                return 2
            return fail(error)
        if interruption:
            return fail(interruption[0])
        return status if isinstance(status, int) else 0


class _LastingStream:
    """A text stream that accepts every character, also after its reader has closed the pipe (``... | head``)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except BrokenPipeError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        # Python flushes the descriptor at exit, which would fail again
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """In a ``with`` block, printing raises no error if the pipe is closed or the encoding lacks a character."""
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # pythonw
                continue
            stack.callback(setattr, sys, name, stream)
            setattr(sys, name, _LastingStream(stream))
        yield


# exit statuses; a request is refused if it is invalid: a wrong name, a missing library
CHECK_FAILED, REFUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143

# names of options in other programs, each with the name of our option
_PAIRS = (
    "learning-rate=lr peak-lr=lr batch-size=batch train-batch-size=batch per-device-train-batch-size=batch "
    "gradient-accumulation-steps=accumulate num-train-epochs=epochs num-epochs=epochs max-steps=steps dataset=text "
    "max-length=length max-seq-length=length cutoff-len=length max-grad-norm=clip warmup-steps=warmup data=text "
    "precision=dtype output-dir=output max-new-tokens=tokens max-tokens=tokens"
)
_OTHER_NAMES = dict(pair.split("=") for pair in _PAIRS.split())


class UserError(errors.FlattenError, ValueError):
    """The command line is invalid: for example, it names an unknown file, or options that cannot be combined."""


def explain_failure(
    error: BaseException,
    *,
    debug: bool,
    program: str = "yobx-flatten",
    expected: tuple[type[Exception], ...] = (errors.FlattenError,),
    is_reporter: Callable[[], bool] = lambda: True,
) -> int:
    """Print to stderr the error that ended a command, and return the exit status of the command."""
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
    """Return the ``KeyboardInterrupt`` that caused an error, for example in an import; ``None`` for other errors."""
    below = error.__cause__ or error.__context__
    behind = None if below is None else interruption_behind(below)
    return error if isinstance(error, KeyboardInterrupt) else behind


def _status_and_text(error: BaseException, expected: tuple[type[Exception], ...]) -> tuple[int, str]:
    if isinstance(error, Terminated):
        return TERMINATED, str(error) or "terminated, nothing was written"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, str(error) or "interrupted, nothing was written"
    if isinstance(error, errors.ReplayError):
        return CHECK_FAILED, str(error)  # with its report, case by case
    if isinstance(error, expected):
        line = errors.possible_cause() if isinstance(error, errors.VersionDependentError) else ""
        return REFUSED, "\n".join(filter(None, [" ".join(errors.without_cause(error).split()), line]))
    # newer versions of typer contain their own copy of click
    if {base.__name__ for base in type(error).__mro__} & {"ClickException", "TyperException"}:
        formatted = getattr(error, "format_message", lambda: str(error))()
        if (typed := getattr(error, "option_name", None)) and type(error).__name__ == "NoSuchOption":
            context: Any = getattr(error, "ctx", None)
            known = [name for one in context.command.params for name in one.opts] if context else []
            formatted = f"No such option: {typed}.{meant_option(typed, known)}"
        # newer versions of typer check values with pydantic, which begins with the class of the error
        message = " ".join(str(formatted).split()).replace(": Value error, ", ": ").rstrip(".")
        return REFUSED, f"{message} (see --help)"
    # libraries in C++ and Rust raise their own classes, with the text of the system's error
    is_disk_full = "No space left on device" in str(error) or "os error 28" in str(error)
    if isinstance(error, OSError) or is_disk_full:
        place = getattr(error, "filename", None)
        if getattr(error, "errno", None) == errno.ENOSPC or is_disk_full:
            return REFUSED, f"the disk is full{f', writing {place}' if place else ''}; nothing was left behind"
        reason = getattr(error, "strerror", None) or str(error)
        return REFUSED, f"{place}: {reason}" if place else str(reason)
    if isinstance(error, MemoryError):
        return REFUSED, "out of memory"
    first = next((line for line in str(error).splitlines() if line.strip()), "no message")
    text = f"{type(error).__name__}: {first.strip()} (--debug shows where)"
    return REFUSED, "\n".join(filter(None, [text, errors.possible_cause()]))


def meant_option(typed: str, known: Iterable[str]) -> str:
    """Return "Did you mean ...?" with a known option of similar meaning or spelling; ``""`` without such an option."""
    names = {name.strip("-"): name for name in known}
    name = typed.strip("-").replace("_", "-")
    close = [_OTHER_NAMES[name]] if _OTHER_NAMES.get(name) in names else difflib.get_close_matches(name, names, 1)
    return f" Did you mean {names[close[0]]}?" if close else ""


class Terminated(KeyboardInterrupt):
    """Raised when the process receives SIGTERM."""


def terminable() -> contextlib.AbstractContextManager[None]:
    """In a ``with`` block, raise :class:`Terminated` on SIGTERM, unless the process has its own signal handler."""
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked process, which SIGTERM ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise Terminated

    return handled(signal.SIGTERM, end, instead_of=signal.SIG_DFL)
