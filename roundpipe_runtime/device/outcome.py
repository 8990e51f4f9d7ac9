"""Handle an error before it is raised: undo, notify others, or add a note. Interruptions count as errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType

from .worker import add_note_once


class Outcome:
    """Keeps the error of a block until other ranks know it; then its owner raises it.

    >>> with Outcome() as outcome:
    ...     1 / 0
    >>> outcome.error
    ZeroDivisionError('division by zero')
    """

    # error: the error; `None` if the block has succeeded

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Outcome:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.error = error
        return True


@contextlib.contextmanager
def on_error(act: Callable[[BaseException], object]) -> Iterator[None]:
    """Undo a block that has raised, or notify others of its error, before the error propagates.

    >>> with contextlib.suppress(ZeroDivisionError), on_error(print):
    ...     1 / 0
    division by zero
    """
    try:
        yield
    except BaseException as error:  # an interruption must also be undone
        act(error)
        raise


def noting(note: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which an error gets a note, once."""
    return on_error(partial(add_note_once, note=note))
