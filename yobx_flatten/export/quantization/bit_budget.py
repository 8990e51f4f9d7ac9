"""Choose how many bits each matrix gets, so that a quantised file predicts a text nearly as well as the model.

.. code-block:: text

    all in 4 bits ── within the ratio? ── yes ──> done
          │ no, or less than 19 of 20 greedy tokens are the model's: the head in 8 bits
    one role after the other in 8 bits: what does each bring, for each byte?
          │
    the head, then the best role, then the next ... ── within the ratio? ── yes ──> done
          │ all are in 8 bits
    the same from 8 bits to float, for less than half of the weights

A role is what all layers have once: ``model.layers.*.mlp.down_proj``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping

from ...errors.log import STEP
from ..proof.quality import Quality

logger = logging.getLogger("yobx_flatten")

Bits = Mapping[str, int]
"""By role: bits of its matrices, 32 for those that stay as they are."""

_WIDER = {4: 8, 8: 32}


@dataclasses.dataclass(frozen=True)
class Role:
    """Matrices that do the same in each layer."""

    name: str  # their common name
    count: int  # how many there are
    size: int  # number of their weights
    is_last: bool  # whether the last product of the graph is among them: the head
    # bits of the integers that they are made of, with which nothing is lost; 32, the default, without any
    exact: int = 32


class Budget:
    """Finds the bits of each role."""

    def __init__(self, roles: Mapping[str, Role], bits: int, measure: Callable[[Bits], Quality]) -> None:
        self._roles, self._first, self._measure = roles, bits, measure

    def find(self) -> tuple[Bits, Quality]:
        """Return the first bits that are within the ratio, and what was measured; else the last that were tried."""
        bits: dict[str, int] = dict.fromkeys(self._roles, self._first)
        width = self._first
        heads = [role.name for role in self._roles.values() if role.is_last and role.exact > width]
        wide = {name: _WIDER[width] for name in heads if width in _WIDER}
        if self._is_exact({**bits, **wide}):
            bits |= wide
        quality = self._measure(bits)
        if width == 4 and bits != {**bits, **wide} and quality.is_close and quality.chooses_others:
            bits |= wide
            quality = self._measure(bits)
        while not self._is_enough(quality, width) and math.isfinite(quality.max_difference):
            if width not in _WIDER:
                break
            for name in self._order(bits, _WIDER[width], _badness(quality)):
                if bits[name] >= _WIDER[width]:
                    continue
                wider = {**bits, name: _WIDER[width]}
                if self._full(wider) > 0.5:  # such a file is not a quantised one
                    continue
                bits = wider
                quality = self._measure(bits)
                if self._is_enough(quality, width):
                    break
            width = _WIDER[width]
        return bits, quality

    def _is_exact(self, bits: Bits) -> bool:
        """Whether all matrices are integers of so many bits or fewer: with these nothing is lost."""
        return all(role.exact <= bits[name] <= 8 for name, role in self._roles.items())

    @staticmethod
    def _is_enough(quality: Quality, width: int) -> bool:
        """From 4 bits on also by what the model would write; float costs too much for that."""
        return quality.is_close if width == 4 else quality.ok

    def _full(self, bits: Bits) -> float:
        """The share of weights that stay in float."""
        sizes = {name: role.size for name, role in self._roles.items()}
        return sum(size for name, size in sizes.items() if bits[name] == 32) / sum(sizes.values())

    def _order(self, bits: Bits, wider: int, before: float) -> Iterator[str]:
        """The head, then the roles by what more bits bring for each byte."""
        lossy = [role for role in self._roles.values() if role.exact > bits[role.name]]
        rest = [role for role in lossy if not role.is_last]
        yield from (role.name for role in lossy if role.is_last)
        gains = {}
        for role in rest if len(rest) > 1 else ():
            logger.info("measuring %s in %d bits", role.name, wider, extra=STEP)
            gains[role.name] = (before - _badness(self._measure({**bits, role.name: wider}))) / role.size
        yield from sorted((role.name for role in rest), key=lambda name: gains.get(name, 0.0), reverse=True)


def _badness(quality: Quality) -> float:
    if quality.text_divergence is not None:
        return quality.text_divergence
    ratio = quality.perplexity_ratio
    return quality.relative_difference**2 if ratio is None else math.log(ratio)
