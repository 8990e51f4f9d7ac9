"""Run each layer call as a separate autograd graph, also with activation checkpointing inside the layer."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

import torch

from yobx_flatten.core.private_names.of_torch import tensor_use_count

from ..device.transfer import TreeStructure
from ..device.worker import generator_alone
from ..errors import StageError
from ..optim.layer_contents import LayerContents
from .draws import traits_of

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class Values:
    structure: TreeStructure
    tensors: list[torch.Tensor]
    needs_grad: list[bool]


@dataclasses.dataclass(slots=True)
class LayerGraph:
    layer: int
    entries: list[torch.Tensor | None]
    exits: list[torch.Tensor]

    def backward(
        self, gradients: Sequence[torch.Tensor | None], run: Callable[[Callable[[], None]], None] = operator.call
    ) -> list[torch.Tensor | None]:
        # gradients: gradients of the outputs, `None` for an output without one
        # run: function that calls its argument, which runs the backward. Default: the backward runs directly.
        pairs = zip(self.exits, gradients, strict=True)
        known = [(exit_, gradient) for exit_, gradient in pairs if gradient is not None and exit_.requires_grad]
        if known:
            run(partial(_go_back, *zip(*known, strict=True)))
        return [None if entry is None else entry.grad for entry in self.entries]


# The core of `torch.autograd.backward`. The function itself would run without the caller's `TorchFunctionMode`, and a
# trial turns dropout off by such a mode, also in the forward that a reentrant checkpoint repeats in the backward.
_run_engine = getattr(torch.autograd.graph, "_engine_run_backward", None)


def _go_back(starts: tuple[torch.Tensor, ...], seeds: tuple[torch.Tensor, ...]) -> None:
    if _run_engine is None or {type(start) for start in starts} != {torch.Tensor}:
        torch.autograd.backward(starts, seeds)
    else:
        _run_engine(starts, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Enter(torch.autograd.Function):
    """Passes a leaf to a layer as a non-leaf tensor, because torch refuses in-place writes to a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


_enter_leaf = cast(Callable[[torch.Tensor], torch.Tensor], _Enter.apply)


def enter(values: Values, *, as_leaves: bool) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Return leaves of a new autograd graph for a layer's inputs, and the tensors with which the layer is called."""
    # as_leaves: whether the layer gets the leaves themselves; faster, but torch refuses in-place writes to a leaf
    # returns: for each input, the leaf, or `None` if no gradient flows through the input; and the tensors for the layer
    if not torch.is_grad_enabled():
        return [None] * len(values.tensors), list(values.tensors)
    entries: list[torch.Tensor | None] = []
    entered = []
    for tensor, flag in zip(values.tensors, values.needs_grad, strict=True):
        leaf = tensor.detach().requires_grad_() if flag else None
        entries.append(leaf)
        entered.append(tensor if leaf is None else leaf if as_leaves else _enter_leaf(leaf))
    return entries, entered


def other_leaves(losses: Sequence[torch.Tensor], entries: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the leaves in the autograd graph of losses, except the model outputs in ``entries``.

    The returned tensors are parameters of the loss function, or model parameters that a penalty term reads.

    >>> weight, output = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> other_leaves([(weight * output).sum()], [output])
    [tensor([1.], requires_grad=True)]
    """
    own = {id(entry) for entry in entries if entry is not None}
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn for loss in losses]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in own:
            found[id(node.variable)] = node.variable
        waiting += [before for before, _ in node.next_functions]
    return list(found.values())


def is_refused_write(error: Exception) -> bool:
    return "leaf Variable that requires grad" in str(error)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor; clone it if a copy between host and device would change its strides or its storage offset."""
    tensor = tensor.detach()
    if tensor.layout == torch.strided and (
        tensor.storage_offset() or not (tensor.is_contiguous() or _is_dense(tensor))
    ):
        return tensor.clone()
    return tensor


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# Activation checkpointing inside a layer or a loss (`torch.utils.checkpoint`): backward calls forward code again.
#
# A checkpoint sets the CPU generator, which all threads share, to the state before its forward, calls the code again,
# and restores the generator, on any device. Meanwhile no other thread may draw.
#
# A profiler detects which layers use checkpoints. On the CPU, the profiler runs in the first backward. On an
# accelerator, the backward runs in one of autograd's threads, which the profiler does not see, so the profiler runs in
# the first forward.


def run_backward(call: Callable[[], T], code: Any, device: torch.device) -> T:
    """Run a backward; lock the CPU's random generator if the backward may recompute a forward (checkpointing)."""
    # A profiler looks for checkpointing in the first call of each layer only, so checkpointing that starts later is
    # missed. If the thread already has a profiler, checkpointing cannot be detected, so each backward takes the lock.
    if traits_of(code).reenters.get(bool(getattr(code, "training", True))) is False:
        return call()
    with generator_alone():
        return _watch(call, code) if device.type == "cpu" else call()


def watch_forward(call: Callable[[], T], code: Any, device: torch.device) -> T:
    """Run a forward; on an accelerator, detect whether the forward uses activation checkpointing."""
    return call() if device.type == "cpu" or not torch.is_grad_enabled() else _watch(call, code)


def _watch(call: Callable[[], T], code: Any) -> T:
    """Return ``call()``, and record whether torch's checkpoint code has run in the call."""
    reenters, mode = traits_of(code).reenters, bool(getattr(code, "training", True))
    if mode in reenters or sys.getprofile() is not None:
        return call()
    file = getattr(sys.modules.get("torch.utils.checkpoint"), "__file__", None)
    seen: list[str] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == file:
            seen.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        result = call()
    finally:
        is_alone = sys.getprofile() is look
        if is_alone:  # a profiler that was started meanwhile stays
            sys.setprofile(None)
    if is_alone or seen:
        reenters[mode] = bool(seen)
    return result


# Attribute of the device copy of a parameter: the original parameter.
HOST_PARAMETER = "_roundpipe_parameter"


def check_leaves(
    layer: LayerContents,
    exits: Sequence[torch.Tensor],
    entries: Sequence[torch.Tensor | None],
    own: Sequence[torch.Tensor],
    layers: Sequence[LayerContents],
) -> None:
    """Raise an error if gradients of a layer flow to tensors other than inputs and parameters of the layer."""
    # exits: outputs of the layer; entries: inputs of the layer, `None` for an input without a gradient
    # own: parameters of the layer on the device
    known = {id(tensor) for tensor in own}
    for leaf in other_leaves(exits, entries):
        # a leaf that nothing else references was created inside the layer, and no code can read its gradient
        if id(leaf) in known or sys.getrefcount(leaf) <= _LOOSE:
            continue
        held = ((slot, other) for other in layers for slot in other.slots)
        parameter = getattr(leaf, HOST_PARAMETER, leaf)  # the other layer may be running, with device copies
        owner = next(((slot.name, other.title) for slot, other in held if slot.parameter is parameter), None)
        if owner is not None:
            raise StageError(
                f"{layer.title} uses {owner[0]!r} of {owner[1]}. The parameter's gradient would be wrong, because the "
                "backward of a layer reaches its own parameters only. Register the parameter in both layers:\n"
                "    layer.other = parameter"
            )
        attributes = [(part, *pair) for part in layer.module.modules() for pair in vars(part).items()]
        tensors = [one for one in attributes if isinstance(one[2], torch.Tensor) and one[2].requires_grad]
        names = [f"{type(part).__name__}.{name}" for part, name, _ in tensors]
        what = f"reads {names[0]}" if names else "reads a tensor"
        raise StageError(
            f"{layer.title} {what} of shape {tuple(leaf.shape)}, which requires a gradient, but is not an input or "
            "parameter of the layer. Its gradient would be wrong, as the backward reaches only inputs and parameters. "
            "Make the tensor an input or a parameter:\n    model(x, delta)\n    layer.delta = torch.nn.Parameter(delta)"
        )


def _references() -> int:
    with torch.inference_mode(False), torch.enable_grad():  # this module may be imported under `torch.no_grad()`
        tensor = torch.ones((), requires_grad=True) * 1
        return max(sys.getrefcount(leaf) for leaf in other_leaves([tensor], []))


# Reference count of a graph leaf, in a loop over the result of `other_leaves`, if nothing else refers to it.
_LOOSE = _references()


def watch_escaped(leaves: Sequence[torch.Tensor | None], title: str) -> None:
    """Make a later backward raise an error if it reaches a layer call by a tensor that the layer did not return."""
    # leaves: inputs or parameters of a call that has ended; only an escaped tensor can still refer to them
    for leaf in leaves:
        if leaf is not None and leaf.requires_grad and tensor_use_count(leaf) > 1:
            leaf.register_hook(partial(_refuse, title))


def _refuse(title: str, gradient: torch.Tensor) -> NoReturn:
    raise StageError(
        f"A tensor was taken from {title} by an attribute or a hook, not as an output. The tensor's gradient would be "
        "lost, because the backward of a layer begins at the layer's outputs. Return the tensor:\n"
        "    return outputs, auxiliary_loss"
    )
