"""Define the interface of a device for the scheduler: memory, copies, a thread, and events that are like futures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from .worker import Worker


@runtime_checkable
class Device(Protocol):
    """The interface that the scheduler needs from a device; a device owns the tensors that its methods allocate.

    >>> from roundpipe_runtime import VirtualDevice
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
        """Return uninitialised memory of the device with the shape, dtype and layout of ``like``."""

    def copy_in(self, tensor: torch.Tensor, ready: Event | None = None, *, parameter: bool = False) -> torch.Tensor:
        """Return a copy of a host tensor in device memory; copying starts after the event ``ready``.

        Args:
            tensor: host tensor.
            ready: event after which the host tensor is complete (default: the tensor is complete already).
            parameter: whether ``tensor`` is a parameter or gradient, whose copy must not delay copies of activations.

        Returns:
            The copy in device memory.
        """

    def reserve(self, like: torch.Tensor) -> torch.Tensor:
        """Return device memory for a parameter, into which :meth:`copy_rows_in` copies some rows."""

    def copy_rows_in(
        self, target: torch.Tensor, source: torch.Tensor, runs: Runs, *, after_compute: bool = False
    ) -> None:
        """Copy rows of a host tensor into reserved device memory; later computations wait for this copy.

        Args:
            target: device memory into which the rows are copied.
            source: host tensor from which the rows are copied.
            runs: ranges of rows to copy, as pairs ``(start, stop)``.
            after_compute: whether the copy waits for all earlier computations on the device; ``False`` by default. Pass
                ``True`` if an earlier computation may have written to ``target``.
        """

    def copy_rows_out(
        self, tensor: torch.Tensor, runs: Runs, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Event]:
        """Return a host tensor with copies of some rows of a device tensor, and zeros in all other rows.

        Args:
            tensor: device tensor to copy from, which must not change after this call.
            runs: ranges of rows to copy, as pairs ``(start, stop)``.
            target: host tensor to copy to, which a device may ignore (default: a new tensor).

        Returns:
            The host tensor, and the event after which the copy is complete.
        """

    def arrival(self) -> Event:
        """Return an event that completes when all earlier parameter copies are complete."""

    def copy_out(
        self, tensor: torch.Tensor, *, last: bool = False, parameter: bool = False, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Event]:
        """Return a host copy of a device tensor, and the event after which the copy is complete.

        Args:
            tensor: device tensor to copy from.
            last: whether the device tensor is never written again; later computations then do not wait for the copy.
            parameter: whether ``tensor`` is a parameter or gradient, whose copy must not delay copies of activations.
            target: host tensor to copy to, which a device may ignore (default: a new tensor).

        Returns:
            The host copy, and the event after which the copy is complete.
        """

    def computing(self, after: Event | None = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager in which a layer runs on this device after all earlier copies to the device.

        Args:
            after: event at which the layer's parameters are on the device (default: all earlier copies are complete).
        """

    def visit(self, nbytes: int = 1) -> contextlib.AbstractContextManager[HasRoom | None]:
        """Return a context manager for running one pipeline stage; entering it waits until the stage fits in memory.

        Args:
            nbytes: size of the parameters and gradients of the stage in bytes; 1 by default.

        Returns:
            A context manager that yields a function ``nbytes -> bool``, or ``None`` for a device that never loads the
            next stage in advance. The function checks whether the device has memory for the next stage.
        """

    def synchronize(self) -> None:
        """Wait until all earlier copies and computations of the device have ended."""

    def clock(self) -> Clock:
        """Return the clock that measures when work of this device begins and ends."""

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """In check mode, check that this device may read the given tensors now."""

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release the memory of tensors that will not be read again."""

    def close(self) -> None:
        """End the thread that runs the device."""


HasRoom: TypeAlias = Callable[[int], bool]  # see `Device.visit`
Runs: TypeAlias = Sequence[tuple[int, int]]  # ranges of rows, (start, stop)


class Event(Protocol):
    """An event of a device (as ``torch.cuda.Event``), with the interface of a future."""

    def done(self) -> bool:
        """Report whether all work submitted before the event has ended."""

    def result(self) -> Any:
        """Wait until all work submitted before the event has ended."""


class _Passed:
    def done(self) -> bool:
        return True

    def result(self) -> None: ...


NOW = _Passed()


class Clock:
    """Measures when the work of a device begins and ends; this base class is for devices without asynchronous work."""

    is_late = False  # whether times are known only after the device has completed its asynchronous work

    def now(self, kind: str) -> float | torch.Event:
        """Return the end time of the work submitted so far, or an event that :meth:`seconds` converts to this time."""
        # kind: kind of work, as in a timeline: `"forward"`, `"backward"`, `"upload"` and so on
        return time.perf_counter()

    def seconds(self, moment: float | torch.Event) -> float:
        """Convert a moment that :meth:`now` returned to seconds on the clock of ``time.perf_counter``."""
        assert isinstance(moment, float)
        return moment


HOST_CLOCK = Clock()


class EventClock(Clock):
    is_late = True

    def __init__(self, device: torch.device, stream: torch.Stream, others: Mapping[str, torch.Stream]) -> None:
        self._device, self._stream, self._others = device, stream, others
        self._start = time.perf_counter()
        self._first = self.now("")

    def now(self, kind: str) -> torch.Event:
        return self._others.get(kind, self._stream).record_event(torch.Event(self._device, enable_timing=True))

    def seconds(self, moment: float | torch.Event) -> float:
        assert not isinstance(moment, float)
        return self._start + self._first.elapsed_time(moment) / 1e3
