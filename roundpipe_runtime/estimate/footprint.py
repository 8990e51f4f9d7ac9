"""Count the memory and operations of torch code: every tensor that an operation makes, until it is freed.

It works the same for real tensors and for those on ``meta``, which have sizes and no memory: so a layer of any size can
be measured without allocating it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from yobx_flatten.private_names.of_torch import TorchDispatchMode, pytree

_ATEN = torch.ops.aten


class Footprint(TorchDispatchMode):
    """Counts bytes and floating point operations of the code in its ``with`` block, in this thread.

    A storage is counted once, however many views it has, from the operation that made it to its end.

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
        # Rows of products of groups of rows with a matrix each, by the identity of the memory of the matrices.
        self.grouped: dict[int, int] = {}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the memory of these tensors: it was there before."""
        for tensor in tensors:
            self._note(tensor, counted=False)

    def count(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor that was made elsewhere, until it goes away."""
        self._note(tensor, counted=True)

    def restart(self) -> int:
        """Begin a new peak; return the bytes that are alive now."""
        self.peak = self.alive
        return self.alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it made."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, counted=True)
        self.flops += _flops(func, args, kwargs, out)
        if getattr(func, "_overloadpacket", None) is _ATEN._grouped_mm and args[0].dim() == 2 and args[1].dim() == 3:
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
    """Return the bytes of the storages of these tensors, each once.

    >>> rows = torch.empty(4, 8)
    >>> storage_bytes([rows, rows, torch.empty(2)])
    136
    """
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


# -- floating point operations ---------------------------------------------------------------------------------------


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = getattr(func, "_overloadpacket", None)
    if packet in _OWN:
        return int(_OWN[packet](args))
    if str(packet) in _OF_OTHERS:
        return int(_OF_OTHERS[str(packet)](args))
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    return 0


def _grouped(args: Any) -> int:
    """A product of groups of rows, as experts do: every row is multiplied with one matrix."""
    first: torch.Size = args[0].shape
    second: torch.Size = args[1].shape
    if len(first) == 2:  # rows x width, with a matrix per group, or with rows of another: gradients of the matrices
        return 2 * first.numel() * second[-1]
    return 2 * first.numel() * second[-1] // (first[0] if len(second) == 2 else 1)


def _attention(args: Any) -> int:
    query, key, value = (arg.shape for arg in args[:3])
    groups = query[1] // key[1]
    count: int = sdpa_flop_count(query, _repeated(key, groups), _repeated(value, groups))
    return count


def _attention_backward(args: Any) -> int:
    gradient, query, key, value = (arg.shape for arg in args[:4])
    groups = query[1] // key[1]
    count: int = sdpa_backward_flop_count(gradient, query, _repeated(key, groups), _repeated(value, groups))
    return count


def _repeated(shape: torch.Size, groups: int) -> tuple[int, ...]:
    """The shape of keys or values that several heads share, as if each had its own."""
    return (shape[0], shape[1] * groups, *shape[2:])


def _product_of_four_bits(args: Any) -> int:
    """A product with a matrix of bitsandbytes, whose shape is an argument."""
    rows, (outputs, _) = args[0], args[2]
    return 2 * int(rows.numel()) * int(outputs)


# Operators of other libraries, which are not imported for it.
_OF_OTHERS = {"bitsandbytes.gemm_4bit": _product_of_four_bits}

# Those that torch's own counter does not know.
_OWN = {
    _ATEN._grouped_mm: _grouped,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
