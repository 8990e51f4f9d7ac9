"""Quantize a matrix with error feedback (GPTQ, Frantar et al. 2022): weights compensate the errors of earlier weights.

The correlations between the inputs of the matrix are measured on a calibration text. onnxruntime's ``gptq`` is not
used: it returns weights without their scales, and computing new scales would lose most of the advantage of GPTQ.
"""

# input 0   rounded ── its error, times its correlation with each later input ──┐
# input 1   minus this, rounded ── ...                                          │
# input 2   minus both, rounded        <────────────────────────────────────────┘

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy
import torch

from ...core.private_names.of_torch import pytree
from ...errors import ReplayError
from ...errors.failures import STEP
from ...runners.onnx_runner import OnnxRunner
from ...runners.onnx_session import mapped_options, open_session
from ...trace.onnx_repairs import ir
from ..proof.eager_runs import Case, clone
from ..quantization import Quantization, from_the_start, rounding_calls
from ..source import Source
from .file import UnprovenFile
from .weights import Grids, InputSplit, InputSplits, WeightGrid, is_in_main_graph, products_of, unmap

_MANY = 1.0, 0.97, 0.94
_SHRINKS = {4: tuple(1 - 0.025 * step for step in range(14)), 7: _MANY, 8: _MANY}
"""Fractions of a block's range at which weights are clipped on trial: a smaller range has finer steps for most."""

_SAMPLE = 64
"""Number of output rows of a matrix that are rounded on trial, to choose how to store the whole matrix."""

_CHUNK = 32
"""Number of columns whose rounding errors are added to later columns in one matrix product (block size of GPTQ)."""

_DAMPING = 0.01
"""Share of the mean square of the inputs that is added to the diagonal of the Hessian (damping of GPTQ)."""


@dataclasses.dataclass(frozen=True)
class _Form:
    """The integer format of a quantized matrix."""

    bits: int
    is_lowest: bool  # whether the integer 0 represents the lowest weight of the block; else there is a zero point
    scales: torch.dtype
    is_even: bool = False  # whether all blocks have the same zero point, the middle of the integers

    @property
    def most(self) -> int:
        return int(2**self.bits - 1)

    def fit(self, block: torch.Tensor, costs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the scales and offsets that quantize blocks of weights with the least error, and this error."""
        # the offset is the zero point, or the weight that the integer 0 represents
        # block: of shape (blocks, weights, outputs); costs: of each squared error, (blocks, weights, 1)
        low, high = block.amin(1, keepdim=True), block.amax(1, keepdim=True)
        if self.is_even:
            high = torch.maximum(-low, high)
            low = -high
        elif not self.is_lowest:
            low, high = low.clamp(max=0), high.clamp(min=0)
        best: list[torch.Tensor] = []
        for shrink in _SHRINKS[self.bits]:
            middle, half = (low + high) / 2, (high - low) / 2 * shrink
            first = middle - half if self.is_lowest else low * shrink
            scale = (2 * half / self.most).to(self.scales).float()
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))
            if self.is_even:
                offset = torch.full_like(scale, 2 ** (self.bits - 1))
            elif self.is_lowest:
                offset = first.half().float()
            else:
                offset = (-first / scale).round().clamp(0, self.most)
            near = self.value(self.numbers(block, scale, offset), scale, offset)
            made = [costs.mul((near - block).square()).sum(1, keepdim=True), scale, offset]
            best = [torch.where(made[0] < best[0], *pair) for pair in zip(made, best, strict=True)] if best else made
        return best[1], best[2], best[0]

    def numbers(self, weights: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        steps = (weights - offset) / scale if self.is_lowest else weights / scale + offset
        return steps.round_().clamp_(0, self.most)

    def value(self, numbers: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return numbers * scale + offset if self.is_lowest else (numbers - offset) * scale


def round_with_feedback(
    weights: torch.Tensor, moments: torch.Tensor, block_size: int, dtype: torch.dtype = torch.float32, bits: int = 4
) -> WeightGrid:
    """Quantize a matrix in blocks; each row of the matrix compensates the rounding errors of the rows before it."""
    # weights: of shape (inputs, outputs); the number of inputs is a multiple of the block size
    # moments: mean of the products of each two inputs, of shape (inputs, inputs)
    # dtype: dtype of the scales
    # bits: 4 or 8; with 7, the zero point of all blocks is 64
    weights, moments = weights.float().clone(), moments.float().clone()
    following = _following(moments)
    costs = following.diagonal().reciprocal().square()
    form = _form_of(weights, costs, block_size, bits, dtype)
    rows, columns = weights.shape
    numbers = torch.empty(rows, columns, dtype=torch.uint8)
    parts = []
    scale = offset = torch.zeros(())
    for start in range(0, rows, min(_CHUNK, block_size)):
        if start % block_size == 0:
            whole = slice(start, start + block_size)
            scale, offset, _ = (one[0, 0] for one in form.fit(weights[None, whole], costs[None, whole, None]))
            parts.append((scale, offset))
        end = min(start + _CHUNK, start - start % block_size + block_size)
        block, errors = weights[start:end], torch.empty(end - start, columns)
        inside = following[start:end, start:end]
        for row in range(end - start):
            found = form.numbers(block[row], scale, offset)
            numbers[start + row] = found
            errors[row] = (block[row] - form.value(found, scale, offset)) / inside[row, row]
            block[row + 1 :].addr_(inside[row, row + 1 :], errors[row], alpha=-1)
        weights[end:].addmm_(following[start:end, end:].T, errors, alpha=-1)
    scales, offsets = (torch.stack(one, 1) for one in zip(*parts, strict=True))
    held = numbers.T.reshape(columns, -1, block_size).contiguous().numpy()
    steps = scales.to(form.scales).numpy()
    if form.is_lowest:
        return WeightGrid(form.bits, held, steps, lowest=offsets.half().numpy())
    return WeightGrid(form.bits, held, steps, zeros=None if form.is_even else offsets.to(torch.uint8).numpy())


def _following(moments: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular matrix of GPTQ, by which the rounding error of a weight changes all later weights."""
    if not moments.isfinite().all():
        return torch.eye(len(moments))  # rounds weights to nearest
    damping = float(_DAMPING * moments.diagonal().mean()) or 1.0
    moments.diagonal().add_(damping)
    while True:
        lower, failed = torch.linalg.cholesky_ex(moments)
        if not failed:
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and bool(upper.isfinite().all()):
            return upper
        damping = damping * 10  # nearly equal inputs make the matrix singular in float32
        moments.diagonal().add_(damping)


def _form_of(weights: torch.Tensor, costs: torch.Tensor, size: int, bits: int, dtype: torch.dtype) -> _Form:
    """Choose the integer format of a matrix; for 4 bits, by the quantization errors of two formats."""
    if bits == 7:
        return _Form(bits, False, dtype, is_even=True)
    whole, lowest = (_Form(bits, is_lowest, dtype) for is_lowest in (False, True))
    if bits == 8:
        return whole
    weights = weights[:, :: -(-weights.shape[1] // _SAMPLE)]
    blocks, each = weights.reshape(-1, size, weights.shape[1]), costs.reshape(-1, size, 1)
    more = (16 - bits) / size  # bits of each weight: a lowest weight has 16, a zero point has 4
    errors = [float(form.fit(blocks, each)[2].sum()) for form in (whole, lowest)]
    return lowest if errors[0] > errors[1] * 4.0**more else whole  # each bit divides the squared error by four


logger = logging.getLogger("yobx_flatten")

RoundedMatrices: TypeAlias = dict[tuple[str, bool], WeightGrid]
"""Quantized matrices by name of the weight, and by whether the matrix is transposed."""


def round_by_text(file: UnprovenFile, quantization: Quantization, source: Source, grids: Grids) -> RoundedMatrices:
    is_rounded = source.cases and quantization.weights != "keep"
    calls = rounding_calls(source.example, quantization) if is_rounded else None
    if calls is None:
        return {}
    cases, tokens = calls
    wanted: dict[str, dict[tuple[str, bool], Any]] = {}
    sizes: dict[str, int] = {}
    for x, size, (value, transposed) in _read_in_blocks(file, quantization.block_size):
        if x.shape is not None and not grids.is_exact(value, quantization.bits, transposed=transposed):
            wanted.setdefault(x.name, {})[value.name, transposed] = value
            sizes[x.name] = size
    if not wanted:
        return {}
    found, names = RoundedMatrices(), source.example.names
    logger.info("reading what %d products multiply", len(sizes), extra=STEP)
    for name, moments in input_moments(file, sizes, cases, names, tokens):
        block_size = quantization.block_for(quantization.bits, len(moments))
        for key, value in wanted[name].items():
            weights = read_matrix(value, key[1])
            found[key] = round_with_feedback(weights, moments, block_size, weights.dtype, quantization.bits)
    return found


def _read_in_blocks(file: UnprovenFile, block_size: int) -> Iterator[tuple[Any, int, tuple[Any, bool]]]:
    """Yield the input, its size and the weight of each product that has whole blocks and is not inside a loop."""
    model = ir.load(file.path)
    for node, (value, transposed) in products_of(model, block_size):
        x, size = node.inputs[0], int(value.const_value.shape[1 if transposed else 0])
        if is_in_main_graph(x, model.graph) and size % block_size == 0:
            yield x, size, (value, transposed)


def read_matrix(value: Any, transposed: bool) -> torch.Tensor:
    """Read a weight matrix of an ONNX graph in the shape (inputs, outputs)."""
    array = value.const_value.numpy()
    matrix = torch.from_numpy(numpy.array(array.T if transposed else array))
    del array
    unmap(value.const_value)
    return matrix


_LEAST = 2**29
"""Least bytes of second moments of inputs that are kept in memory at once; the file runs again for all others."""

_SMALLEST = 1e-30
"""Lower bound of the mean square by which a token's inputs are divided, because the inputs of some tokens are zero."""


# Run a file on a text, and sum the second moments of the inputs of its matrix products.
#
#     text ──> file ──> inputs x of some products, as outputs ──> sum of x[i] * x[j] / mean(x * x) over all tokens
#
# Every token has the same weight. In many models, the inputs of the first token are a hundred times as large, and would
# decide alone how the weights are rounded.


def input_moments(
    file: UnprovenFile, sizes: Mapping[str, int], calls: Sequence[Case], names: Sequence[str], tokens: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Run an ONNX file on a text, and yield the names and second moments of intermediate values."""
    # sizes: size of the last axis of each value, by name of the value
    # calls: calls that read the text, with its first token in the cache
    # names: names of the leaves of the inputs, in order
    # tokens: the text, int64 of shape (texts, length)
    most = max(_LEAST, sum(one.stat().st_size for one in file.folder.iterdir() if one.is_file()) // 4)
    parts: list[list[str]] = []  # lists of values whose second moments fit into `most` bytes
    held = 0
    for name, size in sizes.items():
        held += 4 * size * size
        if not parts or held > most:
            parts.append([])
            held = 4 * size * size
        parts[-1].append(name)
    for part in parts:
        found = {name: torch.zeros(sizes[name], sizes[name]) for name in part}
        count = 0
        for read in read_inputs(file, {name: sizes[name] for name in part}, calls, names, tokens):
            for name, rows in read.items():
                each = rows.square().mean(1, keepdim=True).clamp(min=_SMALLEST).rsqrt()
                rows = rows * each
                found[name].addmm_(rows.T, rows)
            count += len(rows)
        if not count:  # the file cannot read the text
            return
        for name in part:
            yield name, found.pop(name).div_(count)


def read_inputs(
    file: UnprovenFile, sizes: Mapping[str, int], calls: Sequence[Case], names: Sequence[str], tokens: torch.Tensor
) -> Iterator[dict[str, torch.Tensor]]:
    """Run an ONNX file on a text; yield, per call, intermediate values by name, float32 of shape (tokens, size)."""
    model = ir.load(file.path)
    held = {output.name for output in model.graph.outputs}
    made = {output.name: output for node in model.graph for output in node.outputs if output.name in sizes}
    model.graph.outputs.extend(made[name] for name in sizes if name not in held)
    path = file.path.with_name(f"shown-{file.path.name}")  # in the folder of the weights
    counts = [len(call.kwargs["input_ids"]) for call in calls]
    try:
        ir.save(model, path)
        session = open_session(path, caller="export_onnx", options=mapped_options(path))
        runner = OnnxRunner(session, file.path.name)
        for call, read in zip(calls, tokens.split(counts), strict=True):
            leaves = pytree.tree_leaves((call.args, dict(clone(call.kwargs))))
            given = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name in runner.ports}
            feeds = from_the_start(given, runner.slots, read)
            if feeds is None:
                return
            try:
                outputs = runner.run(feeds)
            except ReplayError:  # the file refuses an empty cache
                return
            yield {name: outputs[name].reshape(-1, size).float() for name, size in sizes.items()}
    finally:
        path.unlink(missing_ok=True)


_TEXTS, _LENGTH = 4, 64
"""Number of texts, and of tokens per text, on which the model runs to choose how activations are split in two."""

_ROWS = 64
"""Number of tokens on which the ways to quantize an activation are compared."""

_PARTS = (0.5, 0.65, 0.8, 0.87, 0.92, 0.95, 0.965, 0.975, 0.985, 0.99, 0.995)
"""Fractions of activations that are tried as the part with small values, when activations are split in two parts."""

_WORTH = 0.25
"""Activations are split in two parts only if the error is below this fraction of the error without a split."""

_NEAR = 3.0
"""Channels with large values stay in float if their error is below this multiple of the error of two 8-bit parts."""

_SHARE, _MOST = 48, 32
"""At most one of 48 channels, and at most 32, stay in float, which reads an eighth more bytes of weights."""


def input_splits(file: UnprovenFile, quantization: Quantization, source: Source) -> InputSplits:
    """Return how large values in the input of each matrix product are separated from small values, by input name."""
    # the result is empty if nothing was measured
    calls = rounding_calls(source.example, quantization, at_most=(_TEXTS, _LENGTH))
    if calls is None:
        return {}
    cases, tokens = calls
    sizes = {x.name: size for x, size, _ in _read_in_blocks(file, quantization.block_size)}
    logger.info("reading what %d products multiply", len(sizes), extra=STEP)
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in sizes}
    for read in read_inputs(file, sizes, cases, source.example.names, tokens):
        for name, found in read.items():
            rows[name].append(found)
    if not any(rows.values()):
        return {}
    whole = {name: torch.cat(rows.pop(name)) for name in sizes}
    splits = {name: _split(found, quantization.block_size) for name, found in whole.items()}
    return {name: split for name, split in splits.items() if split is not None}


def _split(rows: torch.Tensor, block_size: int) -> InputSplit | None:
    """Choose a limit, or a list of channels, to separate large from small values; ``None`` if most values are 0."""
    rows = rows[:: -(-len(rows) // _ROWS)]
    sizes = rows.abs().flatten().sort().values
    tried = {float(sizes[int(part * (len(sizes) - 1))]) for part in _PARTS} - {0.0}
    # relative errors of each token, since the inputs of the first token are a hundred times as large in many models
    whole = (_rounded_as_inputs(rows, block_size) - rows).square().sum(1).clamp(min=1e-30)

    def error(large: torch.Tensor, found: torch.Tensor) -> float:
        left = (_rounded_as_inputs(rows - large, block_size) + found - rows).square().sum(1)
        return float((left / whole).mean())

    def rest(limit: float) -> torch.Tensor:
        return rows - rows.clamp(-limit, limit)

    if not tried:
        return None
    left, limit = min((error(rest(one), _rounded_as_inputs(rest(one), block_size)), one) for one in tried)
    if left >= _WORTH:
        return InputSplit()
    # the channels whose removal most reduces the largest values of the quantization blocks
    squares = rows.square() / rows.square().mean(1, keepdim=True).clamp(min=1e-30)
    blocks, found = squares.reshape(len(rows), -1, block_size), []
    for _ in range(min(rows.shape[1] // _SHARE, _MOST)):
        (first, second), where = blocks.topk(2, dim=2).values.unbind(2), blocks.argmax(2)
        gains = torch.zeros(blocks.shape[1:]).scatter_add_(1, where.T, (first - second).T)
        found.append(int(gains.argmax()))
        blocks.flatten(1)[:, found[-1]] = 0
    channels = sorted(found)
    large = torch.zeros_like(rows)
    large[:, channels] = rows[:, channels]
    return InputSplit(channels=tuple(channels)) if error(large, large) <= _NEAR * left else InputSplit(limit)


def _rounded_as_inputs(rows: torch.Tensor, block_size: int) -> torch.Tensor:
    """Round inputs as onnxruntime does: to 8-bit integers, with one scale for each block."""
    blocks = rows.reshape(len(rows), -1, block_size)
    steps = blocks.abs().amax(2, keepdim=True).div(127).clamp(min=1e-30)
    return blocks.div(steps).round().mul(steps).reshape(rows.shape)
