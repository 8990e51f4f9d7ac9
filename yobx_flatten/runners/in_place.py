"""A cache that the library of a file writes in place: a step changes it, and nothing of it is copied.

.. code-block:: text

    returned    past (7 tokens) ──> call ──> present (8 tokens)      all of it is written again for each token
    in place    [ 0 ... 6 | 7 ]  ──> call                            the new token is written after the others
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class InPlaceCache(dict[str, Any]):
    """A cache by name of the input, in values of the library. A step changes it: earlier states are gone."""

    # presents: for each input that is written in place, the name of the output that it would be

    def __init__(self, values: Mapping[str, Any], presents: Mapping[str, str]) -> None:
        super().__init__(values)
        self.presents = presents
        self.shapes: Mapping[str, tuple[int, ...]] = {}  # of what is filled, by name of the input

    @property
    def others(self) -> dict[str, Any]:
        """The leaves that calls return, as those of other caches."""
        return {name: value for name, value in self.items() if name not in self.presents}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of what is written in place and filled; none where its values are read as others are."""
        return {}

    def crop(self, kept: int) -> None:
        """Take out the last tokens of what is written in place."""
        raise NotImplementedError

    def select_rows(self, rows: torch.Tensor) -> None:
        """Have other rows of what is written in place."""
        # rows: for each new row the place of an old one
        raise NotImplementedError

    def grown(self, tokens: int) -> None:
        """Note that a call has read tokens, and written theirs after the others."""
        raise NotImplementedError


def new_tokens(feeds: Mapping[str, torch.Tensor]) -> int:
    """Return how many tokens a step reads."""
    return int(feeds["input_ids" if "input_ids" in feeds else "inputs_embeds"].shape[1])
