"""Parse the argument ``devices=``, and run work of an accelerator in five streams, so that copies overlap compute.

``Tensor.record_stream`` keeps a tensor's memory until the streams have read it. Before the host changes the source of a
copy, such as a parameter, it must call :meth:`synchronize`, as each forward and backward pass does at its end.
"""

# host         u u u | F F F             | u u u | F F F ...      submits work without waiting
# parameters   ████████                    ████████               of the next stage, during a stage
# activations     ▪    ▪    ▪                 ▪   ▪    ▪          between the pieces of parameters
# compute              ███████████████             ████████████
# downloads                 ▪    ▪    ▪                 ▪   ▪
# gradients                          ██████████                   of one stage, while the next one computes

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from yobx_flatten.core.private_names.of_torch import storage_use_count

from ..errors import ConfigError, DeviceError, DeviceMemoryError
from .protocol import NOW, Device, Event, EventClock, Runs
from .virtual import VirtualDevice
from .worker import Worker, noting

# Bytes of one piece of a parameter. A link does not interrupt a copy, so an activation waits for at most one piece.
PIECE = 32 * 1024**2
_STAGES_AT_ONCE = 3  # the current stage, the stage that is loaded, and a small stage between them
_ROOM = 2.1  # room for stages, as a multiple of the largest stage
# Used if the compute stream is current, since entering a stream takes the host a microsecond, several times per layer.
_IS_CURRENT = contextlib.nullcontext()

# References to a storage that only one tensor uses: the reference of the tensor, and of the caller.
_OWN_REFERENCES = 2


class _StreamEvent:
    __slots__ = ("computed_after", "event")

    def __init__(self, event: torch.Event) -> None:
        self.event = event
        self.computed_after = False  # whether the compute stream already waits for the event

    def done(self) -> bool:
        return bool(self.event.query())

    def result(self) -> None:
        self.event.synchronize()


class _Visit(NamedTuple):
    """A pipeline stage on a device, with the events at which its computation and its copies end."""

    nbytes: int
    computed: torch.Event
    copied: torch.Event


class AcceleratorDevice(Device):
    """A :class:`Device` for a torch accelerator, such as a GPU, with separate streams for copies and computation."""

    # device: device with an index, such as `cuda:0`
    # streams: streams of an earlier object for this device, which are reused. Default: new streams.

    def __init__(self, device: torch.device, streams: tuple[torch.Stream, ...] = ()) -> None:
        self.torch_device = device
        self.name = str(device)
        self.worker = Worker(self.name)
        # torch has 32 streams per device, so a new pipeline reuses the streams of a closed pipeline. The computation of
        # a pipeline has priority over the caller's work on the device.
        self.streams = streams or (*(torch.Stream(device) for _ in range(4)), torch.Stream(device, priority=-1))
        self._parameters, self._activations, self._downloads, self._gradients, self._compute = self.streams
        # Stages that may be computing, and the last copies of earlier stages. Only the thread of the device uses the
        # following attributes.
        self._visits: collections.deque[_Visit] = collections.deque()
        self._copying: collections.deque[torch.Event] = collections.deque()
        self._largest = 0
        self._entered: list[int] = []  # bytes of the current stage
        self._has_new_parameters = False
        self._has_new_activations = False
        self._inside: int | None = None  # thread whose current stream is the compute stream, during a stage

    def __repr__(self) -> str:
        return f"AcceleratorDevice({self.name!r})"

    @property
    def memory(self) -> int | None:
        found = memory_info(self.torch_device)
        if found is None:
            return None
        free, total = found
        # Memory that torch has reserved in this process can be used again.
        return min(total, free + torch.accelerator.memory_reserved(self.torch_device))

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        try:
            return torch.empty_like(like, device=self.torch_device, requires_grad=False)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(f"{self.name} is out of memory: {error}") from error

    def copy_in(self, tensor: torch.Tensor, ready: Event | None = None, *, parameter: bool = False) -> torch.Tensor:
        stream = self._parameters if parameter else self._activations
        if isinstance(ready, _StreamEvent):
            stream.wait_event(ready.event)
        elif ready is not None:
            ready.result()
        if tensor.requires_grad:
            tensor = tensor.detach()
        with stream:
            copy = self.allocate(tensor)
            if parameter:
                self._has_new_parameters = True
                copy_in_pieces(copy, tensor, PIECE)
            else:
                self._has_new_activations = True
                copy.copy_(tensor, non_blocking=True)
        copy.record_stream(self._compute)
        return copy

    def reserve(self, like: torch.Tensor) -> torch.Tensor:
        with self._activations:  # the stream on which `copy_rows_in` copies rows
            memory = self.allocate(like)
        memory.record_stream(self._compute)
        return memory

    def copy_rows_in(
        self, target: torch.Tensor, source: torch.Tensor, runs: Runs, *, after_compute: bool = False
    ) -> None:
        # on the stream for activations, so that the rows do not wait for queued parameters
        if after_compute:
            self._activations.wait_event(self._compute.record_event())
        with torch.no_grad(), self._activations:
            for start, stop in runs:
                copy_in_pieces(target[start:stop], source[start:stop], PIECE)
        self._compute.wait_event(self._activations.record_event())

    def copy_rows_out(
        self, tensor: torch.Tensor, runs: Runs, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Event]:
        may_be_written = is_held_elsewhere(tensor)
        tensor = tensor.detach()
        host = torch.empty_like(tensor, device="cpu", pin_memory=True) if target is None else target
        before = 0
        for start, stop in [*runs, (len(host), len(host))]:
            host[before:start].zero_()
            before = stop
        self._gradients.wait_event(self._compute.record_event())
        with self._gradients:
            for start, stop in runs:
                copy_in_pieces(host[start:stop], tensor[start:stop], PIECE)
            tensor.record_stream(self._gradients)
        event = _record(self._gradients, self.torch_device)
        if may_be_written:
            self._compute.wait_event(event)
        return host, _StreamEvent(event)

    def arrival(self) -> Event:
        return _StreamEvent(self._parameters.record_event())

    def copy_out(
        self, tensor: torch.Tensor, *, last: bool = False, parameter: bool = False, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Event]:
        # last: then the computation waits for the copy only if another tensor shares the memory
        if tensor.device != self.torch_device:
            raise DeviceError(
                f"A tensor of shape {tuple(tensor.shape)} is on {tensor.device}, and the layer that returned it runs "
                f"on {self.name}. Create the tensor on the device of the layer's input:\n"
                "    torch.zeros(3, device=x.device)"
            )
        if tensor.layout != torch.strided:  # sparse tensors cannot be in pinned memory
            with self._compute:
                return tensor.detach().cpu(), NOW
        may_be_written = not last or is_held_elsewhere(tensor)
        tensor = tensor.detach()
        stream = self._gradients if parameter else self._downloads
        if self._has_new_activations:  # an input kept for the backward may be copied back before it is used
            stream.wait_event(self._activations.record_event())
        stream.wait_event(self._compute.record_event())
        host = torch.empty_like(tensor, device="cpu", pin_memory=True) if target is None else target
        with stream:
            if parameter:
                copy_in_pieces(host, tensor, PIECE)
            else:
                host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
        event = _record(stream, self.torch_device)
        if may_be_written:
            self._compute.wait_event(event)
        return host, _StreamEvent(event)

    def computing(self, after: Event | None = None) -> contextlib.AbstractContextManager[Any]:
        if isinstance(after, _StreamEvent):
            if not after.computed_after:
                after.computed_after = True
                self._compute.wait_event(after.event)
        elif after is None and self._has_new_parameters:
            self._has_new_parameters = False
            self._compute.wait_event(self._parameters.record_event())
        if self._has_new_activations:
            self._has_new_activations = False
            self._compute.wait_event(self._activations.record_event())
        if self._inside == threading.get_ident():
            return _IS_CURRENT
        return self._compute

    @contextlib.contextmanager
    def visit(self, nbytes: int = 1) -> Iterator[Callable[[int], bool]]:
        # nbytes: bytes of the parameters and gradients of the stage
        # Two stages of the largest size, and a small stage between them, such as an output head, may be on the device.
        # With two stages only, the stage after a small stage would be uploaded after the end of the stage before it.
        # The with block may begin while the gradients of one completed stage are still copied to the host, because a
        # stage allocates memory for its gradients later than for its parameters.
        self._largest = max(self._largest, nbytes)
        while self._visits and not self._fits(nbytes):
            visit = self._visits.popleft()
            visit.computed.synchronize()
            self._copying.append(visit.copied)
        while len(self._copying) > 1:
            self._copying.popleft().synchronize()
        self._entered.append(nbytes)
        try:
            with self._compute:
                self._inside = threading.get_ident()
                yield self._has_room
        finally:
            self._inside = None
            self._entered.clear()
            self._visits.append(_Visit(nbytes, _record(self._compute, self.torch_device), self._end()))

    def _fits(self, nbytes: int) -> bool:
        present = self._entered + [visit.nbytes for visit in self._visits]
        return len(present) < _STAGES_AT_ONCE and nbytes + sum(present) <= _ROOM * max(self._largest, nbytes)

    def _has_room(self, nbytes: int) -> bool:
        while self._visits and self._visits[0].computed.query():
            self._copying.append(self._visits.popleft().copied)
        while len(self._copying) > 1 and self._copying[0].query():
            self._copying.popleft()
        return len(self._copying) <= 1 and self._fits(nbytes)

    def _end(self) -> torch.Event:
        for stream in (self._parameters, self._activations, self._compute, self._downloads):
            self._gradients.wait_event(stream.record_event())
        return _record(self._gradients, self.torch_device)

    def synchronize(self) -> None:
        with noting(f"The error was found while waiting for the work of {self.name}."):
            self._end().synchronize()

    def clock(self) -> EventClock:
        return EventClock(self.torch_device, self._compute, {"upload": self._parameters, "download": self._gradients})

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        pass  # a kernel itself raises an error for a tensor of another device

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        pass  # the allocator of torch knows which streams use the memory of a tensor

    def close(self) -> None:
        self.worker.close()


def _record(stream: torch.Stream, device: torch.device) -> torch.Event:
    """Record an event for which a thread can wait without using a CPU core."""
    return stream.record_event(torch.Event(device, blocking=True))


def is_held_elsewhere(tensor: torch.Tensor) -> bool:
    """Return whether another tensor shares the storage of ``tensor``, for example a view that a layer has stored."""
    return storage_use_count is None or storage_use_count(tensor.untyped_storage()._cdata) > _OWN_REFERENCES


def memory_info(device: torch.device) -> tuple[int, int] | None:
    """Return the free and the total bytes of an accelerator; ``None`` if its backend does not report them."""
    missing = (AttributeError, NotImplementedError, RuntimeError)
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except missing:
        try:
            free, total = torch.get_device_module(device).mem_get_info(device)
        except missing:
            return None
    return int(free), int(total)


def copy_in_pieces(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
    size = max(1, nbytes // target.element_size())
    if target.numel() <= size or not (target.is_contiguous() and source.is_contiguous()):
        target.copy_(source, non_blocking=True)
        return
    for piece, part in zip(target.view(-1).split(size), source.view(-1).split(size), strict=True):
        piece.copy_(part, non_blocking=True)


DeviceSpec: TypeAlias = "str | torch.device | Sequence[torch.device | str | Device] | None"

# One object, and thereby one thread, per accelerator and process while a pipeline uses it.
_ACCELERATORS: weakref.WeakValueDictionary[torch.device, AcceleratorDevice] = weakref.WeakValueDictionary()
_STREAMS: dict[torch.device, tuple[torch.Stream, ...]] = {}


def parse_devices(devices: DeviceSpec = None) -> list[Device]:
    """Return the list of devices that an argument ``devices=`` describes.

    Args:
        devices: ``"virtual:N"`` for N devices simulated on the CPU; ``"virtual:N:check"`` to check every memory access
            also; a list of torch devices or :class:`Device` objects, which several pipelines can share. ``None`` uses
            all accelerators of the machine, or two virtual devices on a machine without accelerators.

    Returns:
        The devices.

    Raises:
        ConfigError: ``devices`` is invalid or names no device.

    >>> parse_devices("virtual:2")
    [VirtualDevice('virtual:0'), VirtualDevice('virtual:1')]
    """
    if devices is None:
        devices = accelerators() or "virtual:2"
    if isinstance(devices, str) and devices.startswith("virtual"):
        return _virtual(devices)
    if isinstance(devices, (str, torch.device)):
        return [_accelerator(devices)]
    try:
        named = list(devices)
    except TypeError as error:
        raise ConfigError(
            f"devices={devices!r} names no device. Use 'virtual:2', or a list of torch devices."
        ) from error
    found = [device if isinstance(device, Device) else _accelerator(device) for device in named]
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


def _accelerator(device: torch.device | str) -> Device:
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{device!r} names no device. Use 'virtual:2', or a list of torch devices.") from error
    if device.type in ("cpu", "meta"):
        raise ConfigError(f"{str(device)!r} is not an accelerator. To run on the CPU, use devices='virtual:2'.")
    if not torch.accelerator.is_available():
        raise DeviceError(f"{str(device)!r} was asked for, but torch finds no accelerator here. Use 'virtual:2'.")
    index: int | None = device.index  # None for "cuda", which torch's stubs do not allow
    if index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    found = _ACCELERATORS.get(device)
    if found is None or found.worker.is_closed:
        found = _ACCELERATORS[device] = AcceleratorDevice(device, _STREAMS.get(device, ()))
        _STREAMS[device] = found.streams
    return found


def accelerators() -> list[torch.device]:
    kind: Callable[[], torch.device | None] = torch.accelerator.current_accelerator
    found = kind() if torch.accelerator.is_available() else None
    return [] if found is None else [torch.device(found.type, i) for i in range(torch.accelerator.device_count())]
