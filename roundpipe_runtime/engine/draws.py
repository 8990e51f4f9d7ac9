"""Record which random generators layers use: those of torch, NumPy, Python, or in attributes of layers.

A successful pipeline call advances each random generator from which its layers have drawn. With one microbatch, each
layer call continues from the generator's state after the previous call, as without a pipeline. With several
microbatches, each layer call starts from its own seed, since several devices draw at the same time.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import hashlib
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..device.worker import generator_lock
from ..errors import StageError

if TYPE_CHECKING:
    import numpy


# Active runs. Two runs that begin in the same state, for example in two threads, get different seeds.
_UNDER_WAY: weakref.WeakSet[Draws] = weakref.WeakSet()
_LOCK = threading.Lock()


def run_base() -> int:
    with generator_lock():
        state = torch.default_generator.get_state()
    return int.from_bytes(hashlib.blake2b(bytes(state.numpy()), digest_size=7).digest())


@dataclasses.dataclass(eq=False)
class Draws:
    """Records how layers use random generators during a pipeline call, and advances the generators at its end."""

    base: int  # digest of the state of torch's generator
    tag: str  # name of the pipeline
    in_order: bool  # whether calls run one after the other, so that each continues where the previous one ended
    # whether generators of Python, NumPy and layers continue from their own states, and all generators advance at the
    # commit. `False` in several processes: these generators are seeded, as the seeds are equal on all ranks.
    moves: bool = True
    has_drawn: bool = False  # whether a call has drawn from torch's generators
    place: int = 0  # index of the run among active runs that began in this state
    # By generator, layer and microbatch of each call that has drawn: the state before the call, if `in_order`.
    _before: dict[tuple[int, int, int], object] = dataclasses.field(default_factory=dict)
    # By generator: a number drawn from the generator before the run, and the generator's state after this draw.
    _first: dict[int, tuple[int, object]] = dataclasses.field(default_factory=dict)
    # By generator that a call has used: the generator, and its state after the run.
    _after: dict[int, tuple[Generator, object]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.moves:
            with _LOCK:
                taken = {run.place for run in _UNDER_WAY if (run.base, run.tag) == (self.base, self.tag)}
                self.place = next(number for number in range(len(taken) + 1) if number not in taken)
                _UNDER_WAY.add(self)

    @property
    def seeds(self) -> int:
        return self.base if self.place == 0 else _mixed(self.base, self.place, 0)

    def commit(self) -> None:
        if self.moves and (self.has_drawn or self._after):
            with moving():
                if self.has_drawn:
                    torch.empty((), dtype=torch.int64).random_()
                for generator, state in self._after.values():
                    generator.set(state)
        self.end()

    def end(self) -> None:
        with _LOCK:
            _UNDER_WAY.discard(self)  # a later call in the same generator state may now get the same seeds


@dataclasses.dataclass(slots=True)
class CallDraws:
    """Sets and records the states of Python's, NumPy's and a layer's own generators for one call of the layer."""

    draws: Draws  # the draws of the run
    layer: int  # index of the layer; the number of layers for the loss function
    microbatch: int  # index of the microbatch
    is_recomputed: bool = False  # whether the call has been made before
    title: str = "The loss function"  # description of the layer, for errors
    # function that reports whether the call can be repeated, because it has written nothing in place
    is_repeatable: Callable[[], bool] = lambda: True
    # By generator: the generator and its state before the call, and the state after its last restart.
    _given: dict[int, tuple[Generator, object]] = dataclasses.field(default_factory=dict)
    _restarted: dict[int, object] = dataclasses.field(default_factory=dict)

    def begin(self, generator: Generator, seed: int) -> object:
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
        """Reset the generators to a state that depends on the microbatch, but not on the layer."""
        draws = self.draws
        for key, (generator, found) in self._given.items():
            if draws.moves and draws.in_order:
                generator.set(found)
            else:
                first = draws._first[key][0] if draws.moves else draws.base
                generator.seed(_mixed(first, -1, self.microbatch))
            self._restarted[key] = generator.get()

    def end(self, generator: Generator, before: object) -> bool:
        """Return whether the call used a generator; if so, record the generator's state for the recomputation."""
        draws, key = self.draws, (generator.key, self.layer, self.microbatch)
        if key in draws._before:
            return True
        after = generator.get()
        if is_same(self._restarted.get(generator.key, before), after):
            return False
        if self.is_recomputed:
            raise StageError(
                f"{self.title} draws random numbers in its recomputation, but drew none in its forward, so the "
                "gradient would be wrong. Draw the numbers in the forward, and save them:\n    if doing_recompute():\n"
                "        (mask,) = get_recompute_data()\n    else:\n        mask = ...; save_for_recompute(mask)"
            )
        draws._before[key] = before if draws.in_order else None
        if draws.moves:
            draws._after[generator.key] = (generator, after if draws.in_order else draws._first[generator.key][1])
        return True


def move_generator() -> None:
    """Advance torch's generator on this rank, after a pipeline call in which any rank has drawn random numbers."""
    with moving():
        torch.empty((), dtype=torch.int64).random_()


def _mixed(number: int, layer: int, microbatch: int) -> int:
    text = f"{number}|{layer}|{microbatch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


_HEAD, _TAIL = 128, 64  # bytes of the CPU generator's state that are compared, at its start and at its end

# Marks of the generator states before and after each of the last committed runs.
_MOVES: collections.deque[tuple[object, object]] = collections.deque(maxlen=64)


class ProcessState:
    __slots__ = ("mark", "others", "state")

    def __init__(self) -> None:
        self.state = torch.default_generator.get_state()
        self.mark = _mark(self.state)
        self.others = process_marks()

    def is_now(self) -> bool:
        return self.mark == _mark(torch.default_generator.get_state()) and self.others == process_marks()

    def is_moved(self) -> bool:
        """Return whether only pipeline calls have used random generators since this state was recorded."""
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
    """Record that changes of random generators in the with block come from a pipeline call, not from user code."""
    with generator_lock():
        before = ProcessState()
        yield
        after = ProcessState()
        _MOVES.append(((before.mark, before.others), (after.mark, after.others)))


def _mark(state: torch.Tensor) -> bytes:
    """Return a few of the 5,056 bytes of a CPU generator's state, which change whenever the generator is used."""
    # The first bytes contain the seed, the number of used words, and some of the words, which all change together. The
    # last bytes contain the normal number that is stored for the next call.
    start = state.data_ptr()
    return ctypes.string_at(start, _HEAD) + ctypes.string_at(start + state.nbytes - _TAIL, _TAIL)


@dataclasses.dataclass(frozen=True, slots=True)
class Generator:
    key: int  # identity of the generator
    get: Callable[[], object]
    set: Callable[[Any], object]
    seed: Callable[[int], object]
    draw: Callable[[], int]  # draws a random number of up to 56 bits


def is_same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    same: object = one == other  # NumPy states contain arrays
    return bool(getattr(same, "all", lambda: same)())


_BITS, _WORD = 56, 32  # bits of a seed, and the most bits that NumPy's older generators accept at once


def _python(generator: random.Random) -> Generator:
    draw = partial(generator.getrandbits, _BITS)
    return Generator(id(generator), generator.getstate, generator.setstate, generator.seed, draw)


def _torch(generator: torch.Generator) -> Generator:
    def draw() -> int:
        place = torch.empty((), dtype=torch.int64, device=generator.device)
        return int(place.random_(0, 2**_BITS, generator=generator).item())

    return Generator(id(generator), generator.get_state, generator.set_state, generator.manual_seed, draw)


def _numpy(generator: numpy.random.Generator) -> Generator:
    bits = generator.bit_generator
    put = partial(setattr, bits, "state")

    def draw() -> int:
        return int(bits.random_raw() % 2**_BITS)

    return Generator(id(bits), lambda: bits.state, put, lambda number: put(type(bits)(number).state), draw)


def _old_numpy(generator: numpy.random.RandomState) -> Generator:
    def seed(number: int) -> None:
        from numpy.random import RandomState

        bits = type(generator._bit_generator)
        generator.set_state(RandomState(bits(number)).get_state(legacy=False))

    def draw() -> int:
        high, low = generator.randint(0, 2**31, size=2)
        return int(high) << (_BITS - _WORD) | int(low) >> (2 * _WORD - _BITS)

    return Generator(id(generator), partial(generator.get_state, legacy=False), generator.set_state, seed, draw)


def process_generators() -> list[Generator]:
    found: list[Generator] = [_python(random.random.__self__)]  # type: ignore[attr-defined]  # a bound method
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        found.append(_old_numpy(numpy_random.get_state.__self__))
    return found


def _python_marks() -> Callable[[], object]:
    """Return a function whose result changes with every number that Python's ``random`` module draws."""
    # The function runs before and after each call of a layer. A comparison of whole states takes 12 µs for Python and
    # 24 µs for NumPy each time: 75 of the 150 µs that a call may cost (`benchmarks/bench_pipeline.py`). To read the
    # position and one word of the state from memory takes 0.4 µs for both. The word changes when all words are
    # replaced. If the memory layout is not CPython's, the function returns the whole state.
    own: random.Random = random.random.__self__  # type: ignore[attr-defined]  # a bound method
    probe = random.Random(1)
    version, words, _ = probe.getstate()
    read = _two_words_at(id(probe) + object.__basicsize__)
    if (version, read[0], read[1]) != (3, words[-1], words[0]):
        return own.getstate
    memory = _two_words_at(id(own) + object.__basicsize__)
    return lambda: (memory[0], memory[1], own.gauss_next)  # type: ignore[attr-defined]  # a number kept for the next call


def _numpy_marks() -> Callable[[], object]:
    """Return a function whose result changes whenever NumPy's global random generator computes new random bits."""
    from numpy.random import MT19937, RandomState, get_state

    own: RandomState = get_state.__self__  # type: ignore[attr-defined]  # a bound method
    memory: dict[int, memoryview] = {}

    def mark() -> object:
        bits = own._bit_generator
        if type(bits) is not MT19937:
            return repr(bits.state)
        words = memory.get(id(bits))
        if words is None:
            memory.clear()
            # 624 words and the position in them
            words = memory[id(bits)] = _two_words_at(bits.ctypes.state_address + 4 * 623)
        return words[0], words[1]

    return mark


def _two_words_at(address: int) -> memoryview:
    return memoryview((ctypes.c_uint32 * 2).from_address(address)).cast("B").cast("I")


_MARKS: dict[str, Callable[[], object]] = {}


def process_marks() -> tuple[object, ...]:
    """Return values that change whenever Python's or NumPy's global random generator is used."""
    if "numpy" not in _MARKS and "numpy.random" in sys.modules:
        _MARKS["numpy"] = _numpy_marks()
    if "python" not in _MARKS:
        _MARKS["python"] = _python_marks()
    return tuple([mark() for mark in _MARKS.values()])


_OF_MODULES = frozenset(nn.Module().__dict__)


def held_generators(code: object) -> list[Generator]:
    found: dict[int, Generator] = {}
    for module in code.modules() if isinstance(code, nn.Module) else ():
        for name, value in vars(module).items():
            if name not in _OF_MODULES:
                values = value.values() if isinstance(value, dict) else value
                for one in values if isinstance(value, (dict, list, tuple)) else (value,):
                    if (generator := _as_generator(one)) is not None:
                        found[generator.key] = generator
    shared = {id(torch.default_generator), *(one.key for one in process_generators())}
    return [one for one in found.values() if one.key not in shared]


def _as_generator(value: object) -> Generator | None:
    if isinstance(value, torch.Generator):
        return _torch(value)
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else _python(value)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        if isinstance(value, numpy_random.Generator):
            return _numpy(value)
        if isinstance(value, numpy_random.RandomState):
            return _old_numpy(value)
    return None


@dataclasses.dataclass(slots=True)
class LayerTraits:
    """Observed properties of a layer in training and evaluation mode, such as whether it draws random numbers."""

    mutates_inputs: dict[bool, bool] = dataclasses.field(default_factory=dict)  # whether it writes inputs in place
    draws: dict[bool, bool] = dataclasses.field(default_factory=dict)  # whether it draws from the CPU's generator
    # generators that the layer holds, and the generators of Python and NumPy if the layer draws from them
    generators: dict[bool, tuple[Generator, ...]] = dataclasses.field(default_factory=dict)
    changes_attributes: dict[bool, bool] = dataclasses.field(default_factory=dict)  # whether forward changes attributes
    # whether the backward calls forward code again (activation checkpointing inside the layer)
    reenters: dict[bool, bool] = dataclasses.field(default_factory=dict)


_TRAITS: weakref.WeakKeyDictionary[Any, LayerTraits] = weakref.WeakKeyDictionary()


def traits_of(code: Any) -> LayerTraits:
    """Return what is known about a layer or a loss function, such as whether it draws random numbers.

    For an object that does not support weak references, such as a tuple, each call returns a new :class:`LayerTraits`.
    In this result, ``reenters`` is true, because the object may use activation checkpointing.

    >>> from torch import nn
    >>> layer = nn.Linear(1, 1)
    >>> traits_of(layer).draws[True] = False
    >>> traits_of(layer)
    LayerTraits(mutates_inputs={}, draws={True: False}, generators={}, changes_attributes={}, reenters={})
    >>> traits_of(()).reenters
    {True: True, False: True}
    """
    try:
        found = _TRAITS.get(code)
    except TypeError:
        return LayerTraits(reenters={True: True, False: True})
    return _TRAITS.setdefault(code, LayerTraits()) if found is None else found
