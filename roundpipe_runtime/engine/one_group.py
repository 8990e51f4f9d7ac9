"""Run a batch as one group of rows in one process, and join the outputs of its microbatches."""

# one group          split the batch, run the group, commit the results
# several groups     split the batch, run each group, wait until all ranks have succeeded, commit the sums: a subclass
#                    of `OneGroup` in `distributed/replicas/rank_groups`

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from yobx_flatten.core.private_names.of_torch import pytree

from ..batch.entries import FlatMicrobatch
from ..batch.joining import common_spec, join
from ..batch.loss import LossContract, Reduction
from ..batch.spec import RoundPipePackedData
from ..device.transfer import HostValue, separate
from ..device.worker import noting
from ..optim.layer_contents import LayerContents
from ..optim.parameters import ParameterStore
from ..optim.readiness import ReadinessTable
from ..optim.step import StepRunner
from .config import RoundPipeRunConfig
from .parameters.on_device import Gradients
from .run import Run, arrived


class OneGroup:
    """Runs a pipeline in one process without ``replicas``: each batch is one group of rows."""

    # `engine` is the `Engine` of `driver`, whose base class imports this file

    replicas: int = 1  # number of groups of the batch
    is_first: bool = True  # whether this process emits warnings

    @property
    def own(self) -> range:
        return range(1)

    def make_store(self, model: nn.Module, optim_dtype: torch.dtype | None) -> ParameterStore:
        return ParameterStore(model, optim_dtype)

    def make_steps(
        self, store: ParameterStore, table: ReadinessTable, scan: Callable[[], Sequence[LayerContents]]
    ) -> StepRunner:
        return StepRunner(store, table, scan)

    def begin(self, engine: Any, model: nn.Module) -> None:
        """Check that all ranks create the same engine and model; no effect with one process."""

    def entering(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that sends errors to ranks that wait for this rank; no effect with one process."""
        return contextlib.nullcontext()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which gradients accumulate on this rank only; no effect with one process."""
        return contextlib.nullcontext()

    def stopping(self, run: Run) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which an error of another rank stops the work of ``run`` on this rank."""
        return contextlib.nullcontext()

    def rows_of_batch(self, rows: int) -> int:
        return rows

    def forward(self, engine: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: RoundPipeRunConfig) -> Any:
        return engine.forward_here(args, kwargs, config)

    def calling(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which an error of another rank stops the pipeline call on this rank."""
        return contextlib.nullcontext()

    def open(self, engine: Any, name: str, cut: Callable[[], Cutting], config: RoundPipeRunConfig) -> Call:
        parts, reduction = cut()
        rows = [microbatch.rows for part in parts for microbatch in part]
        return Call(parts, [0], LossContract(reduction or "sum", rows))

    def summed(self, engine: Any, call: Any, work: Callable[[], None]) -> Any:
        work()
        [(run, inputs)] = call.runs
        total = pytree.tree_map(torch.Tensor.cpu, call.contract.total())
        engine.wait_step(run)
        feed_inputs(run, inputs, call.contract.gradient_scale())
        engine.commit(run)
        return total

    def clear(self) -> None:
        """Discard accumulated gradients that have not been added to ``parameter.grad`` yet."""

    def close(self) -> None: ...


def merge_outputs(
    outputs: Sequence[Any], weights: Sequence[float | None], rows: Sequence[int | None], config: RoundPipeRunConfig
) -> Any:
    # weights: weight of each microbatch in an average
    # rows: rows of each microbatch, `None` if not known
    with noting(f"The error occurred while the outputs of {len(outputs)} microbatches were joined."):
        if config.merge_output is False:  # each leaf is replaced by the leaves of all microbatches
            spec = common_spec(outputs)  # raises an error if the structures differ
            columns = zip(*map(pytree.tree_leaves, outputs), strict=True)
            return pytree.tree_unflatten([RoundPipePackedData(column, rows=rows) for column in columns], spec)
        joined = join(outputs, weights, rows=rows, merge=config.merge_output)
    device = torch.device(config.output_device or "cpu")
    if device.type == "cpu":
        return joined
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), joined)


class Cutting(NamedTuple):
    parts: list[list[FlatMicrobatch]]  # microbatches of each group of this process
    reduction: Reduction | None = "sum"  # how the losses of microbatches add up; `None` if the rows do not prove it


@dataclasses.dataclass(slots=True)
class Call:
    """One call of ``forward_backward``; its batch is split into groups of rows, and each group into microbatches."""

    parts: list[list[FlatMicrobatch]]  # microbatches of each group of this process
    firsts: list[int]  # index of the first microbatch of each group of this process in the batch
    contract: LossContract  # collects the losses of the batch
    seed: int = 0  # seed of random layers; 0 for a seed from the state of torch's generator
    # runs of groups that have succeeded, with their inputs
    runs: list[tuple[Run, list[HostValue]]] = dataclasses.field(default_factory=list)
    # function that gets the number of a group, a layer and its gradients when they arrive; `None`: the run keeps them
    land: Callable[[int, int, Gradients], None] | None = None

    def losses(self, turn: int) -> LossContract:
        """Return the object that collects the losses of one group of batch rows."""
        # turn: index of the group in this process
        return self.contract

    def add(self, run: Run, inputs: list[HostValue]) -> None:
        run.collected.buffers.check()
        self.runs.append((run, inputs))


# Tensors of a batch and their copies in pinned memory, by the identity of the tensor.
PinnedCopies: TypeAlias = dict[int, tuple[torch.Tensor, torch.Tensor]]


def host_value(
    leaves: Sequence[Any], spec: pytree.TreeSpec, *, requires_grad: bool, what: str, pinned: PinnedCopies | None = None
) -> HostValue:
    # pinned: registry of pinned copies, to which the copies of these leaves are added. Default: no pinning.
    structure, tensors = separate(leaves, spec, what=what)
    # the copy waits for the caller's work on the accelerator, in a stream that the pipeline's devices do not know
    tensors = [tensor if tensor.device.type in ("cpu", "meta") else tensor.cpu() for tensor in tensors]
    flags = [requires_grad and tensor.requires_grad for tensor in tensors]
    for number, tensor in enumerate(() if pinned is None else tensors):
        # A copy from pageable memory blocks the thread that launches the next microbatches.
        is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if pinned is not None and is_plain and not flags[number] and not tensor.is_pinned():
            if id(tensor) not in pinned:
                pinned[id(tensor)] = tensor, tensor.detach().pin_memory()
            tensors[number] = pinned[id(tensor)][1]
    return HostValue(structure, tensors, flags, [None] * len(tensors))


def feed_inputs(run: Run, host_values: Sequence[HostValue], scale: float) -> None:
    """Continue the backward into the autograd graph that computed the pipeline's inputs, such as another pipeline."""
    # scale: factor for the gradients, which is known after all losses of the batch
    tensors, gradients = [], []
    for number, on_host in enumerate(host_values):
        for tensor, copy in zip(on_host.tensors, run.collected.input_gradients.get(number, []), strict=False):
            if copy is not None and tensor.requires_grad:
                gradient = arrived(copy)
                tensors.append(tensor)
                gradients.append(gradient.mul_(scale) if scale != 1.0 else gradient)
    if tensors:
        torch.autograd.backward(tensors, gradients)
