"""An accelerator made of the CPU whose streams do everything as late as they may.

A copy waits in the queue of its stream until somebody needs it: an event is waited for, or the computation, which runs
at once, enters a stream that was told to wait for it. Memory is NaN until then. So a wait that is missing shows as a
wrong number, in every run, where a real accelerator would hide it most of the time.
"""

import contextlib
import threading
from functools import partial

import pytest
import torch

from roundpipe_runtime.device.accelerator import AcceleratorDevice

_ONE_AT_A_TIME = threading.RLock()
_HERE = threading.local()
_copy = torch.Tensor.copy_


class LateEvent:
    """A place in the queue of a stream."""

    def __init__(self, stream, place):
        self.stream, self.place = stream, place

    def query(self):
        return self.stream.done >= self.place

    def synchronize(self):
        self.stream.run_to(self.place)


class LateStream:
    """A queue of copies and waits."""

    def __init__(self, device=None):
        self.queue, self.done, self.computes = [], 0, False
        self.waits = True

    def wait_event(self, event):
        if self.waits:
            self.queue.append(event.synchronize)

    def record_event(self):
        return LateEvent(self, len(self.queue))

    def run_to(self, place):
        with _ONE_AT_A_TIME:
            while self.done < place:
                work, self.queue[self.done] = self.queue[self.done], None
                self.done += 1
                work()

    def synchronize(self):
        self.run_to(len(self.queue))

    def __enter__(self):
        self.outer = getattr(_HERE, "stream", None)
        _HERE.stream = self
        if self.computes:
            self.synchronize()

    def __exit__(self, *_):
        _HERE.stream = self.outer


def _late_copy(target, source, non_blocking=False):
    stream = getattr(_HERE, "stream", None)
    if not non_blocking or stream is None:
        return _copy(target, source)
    stream.queue.append(partial(_copy_quietly, target, source))
    return target


def _copy_quietly(target, source):
    with torch.no_grad():
        _copy(target, source)


def _empty_like(like, *, device=None, pin_memory=False, requires_grad=False):
    made = torch.zeros_like(like)
    return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(made.dtype == torch.bool or 0x5A)


class _Torch:
    """What the file of the device sees as ``torch``."""

    def __init__(self):
        self.Stream, self.empty_like = LateStream, _empty_like

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def late_devices(count):
    """Such devices; what they record is in ``device.recorded``: pairs of a tensor's shape and a stream."""
    with pytest.MonkeyPatch.context() as patch:
        recorded = []
        patch.setattr("roundpipe_runtime.device.accelerator.torch", _Torch())
        patch.setattr(torch.Tensor, "copy_", _late_copy)
        patch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append((tuple(self.shape), stream)))
        made = []
        for number in range(count):
            device = AcceleratorDevice(torch.device("cpu"))
            device.name = f"late:{number}"
            device.recorded = recorded
            device._compute.computes = True
            made.append(device)
        try:
            yield made
        finally:
            for device in made:
                device.close()
