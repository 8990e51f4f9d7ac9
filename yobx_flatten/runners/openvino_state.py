"""A cache that is the state of an OpenVINO model, which the model writes in place.

.. code-block:: text

    step      input_ids, attention_mask, beam_idx ──> model ──> logits       beam_idx: for each row, the row of the
                                          keys, values ─┴─ written in place            state that it continues
    rewind    state ──> tensors ──> cut ──> state                            a copy, since the state has its own length

A request has all of its state set, or all of it reset: OpenVINO 2026.4 ends the process where one part was set alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .in_place import InPlaceCache

BEAMS = "beam_idx"
"""The input that states which row of the state each row continues, as OpenVINO's own tools name it."""


def variable_of(name: str, present: str) -> str:
    """Return the name of the part of the state that takes the place of an input and an output."""
    return name + present


class StateCache(InPlaceCache):
    """A cache by name of the input: parts of the state of a request, and tensors for what calls return."""

    # request: an `openvino.InferRequest` of its own
    # values: all leaves, as tensors
    # presents: for each leaf that is in the state, the name of the output that it would be

    def __init__(self, request: Any, values: Mapping[str, torch.Tensor], presents: Mapping[str, str]) -> None:
        parts = {state.name: state for state in request.query_state()}
        self._parts = {name: parts[variable_of(name, present)] for name, present in presents.items()}
        super().__init__({**values, **self._parts}, presents)
        self.request = request
        self._write({name: values[name] for name in presents})

    def _write(self, leaves: Mapping[str, torch.Tensor]) -> None:
        import openvino

        self.shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        self.rows = torch.arange(len(next(iter(leaves.values()))), dtype=torch.int32)
        if not any(leaf.numel() for leaf in leaves.values()):  # a state of no tokens cannot be set
            self.request.reset_state()
            return
        for name, leaf in leaves.items():
            self._parts[name].state = openvino.Tensor(leaf.contiguous().numpy())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of what is in the state, by name of the input."""
        found = {}
        for name, shape in self.shapes.items():
            if 0 in shape:
                kept = torch.from_numpy(self._parts[name].state.data)
                found[name] = torch.zeros(shape, dtype=kept.dtype)
            else:
                found[name] = torch.from_numpy(self._parts[name].state.data)[self.rows.long()]
        return found

    def grown(self, tokens: int) -> None:
        """Note that a call has read tokens, by which its state is longer now."""
        shapes = self.shapes.items()
        self.shapes = {name: (len(self.rows), heads, seen + tokens, *size) for name, (_, heads, seen, *size) in shapes}
        self.rows = torch.arange(len(self.rows), dtype=torch.int32)

    def crop(self, kept: int) -> None:
        """Take out the last tokens."""
        self._write({name: leaf[:, :, :kept] for name, leaf in self.tensors().items()})

    def select_rows(self, rows: torch.Tensor) -> None:
        """Have other rows: as many are the choice of the next call, and the state stays where it is."""
        # rows: for each new row the place of an old one
        if len(rows) == len(self.rows):
            self.rows = self.rows[rows]
            self.shapes = {name: (len(rows), *shape[1:]) for name, shape in self.shapes.items()}
        else:
            self._write({name: leaf[rows] for name, leaf in self.tensors().items()})
