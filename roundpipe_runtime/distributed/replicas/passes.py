"""Run the groups of one rank forward now and backward later.

::

    forward      group after group; what is kept of each is the input of the layers that are called again
    backward     group after group; gradients of a layer go to the sums as they land
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ...batch.flat import FlatMicrobatch
from ...device.events import NOW
from ...device.transfer import HostValue
from ...engine.autograd import arrived, return_outputs
from ...engine.config import RoundPipeRunConfig
from ...engine.driver import Engine
from ...engine.parameters.on_device import Gradients
from ...engine.run import Run
from ...errors import StageError


@dataclasses.dataclass(slots=True)
class GroupPasses:
    """The forward of the groups of a rank, and what its backward needs."""

    parts: list[list[FlatMicrobatch]]  # microbatches of each group
    config: RoundPipeRunConfig  # settings of the call
    # runs of the groups that have rows, with the inputs of each microbatch
    runs: list[tuple[Run, list[HostValue]]] = dataclasses.field(default_factory=list)
    # function that is given gradients as they land; `None` where they stay in the run
    landed: Callable[[int, int, Gradients], None] | None = None
    written: dict[tuple[int, int], torch.Tensor] | None = None  # buffers that the first run wrote
    empty: list[HostValue] = dataclasses.field(default_factory=list)  # outputs without rows, on a rank that has none

    def land(self, turn: int, layer: int, gradients: Gradients) -> None:
        """Pass the gradients of a layer on to the sums."""
        if self.landed is not None:
            self.landed(turn, layer, gradients)

    def rows(self) -> list[int | None]:
        """Return the rows of each microbatch."""
        return [microbatch.rows for part in self.parts for microbatch in part] or [0] * len(self.empty)

    def outputs(self) -> list[HostValue]:
        """Return the output of each microbatch on the host."""
        found = [run.collected.outputs[number] for run, _ in self.runs for number in range(run.spec.num_microbatch)]
        return found or self.empty

    def inputs(self) -> list[torch.Tensor]:
        """Return the inputs that gradients go on from."""
        return [
            tensor
            for _, values in self.runs
            for on_host in values
            for tensor, flag in zip(on_host.tensors, on_host.needs_grad, strict=True)
            if flag
        ]

    def input_gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of :meth:`inputs`, after the backward."""
        found: list[torch.Tensor | None] = []
        for run, values in self.runs:
            for number, on_host in enumerate(values):
                copies = run.collected.input_gradients[number]
                for flag, copy in zip(on_host.needs_grad, copies, strict=True):
                    if flag:
                        found.append(None if copy is None else arrived(copy))
        return found

    def go_back(
        self,
        engine: Engine,
        gradients: Sequence[torch.Tensor | None],
        stopping: Callable[[Run], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Run the backward of each group."""
        # gradients: gradients of all tensors of `outputs`, `None` where none flows
        found = iter(gradients)
        runs = iter(self.runs)
        for turn, part in enumerate(self.parts):
            if part:
                run, _ = next(runs)
                run.check_unchanged()
                run.version = engine.version()
                for number in range(run.spec.num_microbatch):
                    taken = [next(found) for _ in run.collected.outputs[number].tensors]
                    copies = [None if gradient is None else (gradient, NOW) for gradient in taken]
                    run.mailbox.put(("gradient", run.spec.span.stop, number), copies)
                with stopping(run):
                    engine.execute(run, [stage for stage in run.spec.stages if stage.kind == "backward"])
            for layer in range(len(engine.layers)):  # what has not landed has no gradient
                self.land(turn, layer, {})


def as_outputs(values: Sequence[HostValue], *, flows: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """Return outputs to compute a loss from, and their tensors."""
    # flows: whether the tensors require a gradient where those of the model do
    outputs, tensors = [], []
    for on_host in values:
        flags = zip(on_host.tensors, on_host.needs_grad, strict=True)
        own = [tensor.detach().requires_grad_(flag and flows) for tensor, flag in flags]
        outputs.append(on_host.structure.rebuild(own))
        tensors += own
    return outputs, tensors


def join_graph(passes: GroupPasses, backward: Callable[[Sequence[torch.Tensor | None]], None]) -> list[Any]:
    """Return the output of each microbatch as a part of the caller's graph."""
    anchor = torch.empty(0, requires_grad=True)  # parameters are no inputs of the node: their sums are those of ranks
    results = iter(_apply(backward, passes, anchor, *passes.inputs()))
    return [on_host.structure.rebuild([next(results) for _ in on_host.tensors]) for on_host in passes.outputs()]


class _Groups(torch.autograd.Function):
    """The groups of a rank as one node of the caller's graph."""

    @staticmethod
    def forward(ctx: Any, back: Any, passes: GroupPasses, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.back, ctx.passes = back, passes
        return return_outputs(ctx, passes.outputs())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        passes, ctx.passes = ctx.passes, None
        if torch.is_grad_enabled() or passes is None:
            raise StageError(
                "The forward of a pipeline goes backward once, without create_graph=True and retain_graph=True. Call "
                "forward again; gradients of gradients are those of the model itself:\n"
                "    model = pipeline.model"
            )
        ctx.back(gradients)
        return (None, None, None, *passes.input_gradients())


_apply = cast(Callable[..., tuple[torch.Tensor, ...]], _Groups.apply)
