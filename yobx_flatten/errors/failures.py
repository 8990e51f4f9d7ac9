"""Catch errors of any class from code of users and other libraries.

These are the only places that do so. Elsewhere an ``except`` names the expected errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

_T = TypeVar("_T")
_U = TypeVar("_U")


def result_or(run: Callable[[], _T], otherwise: Callable[[Exception], _U]) -> _T | _U:
    """Return the result of a function, or the replacement for its error.

    >>> result_or(lambda: repr(3), lambda error: "?"), result_or(lambda: 1 // 0, lambda error: -1)
    ('3', -1)
    """
    # otherwise: returns the result for an error; it states why no error has to come out
    try:
        return run()
    except Exception as error:  # reported by the caller, in the result
        return otherwise(error)


@contextlib.contextmanager
def raised_as(error_of: Callable[[Exception], Exception | None], *own: type[Exception]) -> Iterator[None]:
    """Raise an error of ours, with the cause, for whatever a block raises.

    >>> with raised_as(lambda error: ValueError(f"not a number: {error}")):
    ...     int("three")
    Traceback (most recent call last):
    ValueError: not a number: invalid literal for int() with base 10: 'three'
    """
    # error_of: returns the error that comes out; `None` for the one that was raised
    # own: classes that come out as they are
    try:
        yield
    except own:
        raise
    except BaseException as error:  # it is the cause of the one that comes out
        # a panic of a library in Rust is no `Exception`, and its class cannot be imported; Ctrl-C is neither
        is_failure = isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"
        found = error_of(cast("Exception", error)) if is_failure else None
        if found is None:
            raise
        raise found from error


@contextlib.contextmanager
def noted_on_failure(note_for: Callable[[Exception], str]) -> Iterator[None]:
    """Add a note to whatever a block raises, and let it come out.

    >>> with noted_on_failure(lambda error: "in the third row"):
    ...     int("three")
    Traceback (most recent call last):
    ValueError: invalid literal for int() with base 10: 'three'
    in the third row
    """
    # note_for: returns the note; empty for none
    try:
        yield
    except Exception as error:  # its text is not ours, so it stays as it is
        note = note_for(error)
        if note:
            error.add_note(note)
        raise


@contextlib.contextmanager
def undone_on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Call an undo function if the block fails, also after Ctrl-C; the error propagates.

    >>> with undone_on_failure(lambda: print("undone")):
    ...     raise ValueError("no")
    Traceback (most recent call last):
    ValueError: no
    """
    try:
        yield
    except BaseException:  # also Ctrl-C and the end of the process; it is raised again
        undo()
        raise
