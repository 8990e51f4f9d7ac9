"""Accelerators, any device of ``torch.accelerator``: four streams, so that copies overlap with the computation.

::

    # host         u u u | F F F             | u u u | F F F ...      gives work, and waits for nothing
    # parameters   ████████                    ████████               of the next stage, while this one computes
    # activations     ▪    ▪    ▪                 ▪   ▪    ▪          between the pieces of parameters
    # compute              ███████████████             ████████████
    # downloads                 ▪    ▪    ▪                 ▪   ▪

A tensor belongs to the stream that it was made on; ``record_stream`` informs the allocator who else reads it, and it is
not used again before they have. Host memory that a copy reads or writes is pinned, and its allocator keeps it until the
copy is through. What the host itself may change, parameters above all, is safe once :meth:`synchronize` has returned,
which the engine calls at the end of every run.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator

import torch

from ..errors import DeviceMemoryError
from .events import NOW, Event
from .worker import Worker

__all__ = ["PIECE", "AcceleratorDevice", "copy_in_pieces"]

# Bytes of one piece of a parameter: a link finishes a copy that it began, so an activation waits this long at most.
PIECE = 256 * 1024**2

# The stage that computes, and the one that is loaded meanwhile.
_STAGES_AT_ONCE = 2


class _StreamEvent:
    """An event of an accelerator, with the two methods of a future."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def result(self) -> None:
        self.event.synchronize()


class AcceleratorDevice:
    """A device of ``torch.accelerator``.

    Args:
        device: device with an index, such as ``cuda:0``.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.name = str(device)
        self.worker = Worker(self.name)
        self._parameters = torch.Stream(device)
        self._activations = torch.Stream(device)
        self._compute = torch.Stream(device)
        self._downloads = torch.Stream(device)
        # When the last stages end; only the thread of the device touches it.
        self._ends: collections.deque[torch.Event] = collections.deque()

    def __repr__(self) -> str:
        return f"AcceleratorDevice({self.name!r})"

    @property
    def memory(self) -> int | None:
        """Bytes of memory of the device, where torch reports it."""
        library = torch.get_device_module(self.torch_device)
        if not hasattr(library, "mem_get_info"):
            return None
        return int(library.mem_get_info(self.torch_device)[1])

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory of the device, allocated on the current stream."""
        try:
            return torch.empty_like(like, device=self.torch_device, requires_grad=False)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(f"{self.name} is out of memory: {error}") from error

    def copy_in(self, tensor: torch.Tensor, ready: Event | None = None, *, parameter: bool = False) -> torch.Tensor:
        """Return a copy on the device; parameters and activations are copied on streams of their own.

        Args:
            tensor: host tensor.
            ready: event after which the host tensor is complete. Default: it is complete.
            parameter: whether the copy is large and not urgent. Default: ``False``.

        Returns:
            The copy, on the device.

        Raises:
            DeviceMemoryError: the device has no memory left.
        """
        stream = self._parameters if parameter else self._activations
        if isinstance(ready, _StreamEvent):
            stream.wait_event(ready.event)
        elif ready is not None:
            ready.result()
        with stream, torch.no_grad():
            copy = self.allocate(tensor)
            if parameter:
                copy_in_pieces(copy, tensor, PIECE)
            else:
                copy.copy_(tensor, non_blocking=True)
        copy.record_stream(self._compute)
        return copy

    def copy_out(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Return a copy in pinned memory, and the event after which it is complete."""
        tensor = tensor.detach()
        if tensor.layout != torch.strided:  # sparse gradients: there is no pinned memory for them
            with self._compute:
                return tensor.cpu(), NOW
        # What is kept for the backward may go down again before anything was computed with it.
        self._downloads.wait_event(self._activations.record_event())
        self._downloads.wait_event(self._compute.record_event())
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self._downloads, torch.no_grad():
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._downloads)
        event = self._downloads.record_event()
        # The next layer may write this tensor in place, so the computation goes on after the copy.
        self._compute.wait_event(event)
        return host, _StreamEvent(event)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Run the block on the compute stream, after all host-to-device copies given so far."""
        self._compute.wait_event(self._parameters.record_event())
        self._compute.wait_event(self._activations.record_event())
        with self._compute:
            yield

    @contextlib.contextmanager
    def visit(self) -> Iterator[None]:
        """Hold the host, which runs ahead of the device, until at most one other stage is on the device."""
        while len(self._ends) >= _STAGES_AT_ONCE:
            self._ends.popleft().synchronize()
        try:
            yield
        finally:
            self._ends.append(self._compute.record_event())

    def synchronize(self) -> None:
        """Wait for all streams."""
        for stream in (self._parameters, self._activations, self._compute, self._downloads):
            stream.synchronize()

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Check nothing: the kernel raises an error for a wrong device."""

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: the allocator knows the streams of every tensor."""

    def close(self) -> None:
        """End the thread."""
        self.worker.close()


def copy_in_pieces(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
    """Copy without waiting, in pieces of a limited size; a tensor with gaps is copied in one piece.

    Args:
        target: tensor to copy to.
        source: tensor to copy from.
        nbytes: largest number of bytes of a piece.

    >>> target = torch.zeros(5)
    >>> copy_in_pieces(target, torch.arange(5.0), 8)
    >>> target
    tensor([0., 1., 2., 3., 4.])
    """
    size = max(1, nbytes // target.element_size())
    if target.numel() <= size or not (target.is_contiguous() and source.is_contiguous()):
        target.copy_(source, non_blocking=True)
        return
    for piece, part in zip(target.view(-1).split(size), source.view(-1).split(size), strict=True):
        piece.copy_(part, non_blocking=True)
