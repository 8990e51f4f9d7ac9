"""Find the outputs that belong to padding, where a model may compute anything.

A row that sees no position at all is a softmax over nothing. Each implementation fills it as it likes, and no other
position reads the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...private_names.of_torch import pytree
from ...recipe.aliases import PyTree

# what a decoder reads, and the mask over it and what is in the cache; the first pair whose tokens are there counts
_READS = (
    ("decoder_input_ids", "decoder_attention_mask"),
    ("decoder_inputs_embeds", "decoder_attention_mask"),
    ("input_ids", "attention_mask"),
    ("inputs_embeds", "attention_mask"),
)


class Padding:
    """The padded positions of a loop of calls, without those of a cache that the caller passed."""

    def __init__(self) -> None:
        self._new: torch.Tensor | None = None
        self._all: torch.Tensor | None = None
        self.left_out: list[str] = []

    def next_call(self, inputs: Mapping[str, Any]) -> None:
        """Read the mask of the next call of the loop."""
        before, self._new, self._all = self._all, None, None
        read = next((pair for pair in _READS if isinstance(inputs.get(pair[0]), torch.Tensor)), None)
        if read is None:
            return
        tokens, mask = inputs[read[0]], inputs.get(read[1])
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.dtype.is_floating_point:
            return
        new = tokens.shape[1]
        hidden = mask == 0
        if mask.shape[0] != tokens.shape[0] or mask.shape[1] < new or not new:
            return
        past = mask.shape[1] - new
        known = before if before is not None and before.shape[1] == past else hidden.new_zeros(len(hidden), past)
        everything = torch.cat([known & hidden[:, :past], hidden[:, past:]], dim=1)
        if bool(everything.any()):
            self._new, self._all = everything[:, past:], everything

    def blank(self, name: str, value: Any) -> Any:
        """Return an output with zeros at the positions of padding; the same object where it has none."""
        hidden, axis = self._hidden(name, value)
        if hidden is None or not bool(hidden.any()):
            return value
        if name not in self.left_out:
            self.left_out.append(name)
        shape = [1] * value.dim()
        shape[0], shape[axis] = hidden.shape
        zero = torch.zeros((), dtype=value.dtype, device=value.device)
        return torch.where(hidden.to(value.device).reshape(shape), zero, value)

    def blank_leaves(self, tree: PyTree, names: Sequence[str]) -> PyTree:
        """Return nested outputs with zeros at the positions of padding."""
        # names: one for each leaf; outputs of another number of leaves are returned as they are
        leaves, spec = pytree.tree_flatten(tree)
        if self._all is None or len(leaves) != len(names):
            return tree
        return pytree.tree_unflatten([self.blank(*row) for row in zip(names, leaves, strict=True)], spec)

    def kept_leaves(self, tree: PyTree, names: Sequence[str]) -> list[Any]:
        """Return the leaves of nested outputs without positions of padding: what is compared, without its shape."""
        return [self._kept(*row) for row in zip(names, pytree.tree_leaves(tree), strict=True)]

    def _kept(self, name: str, value: Any) -> Any:
        hidden, axis = self._hidden(name, value)
        if hidden is None:
            return value
        return value.movedim(axis, 1)[~hidden.to(value.device)]

    def _hidden(self, name: str, value: object) -> tuple[torch.Tensor | None, int]:
        """The padded positions, as (batch, positions), and the axis of the positions."""
        if self._new is None or self._all is None or not isinstance(value, torch.Tensor):
            return None, 0
        if value.dim() == 3 and value.shape[:2] == self._new.shape:
            return self._new, 1
        if name.startswith("present.") and name.endswith((".key", ".value")) and ".encoder." not in name:
            rows, length = self._all.shape
            if value.dim() == 4 and value.shape[0] == rows:
                kept = value.shape[2]
                if kept <= length:  # a layer that slides keeps the last ones
                    return self._all[:, length - kept :], 2
                unused = self._all.new_zeros(rows, kept - length)  # of a static cache
                return torch.cat([self._all, unused], dim=1), 2
        return None, 0
