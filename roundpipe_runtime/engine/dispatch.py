"""Hand the stages of runs to the devices of a pipeline, round-robin, and wait until all have ended."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from ..device.forking import free_after_fork
from ..device.outcome import Outcome, on_error
from ..device.protocol import Device
from ..device.worker import collect
from ..errors import DeviceError, StageError
from ..schedule.round_robin import RoundRobin, Stage
from .run import Run
from .stage.copies import CopyVisit
from .stage.visit import Visit, run_stage

# Pipelines may share devices. All stages of a run are handed out in one go: then every device has them in the same
# order, and no two runs can wait for each other.
_DISPATCH = free_after_fork(threading.Lock())

# How often a device that failed is waited for: once for its error, and once for everything else.
_ATTEMPTS = 2

# The pipelines that are open on a device: the last one that closes ends its thread.
_USERS: weakref.WeakKeyDictionary[Device, weakref.WeakSet[Dispatch]] = weakref.WeakKeyDictionary()


class Dispatch:
    """The devices of one pipeline, which others may share."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = list(devices)
        self.round_robin = RoundRobin(len(self.devices))
        self._closed = False
        with _DISPATCH:
            for device in self.devices:
                _USERS.setdefault(device, weakref.WeakSet()).add(self)

    def check_open(self) -> None:
        """Check that the pipeline was not closed."""
        if self._closed:
            raise DeviceError(
                f"{self.devices[0].name} was closed, by this pipeline. Make a new pipeline:\n"
                "    RoundPipe(model, devices=...)"
            )

    def check_outside(self) -> None:
        """Check that the caller is none of the devices' threads."""
        if any(device.worker.is_here() for device in self.devices):
            raise StageError(
                "A pipeline was called from inside of a layer that runs on one of its own devices, which would wait "
                "for itself. Give the inner pipeline devices of its own."
            )

    def run(self, run: Run, stages: Sequence[Stage]) -> None:
        """Run stages to their end."""
        with on_error(partial(self._settle, self.round_robin.cursor)):
            collect(run.mailbox, self._submitted(run, stages))
            for device in self.devices:
                device.synchronize()  # the caller may change what was copied from
            run.timer.finish()

    def _submitted(self, run: Run, stages: Sequence[Stage]) -> list[Future[None]]:
        """Hand out all stages of a run; a device that takes none fails the run, when those before it have ended."""
        work: list[Future[None]] = []
        with _DISPATCH:
            numbers = self.round_robin.assign(len(stages))
            with Outcome() as outcome:
                for place, (stage, number) in enumerate(zip(stages, numbers, strict=True)):
                    device = self.devices[number]
                    worker = self.devices[0].worker if run.spec.one_thread else device.worker
                    after = place + len(self.devices)  # stages go round
                    following = stages[after] if after < len(stages) else None
                    visit = Visit if stage.copies == 1 else CopyVisit
                    work.append(worker.submit(run_stage, run, stage, device, following, visit))
            if outcome.error is not None:  # of a device that was closed, and whatever else: stages wait for these
                run.mailbox.fail(outcome.error)
        return work

    def _settle(self, cursor: int, error: BaseException) -> None:
        """Wait until nothing of a failed run is under way on a device; its later errors are not those of the next run.

        Memory that a copy writes must not be given back before.
        """
        self.round_robin.cursor = cursor
        for device in self.devices:
            # torch's error of a kernel is raised at a wait, and may be there for each stream
            for _ in range(_ATTEMPTS):
                with contextlib.suppress(Exception):
                    device.synchronize()
                    break

    def close(self) -> list[Device]:
        """Run nothing any more; return the devices that no other pipeline uses."""
        self._closed = True
        with _DISPATCH:
            return [device for device in self.devices if self._leaves(device)]

    def _leaves(self, device: Device) -> bool:
        """Stop using a device; report whether no other pipeline uses it."""
        users = _USERS.get(device, weakref.WeakSet())
        users.discard(self)
        return not users
