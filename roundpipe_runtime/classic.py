"""``forward()`` and then ``loss.backward()``: a run as a node of the caller's graph, whose backward is a second run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch.autograd.function import once_differentiable

from .errors import StageError
from .events import NOW
from .run import Run
from .schedule import Stage
from .transfer import Parcel

__all__ = ["Executor", "call"]


class Executor(Protocol):
    """What runs stages, and knows of optimizer steps."""

    def execute(self, run: Run, stages: Sequence[Stage]) -> None:
        """Run stages to their end."""

    def commit_forward(self, run: Run) -> None:
        """Give the model what the forward of a run computed."""

    def commit_backward(self, run: Run) -> None:
        """Give the model what the backward of a run computed."""

    def version(self) -> int:
        """Return the version of the parameters to read now."""


def call(engine: Executor, run: Run, stages: Sequence[Stage], parcels: Sequence[Parcel]) -> list[Any]:
    """Run forward now and, when the caller goes backward through the outputs, backward.

    Args:
        engine: runs the stages.
        run: of kind ``"train"``.
        stages: all of them.
        parcels: the inputs of each microbatch.

    Returns:
        The output of each microbatch; its tensors are part of the caller's graph.
    """
    inputs = [t for parcel in parcels for t, flag in zip(parcel.tensors, parcel.needs_grad, strict=True) if flag]
    # A node has a backward only if an input requires a gradient; the parameters, which do, are no inputs of it.
    anchor = torch.empty(0, requires_grad=True)
    results = iter(_apply(engine, run, stages, parcels, anchor, *inputs))
    outputs = []
    for number in range(run.num_microbatch):
        parcel = run.outputs.pop(number)
        outputs.append(parcel.skeleton.rebuild([next(results) for _ in parcel.tensors]))
    return outputs


class _Pipeline(torch.autograd.Function):
    """The graph node."""

    @staticmethod
    def forward(
        ctx: Any, engine: Executor, run: Run, stages: Sequence[Stage], parcels: Sequence[Parcel], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        for number, parcel in enumerate(parcels):
            run.start(number, parcel)
        engine.execute(run, [stage for stage in stages if stage.kind == "forward"])
        ctx.engine, ctx.run = engine, run
        ctx.backward_stages = [stage for stage in stages if stage.kind == "backward"]
        ctx.flags = [parcel.needs_grad for parcel in parcels]
        ctx.sizes = [len(run.outputs[number].tensors) for number in range(run.num_microbatch)]
        ctx.set_materialize_grads(False)
        run.remember_versions()
        engine.commit_forward(run)
        tensors, fixed = [], []
        for number in range(run.num_microbatch):
            parcel = run.outputs[number]
            parcel.wait()
            tensors += parcel.tensors
            fixed += [t for t, flag in zip(parcel.tensors, parcel.needs_grad, strict=True) if not flag]
        ctx.mark_non_differentiable(*fixed)
        return tuple(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        engine, run = ctx.engine, ctx.run
        if run is None:
            raise StageError(
                "This pipeline's forward was gone through backward before, and what it saved is freed. Call forward "
                "again; retain_graph has no effect on it."
            )
        ctx.run = None
        run.refuse_changed()
        run.version = engine.version()
        copies = iter([None if gradient is None else (gradient, NOW) for gradient in gradients])
        for number, size in enumerate(ctx.sizes):
            run.board.put(("gradient", len(run.contents), number), [next(copies) for _ in range(size)])
        engine.execute(run, ctx.backward_stages)
        engine.commit_backward(run)
        results: list[torch.Tensor | None] = []
        for number, flags in enumerate(ctx.flags):
            found = run.input_gradients[number]
            for flag, copy in zip(flags, found, strict=True):
                if flag:
                    results.append(None if copy is None else _arrived(copy))
        return (None, None, None, None, None, *results)


def _arrived(copy: tuple[torch.Tensor, Any]) -> torch.Tensor:
    gradient, ready = copy
    ready.result()
    return gradient


_apply = cast(Callable[..., tuple[torch.Tensor, ...]], _Pipeline.apply)
