"""The state of the process's random generators, to detect what code has drawn.

A run that has drawn moves these generators when it is committed, while layers of another pipeline may be under way in
another thread. Each move is noted, so that those layers are not taken for ones that draw.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
from collections.abc import Iterator

import torch

from ...device.generator import generator_lock
from .generators import process_marks

# Bytes of a state of the generator of the CPU that are compared, at its begin and at its end.
_HEAD, _TAIL = 128, 64

# What shows the states before and after the last moves of runs.
_MOVES: collections.deque[tuple[object, object]] = collections.deque(maxlen=64)


class ProcessState:
    """A state of the generators of the process, read under their lock."""

    __slots__ = ("mark", "others", "state")

    def __init__(self) -> None:
        self.state = torch.default_generator.get_state()
        self.mark = _mark(self.state)
        self.others = process_marks()

    def is_now(self) -> bool:
        """Report whether the generators are in this state."""
        return self.mark == _mark(torch.default_generator.get_state()) and self.others == process_marks()

    def is_moved(self) -> bool:
        """Report whether runs that were committed since are all that has moved the generators."""
        here: object = self.mark, self.others
        now = ProcessState()
        moves = list(_MOVES)
        begins = [number for number, (before, _) in enumerate(moves) if before == here]
        for before, after in moves[begins[-1] :] if begins else ():
            if before != here:
                return False
            here = after
        return here == (now.mark, now.others)


@contextlib.contextmanager
def moving() -> Iterator[None]:
    """Note that what the block does to the generators is the commit of a run."""
    with generator_lock():
        before = ProcessState()
        yield
        after = ProcessState()
        _MOVES.append(((before.mark, before.others), (after.mark, after.others)))


def _mark(state: torch.Tensor) -> bytes:
    """The bytes in which any two states differ, of 5,056.

    At the begin are the seed, the number of words that are used up, and some of the words, which all change together;
    at the end is the normal number that is kept for the next call.
    """
    start = state.data_ptr()
    return ctypes.string_at(start, _HEAD) + ctypes.string_at(start + state.nbytes - _TAIL, _TAIL)
