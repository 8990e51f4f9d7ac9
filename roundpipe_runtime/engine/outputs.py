"""Join or pack the outputs of a run's microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from yobx_flatten.private_names.of_torch import pytree

from ..batch.entries import FlatMicrobatch
from ..batch.joining import common_spec, join
from ..batch.loss import LossContract, Reduction
from ..batch.spec import RoundPipePackedData
from ..device.transfer import HostValue, separate
from ..device.worker import noting
from .config import RoundPipeRunConfig
from .parameters.on_device import Gradients
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


# One call of ``forward_backward``: what it runs, and what its runs have found so far.


class Cutting(NamedTuple):
    """A batch in microbatches."""

    parts: list[list[FlatMicrobatch]]  # microbatches of each group of this process
    reduction: Reduction | None = "sum"  # how their losses add up; `None` where its rows do not show it


@dataclasses.dataclass(slots=True)
class Call:
    """One call of ``forward_backward``, whose rows are cut into groups, and each group into microbatches."""

    parts: list[list[FlatMicrobatch]]  # microbatches of each group of this process
    firsts: list[int]  # index of the first microbatch of each group of this process in the batch
    contract: LossContract  # contract of the losses of the batch
    seed: int = 0  # seed of random layers; 0 for that of the caller's generator
    # runs of groups that have succeeded, with their inputs
    runs: list[tuple[Run, list[HostValue]]] = dataclasses.field(default_factory=list)
    # function that is given gradients as they land, by number of the group and layer; `None` where they stay in the run
    land: Callable[[int, int, Gradients], None] | None = None

    def losses(self, turn: int) -> LossContract:
        """Return the object that collects the losses of a group."""
        return self.contract

    def add(self, run: Run, inputs: list[HostValue]) -> None:
        """Add the successful run of a group."""
        run.collected.buffers.check()
        self.runs.append((run, inputs))


# Move the inputs of a run to the host, and pass the gradients of inputs back.


# Tensors of a batch and their copies in pinned memory, by the identity of the tensor.
PinnedCopies: TypeAlias = dict[int, tuple[torch.Tensor, torch.Tensor]]


def host_value(
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    *,
    requires_grad: bool,
    what: str,
    pinned: PinnedCopies | None = None,
) -> HostValue:
    """Return leaves of a microbatch as a value on the host."""
    # pinned: copies of tensors that microbatches share, to which those of this one are added. Default: nothing is
    # pinned.
    # returns: the value; it is complete, also where the caller computed it on an accelerator
    structure, tensors = separate(leaves, spec, what=what)
    tensors = [_on_host(tensor) for tensor in tensors]
    flags = [requires_grad and tensor.requires_grad for tensor in tensors]
    if pinned is not None:
        # A copy from pageable memory holds the thread that launches the next microbatches.
        tensors = [t if flag else _pinned(t, pinned) for t, flag in zip(tensors, flags, strict=True)]
    return HostValue(structure, tensors, flags, [None] * len(tensors))


def feed_inputs(run: Run, host_values: Sequence[HostValue], scale: float) -> None:
    """Continue backward from the inputs if they are part of a graph, such as that of another pipeline."""
    # scale: factor for their gradients, known when all losses of the batch are
    tensors, gradients = [], []
    for number, on_host in enumerate(host_values):
        for tensor, copy in zip(on_host.tensors, run.collected.input_gradients.get(number, []), strict=False):
            if copy is not None and tensor.requires_grad:
                gradient, ready = copy
                ready.result()
                tensors.append(tensor)
                gradients.append(gradient.mul_(scale) if scale != 1.0 else gradient)
    if tensors:
        torch.autograd.backward(tensors, gradients)


def _pinned(tensor: torch.Tensor, pinned: PinnedCopies) -> torch.Tensor:
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.is_pinned():
        return tensor
    if id(tensor) not in pinned:
        pinned[id(tensor)] = tensor, tensor.detach().pin_memory()
    return pinned[id(tensor)][1]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for what the caller computed on an accelerator, on a stream that no device of ours knows."""
    return tensor if tensor.device.type in ("cpu", "meta") else tensor.cpu()
