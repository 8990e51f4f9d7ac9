"""Autograd integration: a run is one node of the caller's graph, and the node's backward runs the backward stages.

The inputs of the node are the model's inputs and parameters. So torch sums the gradients in ``grad``, runs hooks, and
returns gradients from ``torch.autograd.grad``. The engine adds only gradients of a dtype other than the parameter's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch

from yobx_flatten.private_names.of_torch import transforms_are_active

from ..device.protocol import NOW
from ..device.transfer import HostValue
from ..errors import StageError
from ..optim.parameters import added
from ..schedule.round_robin import Stage
from .run import Run


class Executor(Protocol):
    """The interface of the engine that runs the stages of a run and writes the results to the model."""

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """The lock that a run holds, so that only one run of the engine is active at a time."""

    def execute(self, run: Run, stages: Sequence[Stage]) -> None:
        """Run these stages and wait until they have ended."""

    def commit_forward(self, run: Run) -> None:
        """Write the results of a run's forward, such as buffers, to the model."""

    def commit_backward(self, run: Run) -> None:
        """Write the results of a run's backward, such as gradients, to the model."""

    def version(self) -> int:
        """Return the number of the parameter version that a run must read now."""


def call(engine: Executor, run: Run, host_values: Sequence[HostValue]) -> list[Any]:
    """Run the forward now, and the backward when the caller calls ``backward`` on the outputs."""
    inputs = [t for on_host in host_values for t, flag in zip(on_host.tensors, on_host.needs_grad, strict=True) if flag]
    # A node has a backward only if an input of the node requires a gradient, and parameters whose gradients have
    # another dtype are not inputs of the node.
    anchor = torch.empty(0, requires_grad=True)
    learned = _learned(run)
    results = iter(_apply(engine, run, host_values, learned, anchor, *inputs, *learned))
    outputs = []
    for number in range(run.spec.num_microbatch):
        on_host = run.collected.outputs.pop(number)
        outputs.append(on_host.structure.rebuild([next(results) for _ in on_host.tensors]))
    return outputs


def check_not_transformed() -> None:
    """Raise an error if a ``torch.func`` transform or forward-mode AD is active, which pipelines do not support."""
    if transforms_are_active():
        raise StageError(
            "A pipeline cannot be transformed by torch.func (grad, vmap, jacrev...) or forward-mode AD: its layers run "
            "on devices and in other threads. Differentiate the output of the pipeline:\n"
            "    loss = loss_fn(pipeline(x), y)\n"
            "    gradients = torch.autograd.grad(loss, list(pipeline.parameters()))\n"
            "or transform the model itself, pipeline.model."
        )


def return_outputs(ctx: Any, values: Sequence[HostValue]) -> tuple[torch.Tensor, ...]:
    """Return the output tensors of an autograd node, and mark tensors without a gradient as non-differentiable."""
    ctx.set_materialize_grads(False)
    pairs = [pair for on_host in values for pair in zip(on_host.tensors, on_host.needs_grad, strict=True)]
    ctx.mark_non_differentiable(*(tensor for tensor, needs_grad in pairs if not needs_grad))
    return tuple(tensor for tensor, _ in pairs)


class _Pipeline(torch.autograd.Function):
    """The node of a run in the caller's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Executor,
        run: Run,
        host_values: Sequence[HostValue],
        learned: Sequence[torch.Tensor],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        run.start_all(host_values)
        engine.execute(run, [stage for stage in run.spec.stages if stage.kind == "forward"])
        ctx.engine, ctx.run, ctx.learned = engine, run, learned
        ctx.backward_stages = [stage for stage in run.spec.stages if stage.kind == "backward"]
        ctx.flags = [on_host.needs_grad for on_host in host_values]
        ctx.sizes = [len(run.collected.outputs[number].tensors) for number in range(run.spec.num_microbatch)]
        run.remember_versions()
        engine.commit_forward(run)
        return return_outputs(ctx, [run.collected.outputs[number] for number in range(run.spec.num_microbatch)])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        engine, run = ctx.engine, ctx.run
        if torch.is_grad_enabled():
            raise StageError(
                "create_graph=True asks for second-order gradients, and a pipeline supports one backward. Use the "
                "model itself:\n    model = pipeline.model"
            )
        if run is None:
            raise StageError(
                "backward() already ran through this forward of the pipeline and freed its saved tensors; "
                "retain_graph has no effect. Call backward once for the sum of several losses, or call forward again:\n"
                "    (loss + other_loss).backward()"
            )
        ctx.run = None
        run.check_unchanged()
        run.version = engine.version()
        copies = iter([None if gradient is None else (gradient, NOW) for gradient in gradients])
        for number, size in enumerate(ctx.sizes):
            run.mailbox.put(("gradient", run.spec.span.stop, number), [next(copies) for _ in range(size)])
        with engine.lock:
            engine.execute(run, ctx.backward_stages)
            found_here = _take_gradients(run, ctx.learned)
            engine.commit_backward(run)
        return (None, None, None, None, None, *input_gradients(run, ctx.flags), *found_here)


def _learned(run: Run) -> list[torch.Tensor]:
    """Return the trained parameters whose gradients have the dtype of the parameter, without duplicates."""
    held = [parameter for layer in run.spec.span for parameter in run.spec.contents[layer].parameters()]
    store = run.store
    own = {id(p): p for p in held if p.requires_grad and store.gradient_dtype(p) == store.dtype_between(p) == p.dtype}
    return list(own.values())


def _take_gradients(run: Run, learned: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Remove the gradients of these parameters from a run, and return them, summed over the layers of a parameter."""
    totals: dict[int, torch.Tensor | None] = dict.fromkeys(map(id, learned))
    for layer in sorted(run.collected.gradients, reverse=True):
        for parameter in [parameter for parameter in run.collected.gradients[layer] if id(parameter) in totals]:
            gradient = arrived(run.collected.gradients[layer].pop(parameter))
            before = totals[id(parameter)]
            totals[id(parameter)] = gradient if before is None else added(before, gradient)
    return [totals[id(parameter)] for parameter in learned]


def input_gradients(run: Run, flags: Sequence[Sequence[bool]]) -> list[torch.Tensor | None]:
    """Return the gradients of the run's inputs that require a gradient, after the backward of the run."""
    # flags: for each microbatch, whether each input requires a gradient
    copies = run.collected.input_gradients
    pairs = [pair for number, own in enumerate(flags) for pair in zip(own, copies[number], strict=True)]
    return [None if copy is None else arrived(copy) for flag, copy in pairs if flag]


def arrived(copy: tuple[torch.Tensor, Any]) -> torch.Tensor:
    """Wait until the copy of a gradient to the host is complete, and return the copy."""
    gradient, ready = copy
    ready.result()
    return gradient


_apply = cast(Callable[..., tuple[torch.Tensor, ...]], _Pipeline.apply)
