"""Record the random draws of a run's layers: their seeds, and generator states before and after.

The seeds come from the state of torch's generator when the run begins, so a state that the caller puts back brings the
same masks back. The caller's generators move when the run is committed, and only those that a layer has drawn from::

    one microbatch      each call continues where the one before it ended, as in the layers without a pipeline
    several             each call starts at its own state, since layers draw at the same time, on several devices
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from ...device.generator import generator_lock
from ...errors import StageError
from .generators import Generator, is_same, process_marks

# Runs under way, each with what its seeds are made of: of two that begin in the same state, as in two threads, each
# draws for itself.
_UNDER_WAY: weakref.WeakSet[Draws] = weakref.WeakSet()
_LOCK = threading.Lock()


def run_base() -> int:
    """Return the seed of a run: a digest of the state of torch's generator."""
    with generator_lock():
        state = torch.default_generator.get_state()
    return int.from_bytes(hashlib.blake2b(bytes(state.numpy()), digest_size=7).digest())


@dataclasses.dataclass(eq=False)
class Draws:
    """Random draws of the calls of a run."""

    base: int  # number made of the state of torch's generator
    tag: str  # name of the pipeline
    in_order: bool  # whether one call follows the other, so that each continues where the last one ended
    # whether generators other than torch's follow their own states, and all move. In several processes they follow the
    # seeds, which all ranks have alike.
    moves: bool = True
    has_drawn: bool = False  # whether a call has drawn from torch's generators
    place: int = 0  # number of the run among those that began in this state, and have not ended
    # By generator, layer and microbatch: the states in which calls in order began; of others, that they drew.
    _before: dict[tuple[int, int, int], object] = dataclasses.field(default_factory=dict)
    # A number of each generator from before the run, and the state after that.
    _first: dict[int, tuple[int, object]] = dataclasses.field(default_factory=dict)
    # The states after the run, of generators that were used.
    _after: dict[int, tuple[Generator, object]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.moves:
            with _LOCK:
                taken = {run.place for run in _UNDER_WAY if (run.base, run.tag) == (self.base, self.tag)}
                self.place = next(number for number in range(len(taken) + 1) if number not in taken)
                _UNDER_WAY.add(self)

    @property
    def seeds(self) -> int:
        """The seed of the run, from which the seeds of calls are derived."""
        return self.base if self.place == 0 else _mixed(self.base, self.place, 0)

    def commit(self) -> None:
        """Move the generators of the caller, as far as layers have drawn from them."""
        if self.moves and (self.has_drawn or self._after):
            with moving():
                if self.has_drawn:
                    _draw()
                for generator, state in self._after.values():
                    generator.set(state)
        self.end()

    def end(self) -> None:
        """Release this state for another run, after a commit or a failure."""
        with _LOCK:
            _UNDER_WAY.discard(self)


@dataclasses.dataclass(slots=True)
class CallDraws:
    """Draws of one call from generators other than torch's; its caller has the lock of all generators."""

    draws: Draws  # what the calls of the run draw
    layer: int  # index of the layer; the number of layers for the loss function
    microbatch: int  # index of the microbatch
    is_recomputed: bool = False  # whether the call has been made before
    title: str = "The loss function"  # description of the layer, for errors
    # function that reports whether the call wrote nothing, so that it can be made once more
    is_repeatable: Callable[[], bool] = lambda: True
    # The generators that this call was given: the state that the caller knows, and the one where they were restarted.
    _given: dict[int, tuple[Generator, object]] = dataclasses.field(default_factory=dict)
    _restarted: dict[int, object] = dataclasses.field(default_factory=dict)

    def begin(self, generator: Generator, seed: int) -> object:
        """Bring a generator to the state in which this call begins; return that state."""
        draws, key = self.draws, (generator.key, self.layer, self.microbatch)
        found = generator.get()
        self._given[generator.key] = (generator, found)
        if not draws.moves:
            generator.seed(seed)
        elif draws.in_order:
            found = draws._before.get(key, draws._after.get(generator.key, (generator, found))[1])
            generator.set(found)
            return found
        else:
            if generator.key not in draws._first:
                draws._first[generator.key] = (generator.draw(), generator.get())
            generator.seed(_mixed(draws._first[generator.key][0], self.layer, self.microbatch))
        return generator.get()

    def restart(self) -> None:
        """Reset the generators to one state for all calls of a microbatch."""
        draws = self.draws
        for key, (generator, found) in self._given.items():
            if draws.moves and draws.in_order:
                generator.set(found)
            else:
                first = draws._first[key][0] if draws.moves else draws.base
                generator.seed(_mixed(first, -1, self.microbatch))
            self._restarted[key] = generator.get()

    def end(self, generator: Generator, before: object) -> bool:
        """Keep the generator states that the recomputation needs, from the beginning of this call."""
        draws, key = self.draws, (generator.key, self.layer, self.microbatch)
        if key in draws._before:
            return True
        after = generator.get()
        if is_same(self._restarted.get(generator.key, before), after):
            return False
        if self.is_recomputed:
            raise StageError(
                f"{self.title} draws random numbers in its recomputation, but drew none in its forward, so the "
                "gradient would be wrong. Draw the same numbers in both, or keep those of the forward:\n"
                "    if doing_recompute():\n        (mask,) = get_recompute_data()"
            )
        draws._before[key] = before if draws.in_order else None
        if draws.moves:
            draws._after[generator.key] = (generator, after if draws.in_order else draws._first[generator.key][1])
        return True


def move_generator() -> None:
    """Move torch's generator, as a call of all ranks does in which any of them has drawn."""
    with moving():
        _draw()


def _draw() -> None:
    torch.empty((), dtype=torch.int64).random_()


def _mixed(number: int, layer: int, microbatch: int) -> int:
    text = f"{number}|{layer}|{microbatch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


# The state of the process's random generators, to detect what code has drawn.


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
    """Mark the changes of generators in the block as the commit of a run."""
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
