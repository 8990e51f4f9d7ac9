"""A cache that the library of a file writes in place: a step changes it, and nothing of it is copied.

.. code-block:: text

    returned    past (7 tokens) ──> call ──> present (8 tokens)      all of it is written again for each token
    in place    [ 0 ... 6 | 7 ]  ──> call                            the new token is written after the others
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import GenerationError


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
        """Remove the last tokens of buffers that are written in place."""
        raise NotImplementedError

    def select_rows(self, rows: torch.Tensor) -> None:
        """Select rows of buffers that are written in place."""
        # rows: for each new row the place of an old one
        raise NotImplementedError

    def grown(self, tokens: int) -> None:
        """Note that a call has read tokens, and written theirs after the others."""
        raise NotImplementedError


def new_tokens(feeds: Mapping[str, torch.Tensor]) -> int:
    """Return how many tokens a step reads."""
    return int(feeds["input_ids" if "input_ids" in feeds else "inputs_embeds"].shape[1])


# A cache in tensors that are longer than the text, in which compiled code writes the new tokens.


_LEAST = 256  # tokens


class TensorBuffers(InPlaceCache):
    """A cache by name of the input: buffers of shape (rows, heads, capacity, size), and tensors that calls return."""

    # values: all leaves; those that are written in place hold equally many tokens
    # presents: see `InPlaceCache`

    def __init__(self, values: Mapping[str, torch.Tensor], presents: Mapping[str, str]) -> None:
        super().__init__(values, presents)
        if len({values[name].shape[2] for name in presents}) > 1:  # one number of tokens is for all of them
            raise GenerationError("layers of the cache hold different numbers of tokens.")
        self._seen = self._capacity = values[next(iter(presents))].shape[2]
        self._own = False  # what was handed over belongs to the caller, and is not written to
        self._note_shapes()

    def _note_shapes(self) -> None:
        self.shapes = {name: (*self[name].shape[:2], self._seen, *self[name].shape[3:]) for name in self.presents}

    @property
    def seen(self) -> int:
        """How many tokens each buffer holds."""
        return self._seen

    def reserve(self, new: int) -> None:
        """Have memory for a step."""
        total = self._seen + new
        # the trace assumes that there is room for more: a slice of all of it would be no slice
        if self._own and total < self._capacity:
            return
        self._capacity = self._room(total)
        self._move({name: self[name] for name in self.presents})

    def _room(self, total: int) -> int:
        """For how many tokens to take memory, where there are so many and at least one more."""
        return max(2 * total, _LEAST)

    def _move(self, leaves: Mapping[str, torch.Tensor]) -> None:
        """Take new memory that begins with these tokens; zeros take none before something is written."""
        for name, leaf in leaves.items():
            rows, heads, _, *size = leaf.shape
            self[name] = leaf.new_zeros(rows, heads, self._capacity, *size)
            self[name][:, :, : self._seen] = leaf[:, :, : self._seen]
        self._own = True

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the tokens that are there."""
        return {name: self[name][:, :, : self._seen].clone() for name in self.presents}

    def grown(self, tokens: int) -> None:
        """Note that a call has written tokens."""
        self._seen += tokens
        self._note_shapes()

    def crop(self, kept: int) -> None:
        """Take out the last tokens: what lies after the others is written again."""
        self._seen = kept
        self._note_shapes()

    def select_rows(self, rows: torch.Tensor) -> None:
        """Select rows; the memory is reused if their number stays."""
        for name in self.presents:
            found = self[name][:, :, : self._seen][rows]
            if self._own and len(rows) == len(self[name]):
                self[name][:, :, : self._seen] = found
            else:
                self._move({name: found})
        self._note_shapes()
