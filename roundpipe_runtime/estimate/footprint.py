"""Count the memory and operations of torch code, and of each layer of a pipeline on one microbatch.

The layers run one after the other, each forward and backward. Parameters and inputs may be ``meta`` tensors, which use
no memory; each of them counts as a tensor of the same size on a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from yobx_flatten.core.private_names.of_torch import TorchDispatchMode, pytree

from ..device.protocol import NOW, Device, Event
from ..device.transfer import flatten_value
from ..engine.layer_graph import LayerGraph, Values, enter, plain
from ..engine.parameters.host_table import HostSum, HostTable, TableAccess
from ..optim.layer_contents import LayerContents, TableRule, scan

_ATEN = torch.ops.aten


class Footprint(TorchDispatchMode):
    """Counts bytes and floating point operations of the code in its ``with`` block, in this thread.

    A storage is counted once for all its views, from the operation that creates the storage until the storage is freed.

    >>> with Footprint() as found:
    ...     a = torch.empty(4, 8, device="meta")
    ...     b = (a @ a.T).sum()
    >>> found.alive, found.peak, found.flops
    (132, 196, 256)
    """

    # alive: bytes of the storages that were made in the block and are still alive
    # peak: largest value of `alive` since `restart`

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not annotate it
        self.alive = 0
        self.peak = 0
        self.flops = 0
        # Rows of grouped products, by the storage of their matrices.
        self.grouped: dict[int, int] = {}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the given tensors, which existed before the measurement."""
        for tensor in tensors:
            self._note(tensor, counted=False)

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was created outside of the with block, until the tensor is freed."""
        self._note(tensor, counted=True)

    def restart(self) -> int:
        """Start a new measurement of the peak, and return the bytes that are allocated now."""
        self.peak = self.alive
        return self.alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, counted=True)
        packet: Any = getattr(func, "_overloadpacket", None)
        if counts := _OWN.get(packet) or _OF_OTHERS.get(str(packet)):
            self.flops += counts(args)
        elif packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=out))
        if packet is _ATEN._grouped_mm and args[0].dim() == 2 and args[1].dim() == 3:
            self.grouped.setdefault(args[1].untyped_storage()._cdata, len(args[0]))
        return out

    def _note(self, tensor: torch.Tensor, *, counted: bool) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counted else 0
        self.alive += size
        self.peak = max(self.peak, self.alive)
        known = self._known

        def gone(_: object) -> None:
            known.pop(key, None)
            self.alive -= size

        known[key] = weakref.ref(storage, gone)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total bytes of tensors, counting repeated tensors once.

    >>> rows = torch.empty(4, 8)
    >>> storage_bytes([rows, rows, torch.empty(2)])
    136
    """
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


# -- floating point operations ---------------------------------------------------------------------------------------


def _grouped(args: Any) -> int:
    first: torch.Size = args[0].shape
    second: torch.Size = args[1].shape
    if len(first) == 2:  # rows times a matrix per group, or times other rows, for the gradients of the matrices
        return 2 * first.numel() * second[-1]
    return 2 * first.numel() * second[-1] // (first[0] if len(second) == 2 else 1)


def _attention(args: Any, count: Callable[..., int] = sdpa_flop_count) -> int:
    *gradient, query, key, value = (arg.shape for arg in args)
    groups = query[1] // key[1]  # several heads of the query may share a head of the key
    return count(*gradient, query, *((shape[0], shape[1] * groups, *shape[2:]) for shape in (key, value)))


# Operators of other libraries, by name, so that no library is imported. The third argument is the matrix's shape.
_OF_OTHERS = {"bitsandbytes.gemm_4bit": lambda args: 2 * int(args[0].numel()) * int(args[2][0])}

# Operators that torch's counter does not know.
_OWN: dict[Any, Callable[[Any], int]] = {
    _ATEN._grouped_mm: _grouped,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda args: _attention(args[:3]),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda args: _attention(
        args[:4], sdpa_backward_flop_count
    ),
}


_ATTENTION = functional.scaled_dot_product_attention


# Kernels for `meta` tensors that allocate the same results and saved tensors as the kernels of devices.
#
#     attention      on meta, torch allocates the scores of all pairs of tokens; kernels of devices do not
#     grouped_mm     products of experts; on meta, torch supports only bfloat16
#     bool(tensor)   undefined on meta; here True: models check whether a mask hides nothing


@contextlib.contextmanager
def device_kernels(kind: str = "cuda") -> Iterator[None]:
    """Context manager in which operations on ``meta`` tensors allocate what the kernels of real devices allocate.

    >>> q = torch.empty(1, 1, 4096, 64, device="meta", requires_grad=True)
    >>> kept = []
    >>> with device_kernels(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda t: t):
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> max(kept) == 4096 * 64
    True
    """
    # kind: the kind of the device; `"cpu"` has no kernel for attention with dropout
    with _Attention(drops=kind != "cpu"), _Operations():
        yield


class _Attention(TorchFunctionMode):
    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self.drops = drops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:  # its inner calls do not reach this mode
            with mock.patch.object(functional, "scaled_dot_product_attention", self._attend):
                return func(*args, **kwargs)
        return self._attend(*args, **kwargs) if func is _ATTENTION else func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        # memory-efficient kernels accept only these
        is_usual = query.dim() == 4 and value.shape[-1] == query.shape[-1] and key.shape[0] == query.shape[0]
        shares = key.shape[1] == query.shape[1] or enable_gqa
        is_trainable = attn_mask is not None and attn_mask.requires_grad
        if query.is_meta and is_usual and shares and (self.drops or not dropout_p) and not is_trainable:
            found: torch.Tensor = _ATEN._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
            return found
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


# Operations that return one new tensor, and for which torch derives shape and strides slowly.
_SLOW_ON_META = {
    _ATEN.add, _ATEN.sub, _ATEN.mul, _ATEN.div, _ATEN.floor_divide, _ATEN.mm, _ATEN.addmm, _ATEN.neg, _ATEN.pow,
    _ATEN.rsqrt, _ATEN.mean, _ATEN.sum, _ATEN.cumsum, _ATEN.cat, _ATEN.silu, _ATEN.gelu, _ATEN.exp,
}  # fmt: skip


class _Operations(TorchDispatchMode):
    """Caches results of slow operations on ``meta`` by the shapes, strides, dtypes and values of their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not annotate it
        self._known: dict[Hashable, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN._grouped_mm.default and args[0].is_meta:
            return _meta_grouped(*args, **kwargs)
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        if func._overloadpacket not in _SLOW_ON_META or "out" in kwargs:
            return func(*args, **kwargs)
        try:
            key = (func, *map(_form, args), *((name, _form(value)) for name, value in kwargs.items()))
            known = self._known.get(key)
        except TypeError:  # an argument without a hash, or an unusual tensor
            return func(*args, **kwargs)
        if known is not None:
            size, stride, dtype = known
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        out = func(*args, **kwargs)
        self._known[key] = (out.shape, out.stride(), out.dtype)
        return out


def _meta_grouped(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    rows, columns = first.shape[-2], second.shape[-1]
    groups: tuple[int, ...] = ()
    if first.dim() == second.dim():  # a product for each group: two stacks of matrices, or columns in groups
        assert first.dim() == 3 or offs is not None
        groups = (first.shape[0] if first.dim() == 3 or offs is None else offs.shape[0],)
    return first.new_empty(*groups, rows, columns, dtype=out_dtype or first.dtype)


def _form(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        is_usual = type(value) in (torch.Tensor, nn.Parameter) and value.is_meta and value.layout == torch.strided
        if not is_usual or value.dtype.is_complex:  # it may be a lazy conjugate
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_form, value))
    return type(value), value  # 1 and 1.0 are equal, and promote to different dtypes


# -- layers ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class LayerFootprint:
    """The device memory (in bytes) and the number of operations that one layer needs for one microbatch.

    Attributes:
        name: name of the layer.
        param_bytes: size of parameters and buffers, which are copied to the device.
        grad_bytes: size of the summed gradients of parameters, which are copied to the host.
        inputs: size of the input tensors.
        outputs: size of the output tensors; an input that is returned counts as input and as output.
        grads_in: size of the gradients of the inputs.
        grads_out: size of the gradients of the outputs.
        forward_peak: peak memory of the forward with its autograd graph, without the inputs.
        held: memory in use after the forward: tensors saved for backward, and new outputs. Inputs are not counted.
        backward_peak: peak memory of the backward. It includes the tensors that the forward saved, but not ``inputs``,
            ``grads_out`` and ``grad_bytes``.
        forward_flops: number of operations of a forward.
        backward_flops: number of operations of a backward, without the recomputed forward.
        frozen_bytes: size of the frozen parameters, which ``param_bytes`` includes (default: 0).
        trained_bytes: size of the trained parameters, which ``param_bytes`` includes (default: 0).
        slice_bytes: size of the slices of large embedding and head matrices that are on a device at one time.
            ``param_bytes`` includes this size.
        parts_forward: size of the embedding rows and head slices that a forward copies to the device (default: 0).
        parts_backward: size of the embedding rows and head slices that a backward copies to the device, without the
            recomputed forward (default: 0).
        parts_down: size of gradients of embedding rows and head slices that a backward copies to the host (default: 0).
        table_grad_bytes: size of gradients of whole embedding and head matrices; these gradients are only on the host.
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
        """Size of the layer's buffers in bytes; a layer with buffers is copied to the device again for its backward."""
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
        start: index of the first layer to measure (default: 0). Earlier layers run, but are not measured.
        rule: object that selects the large embedding and head matrices to copy in parts (default: no matrix).

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
    """A fake device that counts how many bytes of large embedding and head matrices a real device would copy."""

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
    """In a ``with`` block, replace large embedding and head matrices with placeholders that count copied bytes."""
    parts, places, no_sum = Parts(), [], functools.partial(_NoSum, torch.empty(0))
    device, made = cast(Device, parts), dict[int, nn.Parameter]()
    for slot in contents.slots:
        parameter = slot.parameter
        if (table := contents.tables.get(id(parameter))) is None:
            continue
        if id(parameter) not in made:
            access = TableAccess(device, parameter, table, requires_grad=parameter.requires_grad, new_sum=no_sum)
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
