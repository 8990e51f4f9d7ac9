"""Beam search: keep the best continuations of each row after every token.

.. code-block:: text

    row 0   beam 0 ─┬─ a ──> beam 0     candidates of all beams of a row, by the sum of their log-probabilities;
            beam 1 ─┼─ b ──> ended      one that ends is put aside, by its sum over length ** length_penalty
                    └─ c ──> beam 1     the cache of beam 1 is now that of whichever beam c continues

The sums, the order of equal ones and the end of the search are those of transformers' ``_beam_search``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch

from ..errors import GenerationError, InvalidArgumentError, describe_class

_NEVER = -1e9  # of a sum: chosen after all others


@dataclasses.dataclass(frozen=True)
class BeamSettings:
    """How many continuations of a row are kept, and when they are good enough; by default the likeliest token."""

    num_beams: int = 1  # continuations per row
    # exponent of the length by which the sum of log-probabilities is divided: above 0 longer sequences are preferred
    length_penalty: float = 1.0
    # `True` ends a row when it has `num_beams` that ended; `False` when none of the same length could be better;
    # `"never"` when none of any length could
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1  # sequences returned per row, the best first

    def __post_init__(self) -> None:
        for name in ("num_beams", "num_return_sequences"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidArgumentError(f"{name} must be an int of 1 or more, found {describe_class(value)}.")
        if self.num_return_sequences > self.num_beams:
            raise InvalidArgumentError(
                f"num_return_sequences={self.num_return_sequences} is more than num_beams={self.num_beams}, the "
                f"sequences that the search keeps. Pass num_beams={self.num_return_sequences} or more."
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidArgumentError(
                f'early_stopping must be True, False or "never", found {describe_class(self.early_stopping)}.'
            )


def beams_of(generation: Mapping[str, Any]) -> BeamSettings:
    """Return what a search keeps by ``generation_config.json``."""
    names = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    try:
        return BeamSettings(**given)
    except InvalidArgumentError as error:
        raise GenerationError(f"generation_config.json: {error}") from error


class BeamSearch:
    """The beams of all rows."""

    # prompt: tokens, int64 of shape (batch, length)

    def __init__(
        self, prompt: torch.Tensor, settings: BeamSettings, longest: int, ends: tuple[int, ...], fill: int
    ) -> None:
        batch, self._start = prompt.shape
        beams = settings.num_beams
        self._settings, self._longest, self._length = settings, longest, self._start
        self._ends = torch.tensor(ends, dtype=torch.int64)
        # as many as there would be if all beams ended at once, and `beams` more that continue
        self._kept = max(2, 1 + len(ends)) * beams
        self._running = torch.full((batch, beams, longest), fill)
        self._running[:, :, : self._start] = prompt[:, None]
        self._sums = torch.zeros(batch, beams)
        self._sums[:, 1:] = _NEVER  # beams are equal at first: only one of them counts
        self._best = self._running.clone()
        self._scores = torch.full((batch, beams), _NEVER)
        self._lengths = torch.zeros(batch, beams, dtype=torch.int64)
        self._ended = torch.zeros(batch, beams, dtype=torch.bool)
        self._improvable = torch.ones(batch, 1, dtype=torch.bool)
        self.done = False

    @property
    def tokens(self) -> torch.Tensor:
        """The beams that continue, int64 of shape (batch * num_beams, length so far)."""
        return self._running[:, :, : self._length].flatten(0, 1)

    @property
    def sequences(self) -> torch.Tensor:
        """The best sequences, int64 of shape (batch * num_return_sequences, length of the longest)."""
        wanted = self._settings.num_return_sequences
        length = self._start + int(self._lengths[:, :wanted].max())
        return self._best[:, :wanted, :length].flatten(0, 1)

    def step(self, scores: torch.Tensor) -> torch.Tensor:
        """Continue every beam by one token."""
        # scores: log-probabilities, float32 of shape (batch * num_beams, vocabulary)
        # returns: for each beam that continues, the place of the one it continues, int64 of shape (batch * num_beams)
        batch, beams, _ = self._running.shape
        vocabulary = scores.shape[-1]
        sums = (scores.view(batch, beams, vocabulary) + self._sums[:, :, None]).flatten(1)
        sums, places = sums.topk(self._kept)
        before, token = places // vocabulary, places % vocabulary
        candidates = _take(self._running, before)
        candidates[:, :, self._length] = token
        self._length += 1
        ends = torch.isin(token, self._ends) | (self._length >= self._longest)
        going = sums + ends * _NEVER
        order = going.topk(beams).indices
        self._running, self._sums = _take(candidates, order), _take(going, order)
        self._put_aside(candidates, sums, ends)
        self.done = self._is_done(bool(ends.all()))
        return (before.gather(1, order) + torch.arange(batch)[:, None] * beams).flatten()

    def _put_aside(self, candidates: torch.Tensor, sums: torch.Tensor, ends: torch.Tensor) -> None:
        """Keep the best of those that have ended, of a row's ``num_beams`` best candidates only."""
        beams, new = self._settings.num_beams, self._length - self._start
        ends = ends & (torch.arange(self._kept) < beams)
        full = self._ended.all(-1, keepdim=True) & (self._settings.early_stopping is True)
        scores = sums / new**self._settings.length_penalty
        scores = scores + full * _NEVER + ~self._improvable * _NEVER + ~ends * _NEVER
        scores = torch.cat([self._scores, scores], 1)
        places = scores.topk(beams).indices
        self._scores = _take(scores, places)
        self._best = _take(torch.cat([self._best, candidates], 1), places)
        self._lengths = _take(torch.cat([self._lengths, torch.full_like(ends, new, dtype=torch.int64)], 1), places)
        self._ended = _take(torch.cat([self._ended, ends], 1), places)

    def _is_done(self, all_end: bool) -> bool:
        penalty, early = self._settings.length_penalty, self._settings.early_stopping
        # with a reward for length, the best that a beam can become is as long as the longest
        length = (self._longest if early == "never" and penalty > 0 else self._length) - self._start
        possible = self._sums[:, :1] / length**penalty
        worst = torch.where(self._ended, self._scores.min(1, keepdim=True).values, _NEVER)
        self._improvable = self._improvable & (possible > worst).any(-1, keepdim=True)
        return all_end or not bool(self._improvable.any()) or (early is True and bool(self._ended.all()))


def _take(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Select values of shape (batch, beams, ...) at places of shape (batch, chosen), row by row."""
    rows = torch.arange(len(values))[:, None]
    return values[rows, places]
