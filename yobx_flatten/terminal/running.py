"""Start a command line, and return an exit status in every case."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import FlattenError
from ..errors.dependencies import install_line, is_installed
from . import ended_by_ctrl_c
from .failures import explain_failure, interruption_behind, terminable

if TYPE_CHECKING:
    import typer


def starting(
    program: str, start: Callable[[], Callable[[Sequence[str] | None], int]], argv: Sequence[str] | None
) -> int:
    """Import a command-line program, which takes seconds, run it, and return its exit status."""
    with terminable():
        try:
            with ended_by_ctrl_c(program):
                if not has_libraries(program):
                    return 2
                run = start()
        except (ImportError, RuntimeError, KeyboardInterrupt) as error:
            if interruption_behind(error) is None:
                raise
            return explain_failure(error, debug=False, program=program)
        return run(argv)


def has_libraries(program: str) -> bool:
    """Return whether the libraries of the command line are installed; if not, print the line that installs them."""
    missing = [name for name in ("typer", "rich") if not is_installed(name)]
    if missing:
        wanted = " and ".join(missing)
        sys.stderr.write(f"{program}: the command line needs {wanted}: {install_line('cli')}\n")
    return not missing


def reflow_help(app: typer.Typer) -> None:
    """Join the lines of help texts, so that they wrap at the width of the terminal and not of the docstring."""
    for command in (app.registered_callback, *app.registered_commands):
        paragraphs = inspect.cleandoc(command.callback.__doc__ or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _hide_types_of_flags(command: Any) -> None:
    """Remove the type ``<bool>``, which typer 0.29 shows for flags, from the help."""
    for one in (command, *getattr(command, "commands", {}).values()):
        one.get_params = functools.partial(_without_types, one.get_params)


def _without_types(get_params: Callable[[Any], list[Any]], context: typer.Context) -> list[Any]:
    params = get_params(context)
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: ""
        elif getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def run_app(
    app: typer.Typer,
    argv: Sequence[str] | None = None,
    *,
    program: str,
    expected: tuple[type[Exception], ...] = (FlattenError,),
    is_reporter: Callable[[], bool] = lambda: True,
) -> int:
    """Run one command and return its exit status; the command reads its command-line words from ``context.obj``."""
    with lasting_streams(), terminable():
        return _run(app, argv, program, expected, is_reporter)


def _run(
    app: typer.Typer,
    argv: Sequence[str] | None,
    program: str,
    expected: tuple[type[Exception], ...],
    is_reporter: Callable[[], bool],
) -> int:
    import typer

    given = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in given
    fail = functools.partial(explain_failure, debug=debug, program=program, expected=expected, is_reporter=is_reporter)
    command: Any = typer.main.get_command(app)
    _hide_types_of_flags(command)
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
    words = [word for word in given if word != "--debug"]
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
    """Make printing in the with block never raise an error; characters that the terminal lacks are escaped."""
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # pythonw
                continue
            stack.callback(setattr, sys, name, stream)
            setattr(sys, name, _LastingStream(stream))
        yield
