"""Simulate devices on the CPU, each with separate memory, a thread and events."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable

import torch

from ..errors import DeviceMemoryError, UseAfterReleaseError
from .protocol import HOST_CLOCK, NOW, Clock, Device, Event, Runs
from .worker import Worker

_POISON_INTEGER = 0x5A

_ALWAYS = contextlib.nullcontext()  # without state, so threads can share it


# By address: the virtual device that owns the memory, and whether the memory is "ready" or "released". Each access is
# one operation of a dict, which is atomic.
_OWNERS: dict[int, tuple[str, str]] = {}


def _note_owner(tensor: torch.Tensor, owner: str, state: str) -> None:
    pointer = tensor.untyped_storage().data_ptr()
    if pointer:  # empty tensors have no memory
        _OWNERS[pointer] = owner, state
        weakref.finalize(tensor, _OWNERS.pop, pointer, None).atexit = False


def _owner_of(tensor: torch.Tensor) -> tuple[str, str] | None:
    # sparse tensors are not checked
    return _OWNERS.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None


class VirtualDevice(Device):
    """A device simulated on the CPU, which computes with its own copies of tensors on its own thread.

    Args:
        name: name in errors and timelines.
        check: whether to check reads of memory. If so, released memory is filled with NaN, and a read raises an error
            if the memory is not written yet, was released, or belongs to another device.
        memory_limit: largest number of bytes that the device may allocate; ``None`` for no limit.

    Attributes:
        peak: largest number of bytes allocated at one time; counted only if there is a memory limit.

    >>> device = VirtualDevice("virtual:0", check=True)
    >>> copy = device.copy_in(torch.ones(2))
    >>> device.release([copy])
    >>> copy
    tensor([nan, nan])
    >>> device.close()
    """

    def __init__(self, name: str = "virtual:0", *, check: bool = False, memory_limit: int | None = None) -> None:
        self.name = name
        self.torch_device = torch.device("cpu")
        self.worker = Worker(name)
        self.check = check
        self.memory_limit = memory_limit
        self.peak = 0
        # Size of each copy that is alive, and a reference that removes the entry when the copy is deleted.
        self._held: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}

    def __repr__(self) -> str:
        return f"VirtualDevice({self.name!r})"

    @property
    def memory(self) -> int | None:
        return self.memory_limit

    @property
    def allocated(self) -> int:
        """Number of bytes that are allocated on the device now."""
        return sum(size for size, _ in list(self._held.values()))

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory with the shape, dtype and layout of ``like``; in check mode the memory is filled with NaN."""
        size = like.element_size() * like.numel()
        if self.memory_limit is not None:
            before = self.allocated
            if before + size > self.memory_limit:
                raise DeviceMemoryError(
                    f"{self.name} is out of memory: it uses {before} of {self.memory_limit} bytes, and {size} more "
                    f"were requested for a tensor of shape {tuple(like.shape)} and dtype {like.dtype}."
                )
            self.peak = max(self.peak, before + size)
        tensor = torch.empty_like(like, requires_grad=False)
        key, held = id(tensor), self._held  # the callback must not keep the device alive
        held[key] = size, weakref.ref(tensor, lambda _: held.pop(key, None))
        if self.check and tensor.layout == torch.strided:
            _poison(tensor)
            _note_owner(tensor, self.name, "ready")
        return tensor

    def copy_in(self, tensor: torch.Tensor, ready: Event | None = None, *, parameter: bool = False) -> torch.Tensor:
        # in check mode, an event `ready` that is not complete raises an error
        if ready is not None and not ready.done():
            if self.check:
                raise UseAfterReleaseError(f"{self.name} copies a {_drawn(tensor)} before the event `ready` is done.")
            ready.result()
        if self.check and (found := _owner_of(tensor)) is not None:
            owner, _ = found
            raise UseAfterReleaseError(
                f"{self.name}: copy_in needs a host tensor, but this {_drawn(tensor)} is on {owner}. Call copy_out."
            )
        with torch.no_grad():
            return self.allocate(tensor).copy_(tensor)

    def reserve(self, like: torch.Tensor) -> torch.Tensor:
        return self.allocate(like)

    def copy_rows_in(
        self, target: torch.Tensor, source: torch.Tensor, runs: Runs, *, after_compute: bool = False
    ) -> None:
        self.use([target])
        with torch.no_grad():
            for start, stop in runs:
                target[start:stop].copy_(source[start:stop])

    def copy_rows_out(
        self, tensor: torch.Tensor, runs: Runs, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Event]:
        self.use([tensor])
        with torch.no_grad():
            host = torch.zeros_like(tensor, requires_grad=False)
            for start, stop in runs:
                host[start:stop].copy_(tensor[start:stop])
        return host, NOW

    def arrival(self) -> Event:
        return NOW

    def copy_out(
        self, tensor: torch.Tensor, *, last: bool = False, parameter: bool = False, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Event]:
        self.use([tensor])
        return tensor.detach().clone(), NOW

    def computing(self, after: Event | None = None) -> contextlib.AbstractContextManager[None]:
        return _ALWAYS  # the CPU has no streams to choose from

    def visit(self, nbytes: int = 1) -> contextlib.AbstractContextManager[None]:
        return _ALWAYS  # each stage ends before the next stage starts

    def synchronize(self) -> None:
        """Do nothing: a virtual device completes each computation immediately."""

    def clock(self) -> Clock:
        return HOST_CLOCK

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """In check mode, refuse tensors that were released or that another device owns."""
        if not self.check:
            return
        for tensor in tensors:
            owner, state = _owner_of(tensor) or (self.name, "ready")
            if owner != self.name:
                raise UseAfterReleaseError(
                    f"{self.name} reads a {_drawn(tensor)} in the memory of {owner}. Copy it with copy_out and copy_in."
                )
            if state != "ready":
                raise UseAfterReleaseError(f"{self.name} reads a {_drawn(tensor)} after this device released it.")

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release memory; in check mode its contents become NaN (arbitrary values for integers)."""
        for tensor in tensors:
            self._held.pop(id(tensor), None)
            if self.check and _owner_of(tensor) == (self.name, "ready"):
                _poison(tensor)
                _note_owner(tensor, self.name, "released")

    def close(self) -> None:
        self.worker.close()


def _poison(tensor: torch.Tensor) -> None:
    raw = tensor.detach()
    if raw.is_floating_point() or raw.is_complex():
        raw.fill_(float("nan"))
    else:
        raw.fill_(raw.dtype == torch.bool or _POISON_INTEGER)


def _drawn(tensor: torch.Tensor) -> str:
    return f"tensor of shape {tuple(tensor.shape)}"
