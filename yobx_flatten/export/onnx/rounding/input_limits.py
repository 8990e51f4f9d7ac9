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

from ....errors.log import STEP
from ...quantization.options import Quantization
from ...quantization.text_cases import rounding_calls
from ...source import Source
from ..file import UnprovenFile
from ..split_inputs import InputLimits
from .input_moments import read_inputs

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
    limits = {name: _limit(found, quantization.block_for(8, sizes[name])) for name, found in whole.items()}
    return {name: limit for name, limit in limits.items() if limit}


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
