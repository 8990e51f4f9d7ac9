"""Replay a file whose cache stays in one piece of memory: calls as the file takes them, and a run in such memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree

from ..runners.onnx_runner import OnnxRunner
from .replay import Case

__all__ = ["InSharedMemory", "fitting"]


class InSharedMemory(OnnxRunner):
    """A file whose calls are run as a generation loop runs them, with memory for more tokens than there are."""

    runtime: ClassVar[str] = f"{OnnxRunner.runtime}, shared cache"

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one call; see :meth:`.runner.Runner.run`. Keys and values are returned as long as they are filled."""
        slots = {slot.port.name: slot.present for slot in self.slots}
        given = {name: inputs[name] for name in self.ports}
        feeds = {name: value for name, value in given.items() if name not in slots}
        outputs, cache = self.step(feeds, self.cache({name: given[name] for name in slots}))
        total = given["attention_mask"].shape[1]
        filled = {}
        for name, present in slots.items():
            value = torch.from_numpy(cache[name].numpy())
            filled[present] = value[:, :, :total].clone() if name in self.shared else value
        return {**outputs, **filled}


def fitting(case: Case, *, any_rows: bool = True) -> Case:
    """Return a case as ``GroupQueryAttention`` takes it: several tokens after others are those of one row.

    Args:
        case: a decode call with ``input_ids`` or ``inputs_embeds``, and ``attention_mask``; others are returned as
            they are.
        any_rows: whether the file takes any number of rows; if not, one token is left of several.
    """
    name = next((name for name in ("input_ids", "inputs_embeds") if case.kwargs.get(name) is not None), "")
    tokens, mask = case.kwargs.get(name), case.kwargs.get("attention_mask")
    if not isinstance(tokens, torch.Tensor) or not isinstance(mask, torch.Tensor) or tokens.dim() < 2:
        return case
    batch, new = tokens.shape[:2]
    past = mask.shape[1] - new
    if batch == 1 or new == 1:
        return case
    if not past:
        return dataclasses.replace(case, steps=1)  # its second step would be several tokens after others
    if any_rows:
        kwargs = pytree.tree_map_only(
            torch.Tensor, lambda leaf: leaf[:1].clone() if leaf.dim() and leaf.shape[0] == batch else leaf, case.kwargs
        )
        return dataclasses.replace(case, name=f"{case.name}, one row", kwargs=kwargs)
    kwargs = {**case.kwargs, name: tokens[:, :1], "attention_mask": mask[:, : past + 1]}
    if isinstance(case.kwargs.get("position_ids"), torch.Tensor):
        kwargs["position_ids"] = case.kwargs["position_ids"][:, :1]
    return dataclasses.replace(case, name=f"{case.name}, one token", kwargs=kwargs)
