"""Count the memory and operations of torch code; a tensor on ``meta`` counts as much as on a device."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from yobx_flatten.private_names.of_torch import TorchDispatchMode, pytree

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

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not annotate it
        self.alive = 0
        self.peak = 0
        self.flops = 0
        # Rows of grouped products, by the storage of their matrices.
        self.grouped: dict[int, int] = {}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
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
    """Return the operations of a grouped product, in which each row is multiplied by the matrix of its group."""
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


class _Operations(TorchDispatchMode):
    """Computes on ``meta`` once for each form of the arguments; later results have the same shape, stride and dtype.

    Results are cached only for torch operations that return one new tensor, not for views or in-place operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not annotate it
        self._known: dict[Hashable, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN._grouped_mm.default and args[0].is_meta:
            return _meta_grouped(*args, **kwargs)
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        if not _makes_new(func):
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
        if _is_new(out, [*args, *kwargs.values()]):
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


@functools.cache
def _makes_new(func: Any) -> bool:
    """Return whether, by its schema, an operation returns one tensor that shares no memory with an argument."""
    schema = func._schema
    return (
        schema.name.startswith("aten::")
        and len(schema.returns) == 1
        and isinstance(schema.returns[0].type, torch.TensorType)
        and all(value.alias_info is None for value in (*schema.arguments, *schema.returns))
    )


def _form(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        is_usual = type(value) in (torch.Tensor, nn.Parameter) and value.is_meta and value.layout == torch.strided
        if not is_usual or value.dtype.is_complex:  # it may be a lazy conjugate
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_form, value))
    return type(value), value  # 1 and 1.0 are equal, and promote to different dtypes


def _is_new(out: torch.Tensor, given: list[Any]) -> bool:
    """Return whether a result uses all of its storage, and shares the storage with no argument."""
    if not (type(out) is torch.Tensor and out.is_meta and out.layout == torch.strided) or out.dtype.is_complex:
        return False
    storage, tensors = out.untyped_storage(), [one for one in pytree.tree_leaves(given) if torch.is_tensor(one)]
    alike = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
    return (
        out.storage_offset() == 0
        and storage.nbytes() == alike.untyped_storage().nbytes()
        and all(storage._cdata != tensor.untyped_storage()._cdata for tensor in tensors)
    )
