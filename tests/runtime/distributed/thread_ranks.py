"""Ranks that are threads of one process, and exchange through lists; a wait that does not end is an error."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from roundpipe_runtime.distributed.ranks.alarm import Alarm
from roundpipe_runtime.distributed.ranks.ranks import Ranks
from roundpipe_runtime.errors import rank_failed_in_step, ranks_gone

__all__ = ["ThreadRanks", "Wire", "in_threads"]

SECONDS = 20


class _CutError(Exception):
    """A channel was closed before all ranks had given something."""


class _Channel:
    # What all have given is there for each of them, also where one closes the channel before another has woken up:
    # sockets deliver what was sent. A barrier of Python fails there.

    def __init__(self, size):
        self.changed, self.is_cut = threading.Condition(), False
        self.size, self.given = size, {}

    def exchange(self, rank, value):
        with self.changed:
            given = self.given
            if self.is_cut:
                raise _CutError
            given[rank] = value
            if len(given) == self.size:
                self.given = {}
                self.changed.notify_all()
            elif not self.changed.wait_for(lambda: self.is_cut or len(given) == self.size, SECONDS):
                self.is_cut = True
                self.changed.notify_all()
            if len(given) < self.size:
                raise _CutError
            return [given[number] for number in range(self.size)]

    def cut(self):
        with self.changed:
            self.is_cut = True
            self.changed.notify_all()


class Wire:
    """What the ranks of a world have given, collective after collective, in each channel."""

    def __init__(self, size):
        self.size, self.store = size, dist.HashStore()
        self.channels = {name: _Channel(size) for name in ("control", "data", "weights", "step")}
        self.step_failure = None

    def cut(self, *names):
        """Close channels: whoever waits there, or comes later, gets an error."""
        for name in names or self.channels:
            self.channels[name].cut()


class ThreadRanks(Ranks):
    """A rank in a thread."""

    def __init__(self, wire, rank, num_shards, num_copies=1, *, is_listening=False):
        super().__init__(rank, num_shards, num_copies)
        self._wire = wire
        if is_listening:
            self.alarm = Alarm(wire.store, rank, self.size)

    def _all(self, value, name):
        try:
            return self._wire.channels[name].exchange(self.rank, value)
        except _CutError:
            if name == "step" and self._wire.step_failure is not None:
                raise rank_failed_in_step(*self._wire.step_failure) from None
            self._wire.cut()
            raise ranks_gone([], "a thread has left") from None

    def exchange(self, value, channel="control"):
        return self._all(value, channel)

    def fail_step(self, text):
        self._wire.step_failure = self.rank, text
        self._wire.cut("step")

    def broadcast(self, tensor):
        tensor.copy_(self._all(tensor.clone(), "control")[0])

    def all_to_all(self, out, give, into, take):
        parts = [list(given.split(sizes)) for given, sizes in self._all((out.clone(), list(give)), "data")]
        assert [part[self.rank].numel() for part in parts] == list(take)
        into.copy_(torch.cat([part[self.rank] for part in parts]))
        self.sent["data"] += (sum(give) - give[self.rank]) * out.element_size()

    def gather(self, parts, members, channel):
        own = members.index(self.rank)
        given = self._all([part[own].clone() for part in parts], channel)
        for number, part in enumerate(parts):
            for index, member in enumerate(members):
                part[index].copy_(given[member][number])

    def close(self):
        self.alarm.close()


def in_threads(size, function):
    """What a function of a wire and a rank returns on each rank."""
    wire = Wire(size)
    with ThreadPoolExecutor(size) as threads:
        found = [threads.submit(function, wire, rank) for rank in range(size)]
        with contextlib.suppress(Exception):
            return [future.result(3 * SECONDS) for future in found]
        wire.cut()
        return [future.result(3 * SECONDS) for future in found]
