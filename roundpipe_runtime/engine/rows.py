"""Prove that rows are independent where layers have them on another axis by their own word.

Recurrent layers and attention of torch have the sequence first unless ``batch_first=True``. A batch that is cut along
axis 0 would be cut along its sequence then, and every number would be another one. Whether it is cannot be seen in the
sizes; so some rows are computed at once and in two parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import pytree

from ..batch.flat import FlatBatch, FlatMicrobatch
from ..device.transfer import HostValue
from ..errors import SplitError
from ..schedule.round_robin import RoundRobin, Stage
from .config import RoundPipeRunConfig
from .outputs import merge_outputs, outputs_of
from .run import Run

__all__ = ["RowCheck"]

_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
_USUAL = 1e-3


def _sequence_first(layers: Sequence[nn.Module]) -> str | None:
    """Return the class of a module whose rows are on axis 1, ``None`` without any."""
    modules = (module for layer in layers for module in layer.modules())
    return next((type(module).__name__ for module in modules if getattr(module, "batch_first", None) is False), None)


@contextlib.contextmanager
def _evaluating(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Switch off what draws, and what looks at the whole batch by design."""
    modes = {module: module.training for layer in layers for module in layer.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class Rows(Protocol):
    """The part of an engine that runs some rows by themselves."""

    layers: list[nn.Module]
    round_robin: RoundRobin

    def split(self, batch: FlatBatch, config: RoundPipeRunConfig) -> list[FlatMicrobatch]:
        """Split arguments and labels into microbatches."""

    def prepare_forward(
        self, microbatches: Sequence[FlatMicrobatch], config: RoundPipeRunConfig
    ) -> tuple[Run, list[HostValue]]:
        """Return a run of a forward that has not started, and its inputs."""

    def execute(self, run: Run, stages: Sequence[Stage]) -> None:
        """Run stages to their end."""


class RowCheck:
    """Whether the rows of a pipeline's batches were found to be independent."""

    def __init__(self) -> None:
        self._is_done = False

    def check(self, engine: Rows, batch: FlatBatch, rows: Sequence[int | None], config: RoundPipeRunConfig) -> None:
        """Check once that a batch is not cut along a sequence, where layers have that first.

        Args:
            engine: engine that runs the batch.
            batch: arguments and labels.
            rows: rows of each microbatch.
            config: settings of the call.

        Raises:
            SplitError: it is.
        """
        if self._is_done or len(rows) == 1 or config.split_input is not None or None in rows:
            return
        name = _sequence_first(engine.layers)
        if name is not None:
            alone = dataclasses.replace(config, requires_grad=False, execute_plan=None, output_device=None)
            cut = dataclasses.replace(alone, num_microbatch=max(1, sum(count or 0 for count in rows) // 2))
            some = engine.split(batch, cut)[0]
            args, kwargs = pytree.tree_unflatten(some.inputs, some.spec)
            few = FlatBatch.of(args, kwargs, pytree.tree_unflatten(some.labels, some.label_spec))
            cursor = engine.round_robin.cursor
            with _evaluating(engine.layers), torch.no_grad():
                whole, parts = (pytree.tree_leaves(_infer(engine, few, alone, number)) for number in (1, 2))
            engine.round_robin.cursor = cursor
            if len(whole) != len(parts) or not all(map(_is_close, whole, parts)):
                raise _is_cut(name)
        self._is_done = True


def _infer(engine: Rows, batch: FlatBatch, config: RoundPipeRunConfig, number: int) -> Any:
    """The output of a batch in this number of microbatches, of a run that changes nothing."""
    config = dataclasses.replace(config, num_microbatch=number)
    microbatches = engine.split(batch, config)
    rows = [microbatch.rows for microbatch in microbatches]
    run, host_values = engine.prepare_forward(microbatches, config)
    run.start_all(host_values)
    engine.execute(run, run.spec.stages)
    outputs = merge_outputs(outputs_of(run), rows, rows, config)
    run.discard()
    return outputs


def _is_cut(name: str) -> SplitError:
    return SplitError(
        f"The batch is cut along axis 0, and the layers mix what is on it: a {name} has batch_first=False, and "
        "outputs of one part are others than those of the same rows in two parts. Say where the rows are, or make "
        "the layers with batch_first=True:\n"
        '    RoundPipeRunConfig(split_input={"args[0]": TensorChunkSpec(1)}, merge_output=TensorChunkSpec(1))'
    )


def _is_close(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other)
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=_TOLERANCE.get(one.dtype, _USUAL) * scale, equal_nan=True)
