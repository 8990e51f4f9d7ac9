"""The plan of a cut, as plain data: the order of the calls of layers, and the model's own code between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .call_log import Tree
from .layers import Observed
from .made_caches import Entry
from .placeholder import Key


@dataclasses.dataclass(frozen=True)
class CutPlan:
    """The pieces of a cut model, in order: phase 0, calls, phase 1, calls, ... and a last phase."""

    calls: Sequence[Observed]  # calls of layers, in order
    ends: Sequence[int]  # place after the last call that each phase records. The last phase records no call.
    keep: frozenset[Key] = frozenset()  # outputs of layers that phases read
    # names of the parameters that each phase reads; `None` while they are not known
    used: Sequence[frozenset[str] | None] = ()
    # names of the embeddings that only phase 0 computes. Later phases pass their outputs to layers that have run
    # already, so a placeholder is enough there.
    embeddings: frozenset[str] = frozenset()
    # entries that each call reads of caches that the model made; `None` while they are not known
    cache_reads: Mapping[int, frozenset[Entry]] | None = None

    @property
    def phases(self) -> int:
        """The number of phases."""
        return len(self.ends)

    def is_extra(self, place: int, leaf: int) -> bool:
        """Report whether an output of a call is not the hidden state, the first output with the form of an input."""
        leaves = self.calls[place].form.leaves
        return leaf != next((i for i, like in enumerate(leaves) if isinstance(like, int) and like >= 0), None)

    def returned_others(self, results: Mapping[int, Tree]) -> bool:
        """Report whether calls returned tensors where the example had ``None``, or the other way round."""
        for place, result in results.items():
            form = self.calls[place].form
            if len(form.leaves) == len(result.leaves):
                pairs = zip(form.leaves, result.leaves, strict=True)
                if any(isinstance(like, tuple) is isinstance(leaf, Key) for like, leaf in pairs):
                    return True
        return False

    def names(self) -> list[str]:
        """Return the names of the pieces, in order.

        >>> CutPlan([], [0, 0]).names()
        ['phase 0', 'phase 1']
        """
        found: list[str] = []
        start = 0
        for phase, end in enumerate(self.ends):
            found.append(f"phase {phase}")
            found += [call.layer for call in self.calls[start:end]]
            start = max(start, end)
        return found
