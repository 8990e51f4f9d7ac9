"""Virtual devices with clocks of their own, that only copies and layers advance: a run takes the same time anywhere.

What a device takes from the mailbox of a run is not there before it was put, by the clock of the device that put it.
So the moments are those of a machine on which nothing but layers and copies takes time, however busy this one is.
"""

import contextlib
import threading

import torch
from torch import nn

from roundpipe_runtime import VirtualDevice
from roundpipe_runtime.device.worker import Mailbox

_HERE = threading.local()


class _Clock:
    is_late = False

    def __init__(self, device):
        self.device = device

    def now(self, kind):
        return self.device.now

    def seconds(self, moment):
        return moment


class LogicalDevice(VirtualDevice):
    """A virtual device on which a copy takes its bytes over ``link``, and a layer the time that it states."""

    def __init__(self, name, link):
        super().__init__(name)
        self.link, self.now, self.bytes_up, self.bytes_down = link, 0.0, 0, 0

    def clock(self):
        return _Clock(self)

    @contextlib.contextmanager
    def visit(self, nbytes=1):
        before, _HERE.device = getattr(_HERE, "device", None), self
        yield
        _HERE.device = before

    def copy_in(self, tensor, ready=None, *, parameter=False):
        self.bytes_up += tensor.nbytes
        self.now += tensor.nbytes / self.link
        return super().copy_in(tensor, ready, parameter=parameter)

    def copy_out(self, tensor, **options):
        self.bytes_down += tensor.nbytes
        self.now += tensor.nbytes / self.link
        return super().copy_out(tensor, **options)


class TimedLayer(nn.Linear):
    """A square matrix that states how long it takes: a backward twice as long as a forward."""

    def __init__(self, width, seconds):
        super().__init__(width, width, bias=False)
        self.seconds = seconds

    def forward(self, inputs):
        return super().forward(_Spend.apply(inputs, self.weight, self.seconds)[0])


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, seconds):
        ctx.seconds = seconds
        _spend(seconds)
        return inputs.clone(), weight.new_zeros(())

    @staticmethod
    def backward(ctx, gradient, _):
        _spend(2 * ctx.seconds)
        return gradient, None, None


def _spend(seconds):
    if hasattr(_HERE, "device"):
        _HERE.device.now += seconds


def stamp_mailboxes(monkeypatch):
    """Let what passes between stages carry the moment at which it was put there."""
    put, take = Mailbox.put, Mailbox.take

    def stamped(self, key, value):
        device = getattr(_HERE, "device", None)
        put(self, key, (device.now if device else 0.0, value))

    def waited(self, key, *, keep=False):
        moment, value = take(self, key, keep=keep)
        _HERE.device.now = max(_HERE.device.now, moment)
        return value

    monkeypatch.setattr(Mailbox, "put", stamped)
    monkeypatch.setattr(Mailbox, "take", waited)
