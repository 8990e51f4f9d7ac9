"""Run a file on a text, and sum the second moments of what its products multiply with their weights.

.. code-block:: text

    text ──> file ──> x of some products, as further outputs ──> sum of x[i] * x[j] / mean(x * x) over all tokens

Each token counts the same. The inputs of the first one are a hundred times as large in many models, and would decide
alone how the weights are rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from ....errors import ReplayError
from ....private_names.of_torch import pytree
from ....runners.onnx_runner import OnnxRunner
from ....runners.onnx_session import mapped_options, open_session
from ...proof.case import Case, clone
from ...quantization.from_the_start import from_the_start
from ..file import UnprovenFile
from ..split_inputs import InputSplits

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
