"""Let a file read a text from its first token, with an empty cache, where a call has that token in its cache.

A first token has inputs a hundred times as large as those of any other in many models, and all later ones look at it:
what rounding does to it decides the file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from ...errors import ReplayError
from ...runners.ports import CacheSlot
from ...runners.runner import Runner
from ..proof.quality import SCORES

logger = logging.getLogger("yobx_flatten")


def from_the_start(
    feeds: Mapping[str, torch.Tensor], slots: Sequence[CacheSlot], tokens: torch.Tensor
) -> dict[str, torch.Tensor] | None:
    """Return the inputs that read all tokens; ``None`` where these are not only tokens, a mask and keys and values."""
    # feeds: inputs by name, with the first token in the cache
    # tokens: the text, int64 of shape (rows, length)
    if not slots and "input_ids" in feeds and feeds["input_ids"].shape == tokens.shape:  # an encoder reads all at once
        return dict(feeds)
    found = {slot.port.name: slot.port for slot in slots}
    others = {name for name in feeds if name not in found}
    if "input_ids" not in others or not others <= {"input_ids", "attention_mask", "position_ids"}:
        return None
    made = {name: feeds[name] for name in others} | {"input_ids": tokens}
    for name, port in found.items():
        if not name.endswith((".key", ".value")) or name not in feeds:
            return None
        axes = [axis for axis, size in enumerate(port.shape) if axis and size is None]
        if len(axes) != 1 or feeds[name].shape[axes[0]] != 1:
            return None
        made[name] = feeds[name].narrow(axes[0], 0, 0).contiguous()
    if "attention_mask" in made and made["attention_mask"].shape != tokens.shape:
        return None
    if "position_ids" in made:
        positions = made["position_ids"]
        if positions.shape != (len(tokens), tokens.shape[1] - 1):
            return None
        made["position_ids"] = torch.cat([positions[:, :1] - 1, positions], 1)
    return made


def text_scores(runner: Runner, feeds: Mapping[str, torch.Tensor], tokens: torch.Tensor | None) -> torch.Tensor:
    """Return the scores of a file for all tokens of a text but the first, which it also reads itself where it can."""
    # feeds: inputs by name, with the first token in the cache, as the model has read it
    # tokens: the text; `None` where only the inputs are known
    given = {name: feeds[name] for name in runner.ports}
    whole = None
    if tokens is not None and runner.runtime == "onnxruntime":  # files of others do not take an empty cache
        whole = from_the_start(given, runner.slots, tokens)
    found: torch.Tensor
    if whole is not None:
        try:
            found = runner.run(whole)[SCORES][:, 1:]
            return found
        except ReplayError:
            logger.debug("%s takes no empty cache", runner.name)
    found = runner.run(given)[SCORES]
    return found
