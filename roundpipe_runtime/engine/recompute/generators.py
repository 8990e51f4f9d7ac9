"""Random generators besides torch's default one: NumPy's, Python's, and those that layers hold."""

from __future__ import annotations

import ctypes
import dataclasses
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

if TYPE_CHECKING:
    import numpy


class Generator(Protocol):
    """A generator whose state can be read and written."""

    key: int

    def get(self) -> object:
        """Return its state."""

    def set(self, state: object) -> None:
        """Set its state."""

    def seed(self, number: int) -> None:
        """Start it anew."""

    def draw(self) -> int:
        """Return a number of up to 56 bits, and move on."""


def is_same(one: object, other: object) -> bool:
    """Report whether two states of a generator are the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    same: object = one == other  # of arrays of NumPy, an array
    return bool(getattr(same, "all", lambda: same)())


# Bits of a seed, and the most that NumPy's older generators take at a time.
_BITS, _WORD = 56, 32


class _Python:
    """``random.Random``, also the one that the functions of the module use."""

    def __init__(self, generator: random.Random) -> None:
        self._generator, self.key = generator, id(generator)

    def get(self) -> object:
        return self._generator.getstate()

    def set(self, state: object) -> None:
        self._generator.setstate(state)  # type: ignore[arg-type]  # what `get` returned

    def seed(self, number: int) -> None:
        self._generator.seed(number)

    def draw(self) -> int:
        return self._generator.getrandbits(_BITS)


class _Torch:
    """``torch.Generator``."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self.key = generator, id(generator)

    def get(self) -> object:
        return self._generator.get_state()

    def set(self, state: object) -> None:
        assert isinstance(state, torch.Tensor)
        self._generator.set_state(state)

    def seed(self, number: int) -> None:
        self._generator.manual_seed(number)

    def draw(self) -> int:
        place = torch.empty((), dtype=torch.int64, device=self._generator.device)
        return int(place.random_(0, 2**_BITS, generator=self._generator).item())


class _NumPy:
    """``numpy.random.Generator``."""

    def __init__(self, generator: numpy.random.Generator) -> None:
        self._bits, self.key = generator.bit_generator, id(generator.bit_generator)

    def get(self) -> object:
        return self._bits.state

    def set(self, state: object) -> None:
        self._bits.state = cast(Mapping[str, Any], state)

    def seed(self, number: int) -> None:
        self._bits.state = type(self._bits)(number).state

    def draw(self) -> int:
        return int(self._bits.random_raw() % 2**_BITS)


class _OldNumPy:
    """``numpy.random.RandomState``, also the one that the functions of the module use."""

    def __init__(self, generator: numpy.random.RandomState) -> None:
        self._generator, self.key = generator, id(generator)

    def get(self) -> object:
        return self._generator.get_state(legacy=False)

    def set(self, state: object) -> None:
        self._generator.set_state(state)  # type: ignore[arg-type]  # what `get` returned

    def seed(self, number: int) -> None:
        from numpy.random import RandomState

        bits = type(self._generator._bit_generator)
        self.set(RandomState(bits(number)).get_state(legacy=False))

    def draw(self) -> int:
        high, low = self._generator.randint(0, 2**31, size=2)
        return int(high) << (_BITS - _WORD) | int(low) >> (2 * _WORD - _BITS)


# -- those of the process ----------------------------------------------------------------------------------------------


def process_generators() -> list[Generator]:
    """Return the generators that all code of the process shares, but for torch's."""
    found: list[Generator] = [_Python(random.random.__self__)]  # type: ignore[attr-defined]  # a bound method
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        found.append(_OldNumPy(numpy_random.get_state.__self__))
    return found


def _python_marks() -> Callable[[], object]:
    """Return a function whose result changes with each number that is drawn from Python's generator.

    This is asked before and after each call of a layer. To read and compare the states takes 12 µs for Python's and 24
    for NumPy's each time, 75 µs of the 150 that a call may cost (`benchmarks/bench_pipeline.py`); this takes 0.4 µs for
    both. So one word of its memory is read, next to the index in it, which also changes when all words are replaced;
    where the memory is not as CPython has it, the state.
    """
    own: random.Random = random.random.__self__  # type: ignore[attr-defined]  # a bound method
    probe = random.Random(1)
    version, words, _ = probe.getstate()
    read = _words_at(id(probe) + object.__basicsize__, 2)
    if (version, read[0], read[1]) != (3, words[-1], words[0]):
        return own.getstate
    memory = _words_at(id(own) + object.__basicsize__, 2)
    return lambda: (memory[0], memory[1], own.gauss_next)  # type: ignore[attr-defined]  # a number kept for the next call


def _numpy_marks() -> Callable[[], object]:
    """Return a function whose result changes with each word that is drawn from NumPy's generator."""
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
            words = memory[id(bits)] = _words_at(bits.ctypes.state_address + 4 * 623, 2)
        return words[0], words[1]

    return mark


def _words_at(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_uint32 * count).from_address(address)).cast("B").cast("I")


_MARKS: dict[str, Callable[[], object]] = {}


def process_marks() -> tuple[object, ...]:
    """Return marks of the process's generators; they differ later if a generator was used."""
    if "numpy" not in _MARKS and "numpy.random" in sys.modules:
        _MARKS["numpy"] = _numpy_marks()
    if "python" not in _MARKS:
        _MARKS["python"] = _python_marks()
    return tuple([mark() for mark in _MARKS.values()])


# -- those of layers ---------------------------------------------------------------------------------------------------

_OF_MODULES = frozenset(nn.Module().__dict__)


def held_generators(code: object) -> list[Generator]:
    """Return the generators that stand on a layer or its submodules: as attributes, or in a list or dict that does."""
    found: dict[int, Generator] = {}
    for module in code.modules() if isinstance(code, nn.Module) else ():
        for name, value in vars(module).items():
            if name not in _OF_MODULES:
                for one in _values(value):
                    generator = _as_generator(one)
                    if generator is not None:
                        found[generator.key] = generator
    for one in process_generators():
        found.pop(one.key, None)
    return [one for one in found.values() if one.key != id(torch.default_generator)]


def _values(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


def _as_generator(value: object) -> Generator | None:
    if isinstance(value, torch.Generator):
        return _Torch(value)
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else _Python(value)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        if isinstance(value, numpy_random.Generator):
            return _NumPy(value)
        if isinstance(value, numpy_random.RandomState):
            return _OldNumPy(value)
    return None


# Traits of layers and loss functions that the engine observes, one record each.


@dataclasses.dataclass(slots=True)
class LayerTraits:
    """Observed behaviour of the code of a layer; each entry is missing until a call has shown it."""

    # whether it writes its inputs in place, by mode (`module.training`). Default: nothing known.
    mutates_inputs: dict[bool, bool] = dataclasses.field(default_factory=dict)
    # whether it draws random numbers of the CPU's generator, by mode. Default: nothing known.
    draws: dict[bool, bool] = dataclasses.field(default_factory=dict)
    # generators other than torch's default ones that it draws from, and those it holds, by mode. Default: nothing
    # known.
    generators: dict[bool, tuple[Generator, ...]] = dataclasses.field(default_factory=dict)
    # whether its forward changes its Python attributes, by mode. Default: nothing known.
    changes_attributes: dict[bool, bool] = dataclasses.field(default_factory=dict)
    # whether its backward calls forward code again (activation checkpointing inside the layer), by mode. Default:
    # nothing known.
    reenters: dict[bool, bool] = dataclasses.field(default_factory=dict)


_TRAITS: weakref.WeakKeyDictionary[Any, LayerTraits] = weakref.WeakKeyDictionary()


def traits_of(code: Any) -> LayerTraits:
    """Return the record of a layer or a loss function, the same one at each call.

    An object that cannot be referenced weakly (one with slots, for example) has no lasting record: it is treated with
    every caution at each call.

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
