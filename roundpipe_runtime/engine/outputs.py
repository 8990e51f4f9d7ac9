"""Join or pack the outputs of a run's microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from yobx_flatten.private_names.of_torch import pytree

from ..batch.joining import common_spec, join
from ..batch.packed import RoundPipePackedData
from ..device.outcome import noting
from .config import RoundPipeRunConfig
from .run import Run


def outputs_of(run: Run) -> list[Any]:
    """Return the output of each microbatch of a run that has ended."""
    return [run.collected.outputs[number].rebuild() for number in range(run.spec.num_microbatch)]


def merge_outputs(
    outputs: Sequence[Any], weights: Sequence[float | None], rows: Sequence[int | None], config: RoundPipeRunConfig
) -> Any:
    """Join the outputs of the microbatches as a configuration asks for it."""
    # weights: weight of each microbatch in an average
    # rows: rows of each microbatch, `None` where they are not known
    # config: settings of the call: `merge_output` and `output_device`
    with noting(f"While the outputs of {len(outputs)} microbatches were joined."):
        if config.merge_output is False:
            return _pack(outputs, rows)
        joined = join(outputs, weights, rows=rows, merge=config.merge_output)
    device = torch.device(config.output_device or "cpu")
    if device.type == "cpu":
        return joined
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), joined)


def _pack(outputs: Sequence[Any], rows: Sequence[int | None]) -> Any:
    """Outputs as they are: the structure of one of them, with a list over the microbatches for each leaf."""
    spec = common_spec(outputs)  # the structure of the first would name the leaves of the others otherwise
    columns = zip(*map(pytree.tree_leaves, outputs), strict=True)
    return pytree.tree_unflatten([RoundPipePackedData(column, rows=rows) for column in columns], spec)
