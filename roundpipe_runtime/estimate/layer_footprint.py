"""Measure the memory and operations of each layer of a pipeline on one microbatch.

Layers are called one by one, forward and backward, as a stage calls them. Parameters and batch may be on ``meta``,
where tensors use no memory, so the time of a measurement does not depend on the size of a layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..device.protocol import NOW, Event
from ..device.transfer import flatten_value
from ..engine.layer_graph import LayerGraph, Values, enter, plain
from ..engine.parameters.host_table import HostSum, HostTable, TableAccess
from ..optim.layer_contents import LayerContents, TableRule, scan
from .footprint import Footprint, device_kernels, storage_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LayerFootprint:
    """Memory, in bytes on the device, and operations of a layer on one microbatch.

    Attributes:
        name: name of the layer.
        param_bytes: size of parameters and buffers, which are copied to the device.
        grad_bytes: size of the summed gradients of parameters, which are copied to the host.
        inputs: size of the input tensors.
        outputs: size of the output tensors; an input that is returned counts as input and as output.
        grads_in: size of the gradients of the inputs.
        grads_out: size of the gradients of the outputs.
        forward_peak: peak memory of the forward with its autograd graph, without the inputs.
        held: memory in use after the forward, without the inputs: tensors saved for backward, and new outputs.
        backward_peak: peak memory of the backward, with the tensors that the forward saved, without ``inputs``,
            ``grads_out`` and ``grad_bytes``.
        forward_flops: number of operations of a forward.
        backward_flops: number of operations of a backward, without the recomputed forward.
        frozen_bytes: size of the frozen parameters, which ``param_bytes`` includes (default: 0).
        trained_bytes: size of the trained parameters, which ``param_bytes`` includes (default: 0).
        slice_bytes: size of the slices of large embedding or head matrices (tables) on a device at one time, which
            ``param_bytes`` includes.
        parts_forward: size of the embedding rows and head slices that a forward copies to the device (default: 0).
        parts_backward: size of the embedding rows and head slices that a backward copies to the device, without the
            recomputed forward (default: 0).
        parts_down: size of the gradients of embedding rows and head slices, which are copied to the host (default: 0).
        table_grad_bytes: size of the gradients of whole large embedding or head matrices, which are only on the host.
        expert_bytes: size of the parameters with one matrix per expert, which ``param_bytes`` includes (default: 0).
        experts: number of experts (default: 0).
        routed_rows: number of products of a token with an expert: tokens times the number of experts per token
            (default: 0).
        experts_train: whether the experts train (default: ``False``).
    """

    name: str
    param_bytes: int
    grad_bytes: int
    inputs: int
    outputs: int
    grads_in: int
    grads_out: int
    forward_peak: int
    held: int
    backward_peak: int
    forward_flops: int
    backward_flops: int
    frozen_bytes: int = 0
    trained_bytes: int = 0
    slice_bytes: int = 0
    parts_forward: int = 0
    parts_backward: int = 0
    parts_down: int = 0
    table_grad_bytes: int = 0
    expert_bytes: int = 0
    experts: int = 0
    routed_rows: int = 0
    experts_train: bool = False

    @property
    def buffer_bytes(self) -> int:
        """Size of the layer's buffers; a layer that has buffers is copied to the device again for its backward."""
        return self.param_bytes - self.frozen_bytes - self.trained_bytes - self.slice_bytes


def measure_layers(
    layers: Sequence[nn.Module],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    names: Sequence[str] | None = None,
    gradient_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
    last_call: Callable[[nn.Module, Any], Any] | None = None,
    kind: str = "cuda",
    start: int = 0,
    rule: TableRule | None = None,
) -> list[LayerFootprint]:
    """Measure memory and operations of each layer on one microbatch, forward and backward.

    Args:
        layers: the layers of a pipeline in order, each in the mode (train or eval) that the training uses.
        args: positional arguments of the first layer; each later layer gets the output of the previous layer.
        kwargs: keyword arguments of the first layer.
        names: the names of the layers (default: index and class of each layer).
        gradient_dtype: the dtype in which gradients of a parameter are summed.
        last_call: function that calls the last layer (default: ``layer(value)``).
        kind: device type of the planned machine, such as ``"cuda"``; ``"cpu"`` for virtual devices.
        start: index of the first layer that is measured; earlier layers are only called (default: 0, all layers).
        rule: rule by which large embedding and head matrices are copied in parts (default: none).

    Returns:
        The memory and operations of each layer that is measured.

    >>> big = nn.Sequential(nn.Linear(50_000, 50_000, device="meta"), nn.ReLU())
    >>> first, second = measure_layers(list(big), (torch.empty(8, 50_000, device="meta"),))
    >>> first.param_bytes, first.forward_flops, second.held
    (10000200000, 40000000000, 1600000)
    """
    contents = (rule or TableRule()).mark(scan(layers))
    found = []
    values: Any = (tuple(args), dict(kwargs or {}))
    structure, tensors = flatten_value(values, what="inputs")
    given = Values(structure, tensors, [False] * len(tensors))
    with device_kernels(kind), torch.enable_grad():
        for index, one in enumerate(contents):
            call: Callable[[Any], Any] = one.module
            if last_call is not None and index == len(contents) - 1:
                call = functools.partial(last_call, one.module)
            elif index == 0:  # as in a stage: the first layer has the arguments of the model
                call = functools.partial(_call_first, one.module)
            if index < start:
                _, given = _called(one, call, given)
                continue
            name = names[index] if names is not None else one.title
            with standing_tables(one) as parts:
                footprint, given = _measure(name, one, call, given, gradient_dtype, parts)
            found.append(footprint)
    return found


def _call_first(module: nn.Module, value: Any) -> Any:
    args, kwargs = value
    return module(*args, **kwargs)


def _called(contents: LayerContents, call: Callable[[Any], Any], given: Values) -> tuple[LayerGraph, Values]:
    """Call a layer; return the autograd graph of the call, and the inputs of the next layer."""
    entries, entered = enter(given, as_leaves=False)
    structure, exits = flatten_value(call(given.structure.rebuild(entered)), what=f"the output of {contents.title}")
    results = Values(structure, [plain(tensor) for tensor in exits], [exit_.requires_grad for exit_ in exits])
    return LayerGraph(contents.index, entries, exits), results


def _measure(
    name: str,
    contents: LayerContents,
    call: Callable[[Any], Any],
    given: Values,
    gradient_dtype: Callable[[nn.Parameter], torch.dtype],
    parts: Parts,
) -> tuple[LayerFootprint, Values]:
    held_here = [parameter for parameter in contents.parameters() if id(parameter) not in contents.tables]
    trained = [parameter for parameter in held_here if parameter.requires_grad]
    tables = [parameter for parameter in contents.parameters() if id(parameter) in contents.tables]
    for parameter in trained:  # sums exist from the second microbatch; those of other dtypes are on the host
        parameter.grad = torch.empty_like(parameter) if gradient_dtype(parameter) == parameter.dtype else None
    sums = [parameter.grad for parameter in trained if parameter.grad is not None]
    held_before = [*given.tensors, *contents.parts(), *(buffer.tensor for buffer in contents.buffers), *sums]
    with Footprint() as found:
        found.ignore(held_before)
        graph, results = _called(contents, call, given)
    forward_peak, held, forward_flops, parts_forward = found.peak, found.restart(), found.flops, parts.up
    own = {parameter.untyped_storage()._cdata: parameter for parameter in contents.parameters()}
    grouped = [(rows, own[key]) for key, rows in found.grouped.items() if key in own]
    found.grouped.clear()
    starts = [(exit_, torch.empty_like(exit_)) for exit_ in graph.exits if exit_.requires_grad]
    with found:
        found.ignore(gradient for _, gradient in starts)
        if starts:
            torch.autograd.backward([exit_ for exit_, _ in starts], [gradient for _, gradient in starts])
        reached = [p for p in trained if p.grad is not None and (p.grad._version or p.grad.dtype != gradient_dtype(p))]
        for parameter in reached:
            gradient, dtype = parameter.grad, gradient_dtype(parameter)
            if gradient is not None and gradient.dtype != dtype:
                parameter.grad = None
                # while it is added; a wider sum takes it directly
                gradient = gradient if torch.promote_types(gradient.dtype, dtype) == dtype else gradient.to(dtype)
    footprint = LayerFootprint(
        name=name,
        param_bytes=contents.nbytes(),
        grad_bytes=sum(p.numel() * gradient_dtype(p).itemsize for p in reached),
        inputs=storage_bytes(given.tensors),
        outputs=storage_bytes(results.tensors),
        grads_in=storage_bytes(e.grad for e in graph.entries if e is not None and e.grad is not None),
        grads_out=storage_bytes(gradient for _, gradient in starts),
        forward_peak=forward_peak,
        held=held,
        backward_peak=found.peak,
        forward_flops=forward_flops,
        backward_flops=found.flops - forward_flops,
        frozen_bytes=storage_bytes(
            part for part in contents.parts() if not part.requires_grad and id(part) not in contents.tables
        ),
        trained_bytes=storage_bytes(trained),
        slice_bytes=sum(map(contents.nbytes_of, tables)),
        parts_forward=parts_forward,
        parts_backward=parts.up - parts_forward,
        parts_down=parts.down,
        table_grad_bytes=sum(p.numel() * gradient_dtype(p).itemsize for p in tables if p.requires_grad),
        expert_bytes=storage_bytes(parameter for _, parameter in grouped),
        experts=max((len(parameter) for _, parameter in grouped), default=0),
        routed_rows=max((rows for rows, _ in grouped), default=0),
        experts_train=any(parameter.requires_grad for _, parameter in grouped),
    )
    for parameter in trained:
        parameter.grad = None
    return footprint, results


class Parts:
    """Counts the bytes of embedding rows and head slices that a device would copy, without copying anything."""

    torch_device = torch.device("meta")

    def __init__(self) -> None:
        self.up = self.down = 0

    def copy_in(self, tensor: torch.Tensor) -> torch.Tensor:
        self.up += tensor.nbytes
        return tensor

    def copy_out(self, tensor: torch.Tensor, *, last: bool, parameter: bool = False) -> tuple[torch.Tensor, Event]:
        self.down += tensor.nbytes
        return tensor, NOW

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def release(self, tensors: Iterable[torch.Tensor]) -> None: ...


class _NoSum(HostSum):
    """A gradient sum that ignores all gradients, so that it uses no memory."""

    def add(self, place: torch.Tensor | slice, gradient: torch.Tensor, arrived: Event, *, waiting: int) -> None: ...


@contextlib.contextmanager
def standing_tables(contents: LayerContents) -> Iterator[Parts]:
    """Replace large embedding and head matrices by placeholders in the with block; yield a counter of copied bytes."""
    parts, places = Parts(), []
    made: dict[int, nn.Parameter] = {}
    for slot in contents.slots:
        parameter = slot.parameter
        if (table := contents.tables.get(id(parameter))) is None:
            continue
        if id(parameter) not in made:
            access = TableAccess(
                parts, parameter, table, requires_grad=parameter.requires_grad, new_sum=lambda: _NoSum(torch.empty(0))
            )
            stands = HostTable(access, requires_grad=parameter.requires_grad)
            made[id(parameter)] = cast(nn.Parameter, stands)
        places.append((slot.owner._parameters, slot.name, parameter))
    try:
        for held, name, parameter in places:
            held[name] = made[id(parameter)]
        yield parts
    finally:
        for held, name, parameter in places:
            held[name] = parameter
