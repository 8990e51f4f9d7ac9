"""Find for each input of products how it is split in two parts, by a text: see `split_inputs`.

Up to some size numbers are small, where two rows have least error. Where these leave much of the error of one, no large
numbers spoil the others, and one part does: all numbers are small. And where the channels that are largest on the text
leave little more than two rows, they get a block of columns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch

from ....errors.log import STEP
from ...quantization.options import Quantization
from ...quantization.text_cases import rounding_calls
from ...source import Source
from ..file import UnprovenFile
from ..split_inputs import InputSplit, InputSplits
from .input_moments import read_inputs

logger = logging.getLogger("yobx_flatten")

_TEXTS, _LENGTH = 4, 64
"""How much of the text is read: one number of each input is looked for, and not a matrix."""

_ROWS = 64
"""Tokens by which an input is decided."""

_PARTS = (0.5, 0.65, 0.8, 0.87, 0.92, 0.95, 0.965, 0.975, 0.985, 0.99, 0.995)
"""Parts of the numbers that are tried as the small ones."""

_WORTH = 0.25
"""Part of the error of one part from which on two are not worth their nodes."""

_NEAR = 2.0
"""Error of a block of columns, relative to that of two rows, which take twice the time for a prompt."""

_BLOCKS = 8
"""Blocks of an input from which on one more is an eighth of its weights at most."""


def input_splits(
    file: UnprovenFile, graph: Any, products: Iterable[Any], quantization: Quantization, source: Source
) -> InputSplits:
    """Return how inputs in whole blocks are split; none where the file reads no text from its first token."""
    # products: nodes of the graph with their weights, and whether these are transposed
    calls = rounding_calls(source.example, quantization, at_most=(_TEXTS, _LENGTH))
    if calls is None:
        return {}
    sizes = {}
    for node, (value, transposed) in products:
        x, size = node.inputs[0], int(value.const_value.shape[1 if transposed else 0])
        # what a product in a loop or a branch reads cannot be shown
        if x.producer() is not None and x.producer().graph is graph and size % quantization.block_for(8, size) == 0:
            sizes[x.name] = size
    logger.info("reading what %d products multiply", len(sizes), extra=STEP)
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in sizes}
    for read in read_inputs(file, sizes, calls.cases, source.example.names, calls.tokens):
        for name, found in read.items():
            rows[name].append(found)
    if not any(rows.values()):
        return {}
    whole = {name: torch.cat(rows.pop(name)) for name in sizes}
    splits = {name: _split(found, quantization.block_for(8, sizes[name])) for name, found in whole.items()}
    return {name: split for name, split in splits.items() if split is not None}


def _split(rows: torch.Tensor, block_size: int) -> InputSplit | None:
    """How an input is split with least error, relative to one part; ``None`` where most numbers are 0."""
    channels, step = _large(rows, block_size)
    rows = rows[:: -(-len(rows) // _ROWS)]
    sizes = rows.abs().flatten().sort().values
    tried = {float(sizes[int(part * (len(sizes) - 1))]) for part in _PARTS} - {0.0}
    # of each token, since those of the first one are a hundred times as large in many models
    whole = _error(rows, block_size).clamp(min=1e-30)

    def error(large: torch.Tensor, found: torch.Tensor) -> float:
        left = (_rounded(rows - large, block_size) + found - rows).square().sum(1)
        return float((left / whole).mean())

    def rest(limit: float) -> torch.Tensor:
        return rows - rows.clamp(-limit, limit)

    if not tried:
        return None
    left, limit = min((error(rest(one), _rounded(rest(one), block_size)), one) for one in tried)
    if left >= _WORTH:
        return InputSplit(math.inf)
    if rows.shape[1] < _BLOCKS * block_size:
        return InputSplit(limit)
    steps = torch.zeros_like(rows)
    steps[:, channels] = rows[:, channels].div(step).round() * step
    return InputSplit(limit, channels.tolist(), step) if error(steps, steps) <= _NEAR * left else InputSplit(limit)


def _large(rows: torch.Tensor, block_size: int) -> tuple[torch.Tensor, float]:
    """The channels that are largest, each token counting the same, and a 127th of their largest number."""
    sizes = rows.square() / rows.square().mean(1, keepdim=True).clamp(min=1e-30)
    channels = sizes.mean(0).topk(min(block_size, rows.shape[1]) - 1).indices
    return channels, float(rows[:, channels].abs().max()) / 127 or 1.0


def _error(rows: torch.Tensor, block_size: int) -> torch.Tensor:
    return (_rounded(rows, block_size) - rows).square().sum(1)


def _rounded(rows: torch.Tensor, block_size: int) -> torch.Tensor:
    """What onnxruntime rounds inputs to: 127 steps for the largest of each block."""
    blocks = rows.reshape(len(rows), -1, block_size)
    steps = blocks.abs().amax(2, keepdim=True).div(127).clamp(min=1e-30)
    return blocks.div(steps).round().mul(steps).reshape(rows.shape)
