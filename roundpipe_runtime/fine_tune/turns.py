"""Iterate over the values that a function hands to a callback, while the function is suspended in between."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

__all__ = ["in_turns"]

T = TypeVar("T")


class _Left(BaseException):
    """Unwinds the function when its values are no longer wanted; nothing between must catch it."""


def in_turns(function: Callable[[Callable[[T], None]], object]) -> Generator[T]:
    """Yield the values that a function hands over, one by one.

    The function runs in a thread of its own, but only while the next value is waited for: the two never run at the
    same time. Closing the iterator ends the function where it handed over its last value.

    Args:
        function: function that calls its argument with each value.

    Returns:
        An iterator over the values; it raises what the function raises.

    >>> list(in_turns(lambda hand: [hand(number) for number in range(3)]))
    [0, 1, 2]
    """
    results: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    turn = threading.Semaphore(0)
    is_left = False

    def hand(value: T) -> None:
        results.put(("value", value))
        turn.acquire()
        if is_left:
            raise _Left

    def work() -> None:
        try:
            function(hand)
        except BaseException as error:
            results.put(("error", error))
        else:
            results.put(("end", None))

    thread = threading.Thread(target=work, name="roundpipe fine-tuning", daemon=True)
    thread.start()
    try:
        while True:
            kind, found = results.get()
            if kind == "end":
                return
            if kind == "error":
                raise found
            yield found
            turn.release()
    finally:
        is_left = True
        turn.release()
        thread.join()
