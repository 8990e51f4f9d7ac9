"""Errors of any kind, interruptions included, that go on later: after others know of them, or after an undo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType

__all__ = ["Outcome", "on_error"]


class Outcome:
    """Keeps the error of a block, so that other ranks or threads hear of it before it is raised.

    Attributes:
        error: the error; ``None`` if the block has succeeded.

    >>> with Outcome() as outcome:
    ...     1 / 0
    >>> outcome.error
    ZeroDivisionError('division by zero')
    """

    error: BaseException | None = None

    def __enter__(self) -> Outcome:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.error = error
        return True


@contextlib.contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call a function if the block raises, before its error goes on.

    >>> with contextlib.suppress(ZeroDivisionError), on_error(lambda: print("undone")):
    ...     1 / 0
    undone
    """
    with contextlib.ExitStack() as stack:
        stack.callback(undo)
        yield
        stack.pop_all()
