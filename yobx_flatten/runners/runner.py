"""The protocol of an opened file or program: inputs and outputs by name.

A library that runs exported models is one file in this folder with a class of this protocol. Replays
(:mod:`yobx_flatten.export.proof.exported_call`), stored cases (:mod:`yobx_flatten.storage.replay`) and the generation
loop (:mod:`yobx_flatten.generate.generator`) run whatever has it.

.. code-block:: text

    run    {input_ids, past_key_values.0.key, ...} ──> {logits, present.0.key, ...}            tensors
    step   {input_ids, ...}, cache ──> {logits, ...}, cache for the next step                  the library's own memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from .ports import CacheSlot, Port


class Runner(Protocol):
    """One exported file or program, open."""

    runtime: ClassVar[str]  # name of the library that runs it, for reports
    name: str  # the name of the file or program, for messages

    @property
    def ports(self) -> Mapping[str, Port]: ...  # noqa: D102 # see the class

    @property
    def outputs(self) -> Sequence[str]: ...  # noqa: D102 # see the class

    @property
    def slots(self) -> Sequence[CacheSlot]: ...  # noqa: D102 # see the class

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one call."""
        # inputs: one value for every input: a tensor, an array, a number or a text. Other entries are left out.
        ...

    def cache(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return a cache for :meth:`step`."""
        ...

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any], *, last_scores: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Run one call of a loop."""
        # last_scores: whether the scores of the last token are enough, which some files return in less time; `False`,
        # the default, for those of all tokens
        # returns: the outputs that are not part of the cache, and the cache for the next step. The tensors of `cache`
        # that have a successor are released as soon as nothing else holds them.
        ...

    def select_rows(self, cache: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
        """Return the cache whose rows are those of another, as a beam search needs it."""
        # cache: what `cache` or `step` returned; it may not be used any more
        # rows: for each new row the place of an old one, int64; there may be more or fewer than before
        ...
