"""Round the matrices of a file by what they are multiplied with on a text."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy
import torch

from ....errors.log import STEP
from ...quantization.options import Quantization
from ...quantization.text_cases import rounding_calls
from ...source import Source
from ..file import UnprovenFile
from ..kept_integers import Grids
from ..split_inputs import InputSplit, InputSplits
from ..weight_grid import WeightGrid
from ..weights import unmap
from .error_feedback import round_with_feedback
from .input_moments import input_moments

logger = logging.getLogger("yobx_flatten")

RoundedMatrices: TypeAlias = dict[tuple[str, bool], WeightGrid]
"""Matrices in few bits, by the name of the weight and whether it is transposed."""


def round_by_text(
    file: UnprovenFile,
    graph: Any,
    products: Iterable[Any],
    quantization: Quantization,
    source: Source,
    grids: Grids,
    splits: InputSplits | None = None,
) -> RoundedMatrices:
    """Round matrices of a file; those of the same inputs together. The block must be open."""
    # products: nodes of the graph with their weights, and whether these are transposed
    # splits: for those matrices alone that get rows for large channels of their inputs; `None`, the default, for all
    if not source.cases or quantization.weights == "keep":
        return {}
    calls = rounding_calls(source.example, quantization)
    if calls is None:
        return {}
    wanted: dict[str, dict[tuple[str, bool], Any]] = {}
    sizes: dict[str, int] = {}
    for node, (value, transposed) in products:
        x = node.inputs[0]
        size = int(value.const_value.shape[1 if transposed else 0])
        # a product in a loop or a branch cannot be shown, and onnxruntime pads what has no whole blocks with zeros
        block_size = quantization.block_for(quantization.bits, size)
        if x.producer() is None or x.producer().graph is not graph or size % block_size:
            continue
        if x.shape is None or grids.is_exact(value, quantization.bits, transposed=transposed):
            continue
        if splits is not None and not _takes_large(x, value, splits):
            continue
        wanted.setdefault(x.name, {})[value.name, transposed] = value
        sizes[x.name] = size
    if not wanted:
        return {}
    found, names = RoundedMatrices(), source.example.names
    logger.info("reading what %d products multiply", len(sizes), extra=STEP)
    for name, moments in input_moments(file, sizes, calls.cases, names, calls.tokens, splits):
        found |= _rounded(wanted[name], moments, quantization, None if splits is None else splits[name])
    return found


def _takes_large(x: Any, value: Any, splits: InputSplits) -> bool:
    """Whether a matrix gets rows for large channels; a tied table does not, which an embedding also reads."""
    is_alone = len(value.uses()) == 1 and value.const_value.dtype.name == "FLOAT" and len(x.shape) > 1
    return is_alone and x.name in splits and bool(splits[x.name].channels)


def _rounded(
    matrices: dict[tuple[str, bool], Any], moments: torch.Tensor, quantization: Quantization, split: InputSplit | None
) -> RoundedMatrices:
    found, bits = RoundedMatrices(), quantization.bits
    block_size = quantization.block_for(bits, len(moments))
    for key, value in matrices.items():
        array = value.const_value.numpy()
        weights = torch.from_numpy(numpy.array(array.T if key[1] else array))
        del array
        unmap(value.const_value)
        dtype = weights.dtype
        if split is not None:
            weights = split.rows(weights)
        found[key] = round_with_feedback(weights, moments, block_size, dtype, bits)
        if split is not None:
            found[key] = _large_last(found[key], split.step)
    return found


def _large_last(grid: WeightGrid, step: float) -> WeightGrid:
    """Put the first block after the others, for inputs that are counted in steps."""
    scales = grid.scales.copy()
    scales[:, 0] *= step
    parts = (None if part is None else numpy.roll(part, -1, 1) for part in (grid.numbers, scales, grid.zeros))
    numbers, scales, zeros = parts
    return dataclasses.replace(grid, numbers=numbers, scales=scales, zeros=zeros)
