"""Run a file on a text, and sum the second moments of the inputs of its matrix products.

.. code-block:: text

    text ──> file ──> x of some products, as further outputs ──> sum of x[i] * x[j] / mean(x * x) over all tokens

Each token counts the same. The inputs of the first one are a hundred times as large in many models, and would decide
alone how the weights are rounded.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ....errors import ReplayError
from ....errors.log import STEP
from ....private_names.of_torch import pytree
from ....runners.onnx_runner import OnnxRunner
from ....runners.onnx_session import mapped_options, open_session
from ...proof.case import Case, clone
from ...quantization.measure import from_the_start
from ...quantization.options import Quantization
from ...quantization.text_cases import rounding_calls
from ...source import Source
from ..file import UnprovenFile
from ..split_inputs import InputSplit, InputSplits

_LEAST = 2**29
"""Bytes of moments that are held at once, if the weights are not larger: a file runs once for each such part."""

_SMALLEST = 1e-30
"""Mean square from which on the inputs of a token have a size: there are tokens with zeros alone."""


def input_moments(
    file: UnprovenFile,
    sizes: Mapping[str, int],
    calls: Sequence[Case],
    names: Sequence[str],
    tokens: torch.Tensor,
    splits: InputSplits | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield values of a file by name, with the mean product of each two of their last axis, relative to their size.

    None is yielded where the file cannot read the text from its first token.
    """
    # sizes: sizes of the last axis of the values of the graph that are wanted
    # calls: calls that read the text, its first token in the cache
    # names: names of the inputs' leaves, in order
    # tokens: the text, int64 of shape (texts, length)
    # splits: for the moments of values whose large channels are apart, in front; `None`, the default, as they are
    wide = {name: size + (0 if splits is None else len(splits[name].channels) + 1) for name, size in sizes.items()}
    most = max(_LEAST, sum(one.stat().st_size for one in file.folder.iterdir() if one.is_file()) // 4)
    for part in _parts(wide, most):
        found = {name: torch.zeros(wide[name], wide[name]) for name in part}
        count = 0
        for read in read_inputs(file, {name: sizes[name] for name in part}, calls, names, tokens):
            for name, rows in read.items():
                each = rows.square().mean(1, keepdim=True).clamp(min=_SMALLEST).rsqrt()
                rows = (rows if splits is None else splits[name].apart(rows)) * each
                found[name].addmm_(rows.T, rows)
            count += len(rows)
        if not count:
            return
        for name in part:
            yield name, found.pop(name).div_(count)


def read_inputs(
    file: UnprovenFile, sizes: Mapping[str, int], calls: Sequence[Case], names: Sequence[str], tokens: torch.Tensor
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield values of a file by name, float32 of shape (tokens, size), for one call after the other.

    None is yielded where the file cannot read the text from its first token.
    """
    # the parameters are those of `input_moments`
    counts = [len(call.kwargs["input_ids"]) for call in calls]
    with _showing(file, sizes) as runner:
        for call, read in zip(calls, tokens.split(counts), strict=True):
            leaves = pytree.tree_leaves((call.args, dict(clone(call.kwargs))))
            given = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name in runner.ports}
            feeds = from_the_start(given, runner.slots, read)
            if feeds is None:
                return
            try:
                outputs = runner.run(feeds)
            except ReplayError:  # the file takes no empty cache
                return
            yield {name: outputs[name].reshape(-1, size).float() for name, size in sizes.items()}


def _parts(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Names whose moments are held at once."""
    part: list[str] = []
    held = 0
    for name, size in sizes.items():
        if part and held + 4 * size * size > most:
            yield part
            part, held = [], 0
        part.append(name)
        held += 4 * size * size
    if part:
        yield part


@contextlib.contextmanager
def _showing(file: UnprovenFile, names: Collection[str]) -> Iterator[OnnxRunner]:
    """Open a file with values of its graph as further outputs."""
    import onnx_ir as ir

    model = ir.load(file.path)
    held = {output.name for output in model.graph.outputs}
    made = {output.name: output for node in model.graph for output in node.outputs if output.name in names}
    model.graph.outputs.extend(made[name] for name in names if name not in held)
    path = file.path.with_name(f"shown-{file.path.name}")  # next to its weights, which it reads
    try:
        ir.save(model, path)
        yield OnnxRunner(open_session(path, caller="export_onnx", options=mapped_options(path)), file.path.name)
    finally:
        path.unlink(missing_ok=True)


# Find for each input of products how it is split in two parts, by a text: see `split_inputs`.


logger = logging.getLogger("yobx_flatten")

_TEXTS, _LENGTH = 4, 64
"""How much of the text is read: one number of each input is looked for, and not a matrix."""

_ROWS = 64
"""Tokens by which an input is decided."""

_PARTS = (0.5, 0.65, 0.8, 0.87, 0.92, 0.95, 0.965, 0.975, 0.985, 0.99, 0.995)
"""Shares of the values that are tried as small ones."""

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
    whole = (_rounded(rows, block_size) - rows).square().sum(1).clamp(min=1e-30)

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


def _rounded(rows: torch.Tensor, block_size: int) -> torch.Tensor:
    """Round inputs as onnxruntime does: 127 steps for the largest of each block."""
    blocks = rows.reshape(len(rows), -1, block_size)
    steps = blocks.abs().amax(2, keepdim=True).div(127).clamp(min=1e-30)
    return blocks.div(steps).round().mul(steps).reshape(rows.shape)
