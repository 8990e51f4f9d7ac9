"""Find for each input of products up to which size its numbers are small, by a text.

Inputs in two parts have least error there: see `split_inputs`. Where two parts leave much of the error of one, no large
numbers spoil the others, and one part does: all numbers are small.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch

from ...errors import ReplayError
from ...errors.log import STEP
from ...private_names.of_torch import pytree
from ..quantization.from_the_start import from_the_start
from ..quantization.options import Quantization
from ..quantization.text_cases import text_cases
from ..source import Source
from .file import UnprovenFile
from .input_moments import showing
from .split_inputs import InputLimits

__all__ = ["input_limits"]

logger = logging.getLogger("yobx_flatten")

_TEXTS, _LENGTH = 4, 64
"""How much of the text is read: one number of each input is looked for, and not a matrix."""

_ROWS = 64
"""Tokens by which an input is decided."""

_PARTS = (0.5, 0.65, 0.8, 0.87, 0.92, 0.95, 0.965, 0.975, 0.985, 0.99, 0.995)
"""Parts of the numbers that are tried as the small ones."""

_WORTH = 0.25
"""Part of the error of one part from which on two are not worth their nodes."""


def input_limits(
    file: UnprovenFile, graph: Any, products: Iterable[Any], quantization: Quantization, source: Source
) -> InputLimits:
    """Return the limits of inputs in whole blocks; none where the file reads no text from its first token."""
    # products: nodes of the graph with their weights, and whether these are transposed
    tokens = quantization.tokens if quantization.calibration is None else quantization.calibration
    if tokens is None:
        return {}
    sizes = {}
    for node, (value, transposed) in products:
        x, size = node.inputs[0], int(value.const_value.shape[1 if transposed else 0])
        # what a product in a loop or a branch reads cannot be shown
        if x.producer() is not None and x.producer().graph is graph and size % quantization.block_for(8, size) == 0:
            sizes[x.name] = size
    logger.info("reading what %d products multiply", len(sizes), extra=STEP)
    tokens = tokens[:_TEXTS, :_LENGTH]
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in sizes}
    example = source.example
    calls = text_cases(example.module, example.kwargs, tokens)
    with showing(file, sizes) as runner:
        counts = [len(call.kwargs["input_ids"]) for call in calls]
        for call, read in zip(calls, tokens.split(counts), strict=True):
            leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
            given = {name: leaf for name, leaf in zip(example.names, leaves, strict=True) if name in runner.ports}
            feeds = from_the_start(given, runner.slots, read)
            if feeds is None:
                return {}
            try:
                outputs = runner.run(feeds)
            except ReplayError:  # the file takes no empty cache
                return {}
            for name, size in sizes.items():
                rows[name].append(outputs[name].reshape(-1, size).float())
    found = {name: _limit(torch.cat(rows.pop(name)), quantization.block_for(8, size)) for name, size in sizes.items()}
    return {name: limit for name, limit in found.items() if limit}


def _limit(rows: torch.Tensor, block_size: int) -> float:
    """The limit with least error, relative to one part; infinite where one part does, 0 where most numbers are 0."""
    rows = rows[:: -(-len(rows) // _ROWS)]
    sizes = rows.abs().flatten().sort().values
    tried = {float(sizes[int(part * (len(sizes) - 1))]) for part in _PARTS} - {0.0}
    # of each token, since those of the first one are a hundred times as large in many models
    whole = _error(rows, block_size).clamp(min=1e-30)

    def error(limit: float) -> float:
        small = rows.clamp(-limit, limit)
        left = (_rounded(small, block_size) + _rounded(rows - small, block_size) - rows).square().sum(1)
        return float((left / whole).mean())

    left, limit = min(((error(limit), limit) for limit in tried), default=(0.0, 0.0))
    return limit if left < _WORTH else math.inf


def _error(rows: torch.Tensor, block_size: int) -> torch.Tensor:
    return (_rounded(rows, block_size) - rows).square().sum(1)


def _rounded(rows: torch.Tensor, block_size: int) -> torch.Tensor:
    """What onnxruntime rounds inputs to: 127 steps for the largest of each block."""
    blocks = rows.reshape(len(rows), -1, block_size)
    steps = blocks.abs().amax(2, keepdim=True).div(127).clamp(min=1e-30)
    return blocks.div(steps).round().mul(steps).reshape(rows.shape)
