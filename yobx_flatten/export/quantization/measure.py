"""Measure how far a quantised file is from the model: on the replayed cases, and on a text."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ...errors import ReplayError
from ...errors.log import STEP
from ...private_names.of_torch import pytree
from ...runners.ports import CacheSlot
from ...runners.runner import Runner
from ..proof.eager_runs import Texts, eager_steps
from ..proof.exported_call import ByName
from ..proof.padding import Padding
from ..proof.quality import SCORES, Distance, Quality, text_losses
from ..proof.replay import side_by_side
from ..source import Source
from .options import Quantization
from .text_cases import text_cases

_SCORES = 2**25
"""Numbers of scores that are kept for the divergence."""


# Let a file read a text from its first token, with an empty cache, where a call has that token in its cache.


logger = logging.getLogger("yobx_flatten")


def measure(
    runner: Runner,
    quantization: Quantization,
    source: Source,
    *,
    block_size: int,
    known: list[Texts] | None = None,
) -> Quality:
    """Return how far a file is from the module of a source. The block must be open."""
    # block_size: number of weights that share a scale, as the quality states it
    # known: what the model makes of the text, filled by a first call for others; `None`, the default, for one call
    example, written, distance = source.example, source.traced.written, Distance()
    side = ByName(runner, example.names)
    for case in source.cases:
        logger.info("comparing %s", case.name, extra=STEP)
        padding, steps = Padding(), example.runs.steps(case, written, source.traced.left, twice=not written)
        for pair in side_by_side(side, example.module, case, steps, example.names, padding):
            eager = pytree.tree_leaves(padding.blank_leaves(pair.eager, pair.names))
            expected = dict(zip(pair.names, eager, strict=True))
            tensors = {n: v for n, v in expected.items() if isinstance(v, torch.Tensor) and n in pair.outputs}
            distance.add(tensors, {name: padding.blank(name, pair.outputs[name]) for name in tensors})
    known = [] if known is None else known
    if not known and quantization.tokens is not None:
        known += read_by_model(example.module, example.kwargs, quantization.tokens, written)
    for kwargs, read, losses, expected_scores in known:
        found = text_scores(runner, dict(zip(example.names, pytree.tree_leaves(((), kwargs)), strict=True)), read)
        if expected_scores is not None:
            distance.add_text_scores(expected_scores, found)
        distance.add_text(losses, text_losses(found, kwargs["input_ids"]))
    return distance.quality(quantization.weights, block_size, quantization.allowed)


def read_by_model(
    module: torch.nn.Module, kwargs: Mapping[str, Any], tokens: torch.Tensor, written: Collection[str] = ()
) -> list[Texts]:
    """Return losses and scores of the model on a text."""
    # kwargs: its example; each call has as many rows
    found: list[Texts] = []
    kept, texts = 0, tokens.split(len(kwargs["input_ids"]))
    for case, read in zip(text_cases(module, kwargs, tokens), texts, strict=True):
        ((kwargs, eager, _),) = eager_steps(module, case, written)
        scores = eager[SCORES] if isinstance(eager, dict) else getattr(eager, SCORES)
        fits = kept + scores.numel() <= _SCORES  # those of a long text are larger than the model
        kept += scores.numel() if fits else 0
        found.append((dict(kwargs), read, text_losses(scores, kwargs["input_ids"]), scores.detach() if fits else None))
    return found


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
