"""The device protocol and virtual devices on the CPU, with their own memory, thread and events.

Two implementations of one protocol, so that one scheduler drives both:

- :class:`VirtualDevice` lives on the CPU. Its memory is real copies, its thread is real, its events have passed. It can
  *check* that no code reads memory after its release, on another device, or before its event.
- :class:`AcceleratorDevice` is any device of ``torch.accelerator``, with one stream each for parameters, activations,
  compute and downloads. It is in a file of its own.

Importing this file touches no accelerator and starts no thread.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from ..errors import ConfigError, DeviceError, DeviceMemoryError, UseAfterReleaseError
from .accelerator import AcceleratorDevice
from .clock import HOST_CLOCK, Clock
from .events import NOW, Event
from .worker import Worker

__all__ = ["AcceleratorDevice", "Device", "DeviceSpec", "HasRoom", "VirtualDevice", "parse_devices"]


@runtime_checkable
class Device(Protocol):
    """The interface of a device for the scheduler. Tensors from ``copy_in`` and ``allocate`` belong to the device.

    >>> device = VirtualDevice()
    >>> isinstance(device, Device), device.name
    (True, 'virtual:0')
    >>> device.close()
    """

    name: str
    torch_device: torch.device
    worker: Worker

    @property
    def memory(self) -> int | None:
        """Bytes of memory of the device; ``None`` if no limit is known."""

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised memory of the device with this shape, dtype and layout."""

    def copy_in(self, tensor: torch.Tensor, ready: Event | None = None, *, parameter: bool = False) -> torch.Tensor:
        """Return a copy of a host tensor in the memory of the device; the copy waits for ``ready``.

        Args:
            tensor: host tensor.
            ready: event after which the host tensor is complete. Default: it is complete.
            parameter: whether the copy is large and not urgent, so that it must not delay activations.

        Returns:
            The copy, on the device.
        """

    def reserve(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a parameter of which :meth:`copy_rows_in` copies some rows."""

    def copy_rows_in(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        runs: Sequence[tuple[int, int]],
        *,
        after_compute: bool = False,
    ) -> None:
        """Copy rows of a host tensor into reserved memory; what computes next waits for them.

        Args:
            target: memory of the device.
            source: host tensor with the same rows.
            runs: rows to copy, as pairs of a start and a stop.
            after_compute: whether the computation so far has to end first, because it wrote these rows. Default:
                nothing did.
        """

    def copy_rows_out(
        self, tensor: torch.Tensor, runs: Sequence[tuple[int, int]], target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Event]:
        """Return a tensor of the host with some rows of a tensor that is not written any more, and zero elsewhere.

        Args:
            tensor: tensor of the device.
            runs: rows to copy, as pairs of a start and a stop.
            target: host tensor to copy to, which a device may use or not. Default: a new one.

        Returns:
            The copy and the event after which it is complete.
        """

    def arrival(self) -> Event:
        """Return the event after which all copies of parameters given so far are complete."""

    def copy_out(
        self, tensor: torch.Tensor, *, last: bool = False, parameter: bool = False, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Event]:
        """Return a copy on the host, and the event after which it is complete.

        Args:
            tensor: tensor of the device.
            last: whether the caller writes the tensor no more, so that nothing has to wait for the copy.
            parameter: whether the copy is large and not urgent, so that it must not delay activations.
            target: host tensor to copy to, which a device may use or not. Default: a new one.

        Returns:
            The copy and the event.
        """

    def computing(self, after: Event | None = None) -> contextlib.AbstractContextManager[Any]:
        """Make this device current for the code of a layer, after the copies given so far.

        Args:
            after: event that stands for the copies of parameters. Default: all of them.
        """

    def visit(self, nbytes: int = 1) -> contextlib.AbstractContextManager[HasRoom | None]:
        """Keep a stage on the device, from the copy of its parameters on; wait for room if the host runs ahead.

        Args:
            nbytes: bytes of the parameters and gradients of the stage. Default: those of any other stage.

        Returns:
            The context. It gives a function that reports whether there is room for so many bytes of the following stage
            now, so that it can be uploaded; or ``None``, where nothing is uploaded ahead.
        """

    def synchronize(self) -> None:
        """Wait until all copies and computations given so far have ended."""

    def clock(self) -> Clock:
        """Return the clock by which a run measures the work of this device."""

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Check that these tensors can be read now on this device, if the device checks at all."""

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release tensors that will not be read again."""

    def close(self) -> None:
        """End the thread of the device."""


# Reports whether there is room for so many bytes now, next to the stages that are on a device.
HasRoom: TypeAlias = Callable[[int], bool]

DeviceSpec: TypeAlias = "str | torch.device | Sequence[torch.device | str | Device] | None"

_POISON_INTEGER = 0x5A

# It keeps no state, so all threads may be in it at once.
_ALWAYS = contextlib.nullcontext()


class _Ledger:
    """Records which virtual device owns which memory and whether it may be read, for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[int, tuple[str, str]] = {}

    def write(self, tensor: torch.Tensor, owner: str, state: str) -> None:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer:  # tensors without elements share the null pointer
            with self._lock:
                self._owners[pointer] = (owner, state)
            weakref.finalize(tensor, self._forget, pointer).atexit = False

    def read(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        if tensor.layout != torch.strided:  # a sparse tensor has no memory of one piece, and is not watched
            return None
        with self._lock:
            return self._owners.get(tensor.untyped_storage().data_ptr())

    def _forget(self, pointer: int) -> None:
        with self._lock:
            self._owners.pop(pointer, None)


_LEDGER = _Ledger()


class VirtualDevice:
    """A virtual device on the CPU, which computes with its own copies on its own thread.

    Args:
        name: name in errors and timelines.
        check: whether to poison memory on release, and to refuse reads of memory that is not written yet, released, or
            of another device.
        memory_limit: largest number of bytes of copies; ``None`` for no limit.

    Attributes:
        peak: largest number of bytes of copies so far; counted only where there is a limit.

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
        # Of every copy that is alive: its size, and what reports that it is not any more.
        self._held: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"VirtualDevice({self.name!r})"

    @property
    def memory(self) -> int | None:
        """The memory limit in bytes; ``None`` for no limit."""
        return self.memory_limit

    @property
    def allocated(self) -> int:
        """Bytes of copies that the device holds now."""
        with self._lock:
            return sum(size for size, _ in list(self._held.values()))

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory with this shape, dtype and layout; in check mode it is poisoned."""
        size = like.element_size() * like.numel()
        if self.memory_limit is not None:
            before = self.allocated
            if before + size > self.memory_limit:
                raise DeviceMemoryError(
                    f"{self.name} is out of memory: it holds {before} of {self.memory_limit} bytes, "
                    f"and {size} more were asked for ({tuple(like.shape)}, {like.dtype})."
                )
            self.peak = max(self.peak, before + size)
        tensor = torch.empty_like(like, requires_grad=False)
        key = id(tensor)
        # The callback must not keep the device alive.
        held = weakref.ref(tensor, functools.partial(_drop, self._held, key))
        with self._lock:
            self._held[key] = size, held
        if self.check and tensor.layout == torch.strided:
            _poison(tensor)
            _LEDGER.write(tensor, self.name, "ready")
        return tensor

    def copy_in(self, tensor: torch.Tensor, ready: Event | None = None, *, parameter: bool = False) -> torch.Tensor:
        """Return a copy of a host tensor. An event that has not passed is waited for, or refused in check mode.

        Args:
            tensor: host tensor.
            ready: event after which the host tensor is complete. Default: it is complete.
            parameter: without effect on the CPU.

        Returns:
            The copy, on the device.
        """
        if ready is not None and not ready.done():
            if self.check:
                raise UseAfterReleaseError(f"{self.name}: copy_in of a {_drawn(tensor)} before its event has passed.")
            ready.result()
        if self.check and (found := _LEDGER.read(tensor)) is not None:
            raise UseAfterReleaseError(
                f"{self.name}: copy_in of a {_drawn(tensor)} that is memory of {found[0]}. Copy it out first."
            )
        with torch.no_grad():
            return self.allocate(tensor).copy_(tensor)

    def reserve(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory, as :meth:`allocate` does."""
        return self.allocate(like)

    def copy_rows_in(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        runs: Sequence[tuple[int, int]],
        *,
        after_compute: bool = False,
    ) -> None:
        """Copy rows of a host tensor at once.

        Args:
            target: memory of the device.
            source: host tensor with the same rows.
            runs: rows to copy, as pairs of a start and a stop.
            after_compute: without effect on the CPU.
        """
        self.use([target])
        with torch.no_grad():
            for start, stop in runs:
                target[start:stop].copy_(source[start:stop])

    def copy_rows_out(
        self, tensor: torch.Tensor, runs: Sequence[tuple[int, int]], target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Event]:
        """Return a tensor of the host with some rows, complete at once, and zero elsewhere.

        Args:
            tensor: tensor of the device.
            runs: rows to copy, as pairs of a start and a stop.
            target: without effect on the CPU.

        Returns:
            The copy, and an event that has passed.
        """
        self.use([tensor])
        with torch.no_grad():
            host = torch.zeros_like(tensor, requires_grad=False)
            for start, stop in runs:
                host[start:stop].copy_(tensor[start:stop])
        return host, NOW

    def arrival(self) -> Event:
        """Return an event that has passed: copies are complete at once."""
        return NOW

    def copy_out(
        self, tensor: torch.Tensor, *, last: bool = False, parameter: bool = False, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Event]:
        """Return a copy on the host, complete at once.

        Args:
            tensor: tensor of the device.
            last: without effect on the CPU.
            parameter: without effect on the CPU.
            target: without effect on the CPU.

        Returns:
            The copy, and an event that has passed.
        """
        self.use([tensor])
        return tensor.detach().clone(), NOW

    def computing(self, after: Event | None = None) -> contextlib.AbstractContextManager[None]:
        """Do nothing: the CPU is always current."""
        return _ALWAYS

    def visit(self, nbytes: int = 1) -> contextlib.AbstractContextManager[None]:
        """Do nothing: a stage has ended before the next one begins."""
        return _ALWAYS

    def synchronize(self) -> None:
        """Do nothing: all computations have ended."""

    def clock(self) -> Clock:
        """Return the clock of the host, which does the work."""
        return HOST_CLOCK

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """In check mode, refuse tensors that were released or that another device owns."""
        if not self.check:
            return
        for tensor in tensors:
            owner, state = _LEDGER.read(tensor) or (self.name, "ready")
            if owner != self.name:
                raise UseAfterReleaseError(f"{self.name}: a {_drawn(tensor)} that is read here is memory of {owner}.")
            if state != "ready":
                raise UseAfterReleaseError(f"{self.name}: a {_drawn(tensor)} is read after its release.")

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release memory; in check mode its contents become NaN (or nonsense, for integers)."""
        for tensor in tensors:
            _drop(self._held, id(tensor))
            if self.check and _LEDGER.read(tensor) == (self.name, "ready"):
                _poison(tensor)
                _LEDGER.write(tensor, self.name, "released")

    def close(self) -> None:
        """End the thread."""
        self.worker.close()


def _drop(held: dict[int, Any], key: int, _: object = None) -> None:
    held.pop(key, None)  # one operation, so it needs no lock


def _poison(tensor: torch.Tensor) -> None:
    raw = tensor.detach()
    if raw.is_floating_point() or raw.is_complex():
        raw.fill_(float("nan"))
    else:
        raw.fill_(raw.dtype == torch.bool or _POISON_INTEGER)


def _drawn(tensor: torch.Tensor) -> str:
    return f"tensor of shape {tuple(tensor.shape)}"


# One object, so one thread, per accelerator and process, for as long as a pipeline holds it.
_ACCELERATORS: weakref.WeakValueDictionary[torch.device, AcceleratorDevice] = weakref.WeakValueDictionary()
_STREAMS: dict[torch.device, tuple[torch.Stream, ...]] = {}


def parse_devices(devices: DeviceSpec = None) -> list[Device]:
    """Parse an argument ``devices=`` into a list of devices.

    Args:
        devices: ``"virtual:N"`` for N devices made of the CPU, ``"virtual:N:check"`` for N that check every access; a
            list of torch devices, or of :class:`Device` objects to share between pipelines; ``None`` for all
            accelerators of the machine, or two virtual devices where there is none.

    Returns:
        The devices.

    Raises:
        ConfigError: the argument describes no device.

    >>> parse_devices("virtual:2")
    [VirtualDevice('virtual:0'), VirtualDevice('virtual:1')]
    """
    if devices is None:
        devices = _all_accelerators() or "virtual:2"
    if isinstance(devices, torch.device):
        return [_accelerator(devices)]
    if isinstance(devices, str):
        if not devices.startswith("virtual"):
            return [_accelerator(devices)]
        return _virtual(devices)
    try:
        named = list(devices)
    except TypeError as error:
        raise ConfigError(
            f"devices={devices!r} names no device. Use 'virtual:2', or a list of torch devices."
        ) from error
    found = [_one(device) for device in named]
    if not found:
        raise ConfigError("devices=[] names no device. Use 'virtual:2', or a list of torch devices.")
    names = [device.name for device in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"devices={names} names a device twice.")
    return found


def _virtual(text: str) -> list[Device]:
    _, _, rest = text.partition(":")
    number, _, option = rest.partition(":")
    if not number.isdecimal() or int(number) < 1 or option not in ("", "check"):
        raise ConfigError(f"devices={text!r} names no device. Use 'virtual:N' or 'virtual:N:check', N at least 1.")
    return [VirtualDevice(f"virtual:{index}", check=option == "check") for index in range(int(number))]


def _one(device: torch.device | str | Device) -> Device:
    return device if isinstance(device, Device) else _accelerator(device)


def _accelerator(device: torch.device | str) -> Device:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{device!r} names no device. Use 'virtual:2', or a list of torch devices.") from error
    if device.type in ("cpu", "meta"):
        raise ConfigError(f"{str(device)!r} is not an accelerator. To run on the CPU, use devices='virtual:2'.")
    if not torch.accelerator.is_available():
        raise DeviceError(f"{str(device)!r} was asked for, but torch finds no accelerator here.")
    index: int | None = device.index  # torch's stubs know no device without one
    if index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    found = _ACCELERATORS.get(device)
    if found is None or found.worker.is_closed:
        found = _ACCELERATORS[device] = AcceleratorDevice(device, _STREAMS.get(device, ()))
        _STREAMS[device] = found.streams
    return found


def _all_accelerators() -> list[torch.device]:
    kind: Callable[[], torch.device | None] = torch.accelerator.current_accelerator
    found = kind() if torch.accelerator.is_available() else None
    return [] if found is None else [torch.device(found.type, i) for i in range(torch.accelerator.device_count())]
