"""Optimizer steps: which parameters the optimizer gets, and when its step runs.

::

    # exact (default)   run t | step t | run t+1 ...            the step runs in the caller's thread
    # is_async=True     run t | run t+1       | run t+2 ...     a thread next to the runs; run t+1 reads the
    #                         | step t   |pub.| step t+1        parameters before step t, always exactly those
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any

from ..device.forking import free_after_fork
from ..device.interrupts import Uninterrupted, wait_for
from ..device.worker import Worker, add_note_once
from ..errors import StageError
from .parameters import LayerContents, ParameterStore
from .readiness import ReadinessTable

__all__ = ["OptimizerCtx", "StepRunner", "in_optimizer_ctx", "wait_for_updates"]

_DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("roundpipe_optimizer_ctx", default=0)


class OptimizerCtx:
    """A context manager in which ``parameters()`` of a pipeline are those for the optimizer.

    ::

        with OptimizerCtx():
            optimizer = torch.optim.AdamW(model.parameters())

    >>> import torch
    >>> from roundpipe_runtime import RoundPipe
    >>> model = RoundPipe(torch.nn.Linear(2, 1, bias=False), optim_dtype=torch.float64, devices="virtual:1")
    >>> with OptimizerCtx():
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> [parameter.dtype for parameter in optimizer.param_groups[0]["params"]], next(model.parameters()).dtype
    ([torch.float64], torch.float32)
    >>> model.close()
    """

    def __enter__(self) -> OptimizerCtx:
        _DEPTH.set(_DEPTH.get() + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _DEPTH.set(_DEPTH.get() - 1)


def in_optimizer_ctx() -> bool:
    """Report whether the caller is inside an :class:`OptimizerCtx`."""
    return _DEPTH.get() > 0


class StepRunner:
    """Runs optimizer steps, in the caller's thread or during the next run, and publishes their results.

    Args:
        store: parameters.
        table: versions of the layers that may be read.
        scan: function that returns the current contents of the layers.
    """

    def __init__(
        self, store: ParameterStore, table: ReadinessTable, scan: Callable[[], Sequence[LayerContents]]
    ) -> None:
        self._store = store
        self._table = table
        self._scan = scan
        self._worker = Worker("optimizer")
        self._update: Future[None] | None = None
        self._publication: Future[None] | None = None
        self._unpublished = False
        self._version = 0
        _RUNNERS.add(self)

    def run(self, step: Callable[[], Any]) -> None:
        """Run a step now, in this thread; the next run sees the new parameters."""
        self.synchronize()
        self._store.adopt()
        with OptimizerCtx():
            step()
        self._store.publish(stepped=True)

    def start(self, step: Callable[[], Any]) -> None:
        """Run a step in the background. The next run reads the parameters from before it, later runs those after it."""
        self.finish()
        self._store.adopt()
        self._store.freeze()
        with Uninterrupted():
            self._unpublished = True
            self._update = self._worker.submit(_in_ctx, step)

    @property
    def pending(self) -> bool:
        """Whether a step was started in the background and is not published yet."""
        return self._unpublished or self._publication is not None

    def version(self) -> int:
        """Return the version of the parameters that the next run reads."""
        return self._version

    def run_ended(self) -> None:
        """Note that the run during the last step has succeeded: the result of the step may now be published."""
        self.wait_update()
        if self._unpublished:
            with Uninterrupted():
                # Counted only once the work is accepted: the next run would wait forever for a version that no thread
                # publishes.
                self._publication = self._worker.submit(self._publish, self._version + 1)
                self._version += 1
                self._unpublished = False

    def is_here(self) -> bool:
        """Report whether the caller is the step that runs in the background."""
        return self._worker.is_here()

    def wait_update(self) -> None:
        """Wait for the step in the background, if there is one, and raise its error.

        Raises:
            StageError: the step itself waits for its end.
        """
        update = self._update
        if update is None:
            return
        if self.is_here():
            raise StageError(
                "A function given to step(..., is_async=True) called the pipeline, which waits for that function. Let "
                "it call the optimizer only. One that needs the model, like LBFGS, runs at once:\n"
                "    model.step(step_fn)"
            )
        try:
            wait_for(update)
        except BaseException as error:
            add_note_once(error, "While waiting for the function given to step(..., is_async=True).")
            raise
        finally:
            if update.done():  # an interruption ends the wait, and not the step
                self._update = None

    def resume(self) -> None:
        """Resume publishing after a failure: layers that already have the version are left alone."""
        failed = self._publication
        if failed is not None and failed.done() and failed.exception() and not self._worker.is_closed:
            with Uninterrupted():
                self._table.fail(None)
                self._publication = self._worker.submit(self._publish, self._version)

    def finish(self) -> None:
        """Wait for the step in the background and publish its result."""
        self.resume()
        try:
            self.run_ended()
        finally:
            self.run_ended()  # an error of the step is raised once; what it did is there nevertheless
            self._wait_publication()

    def _wait_publication(self) -> None:
        publication = self._publication
        if publication is None:
            return
        wait_for(publication)  # one that failed stays, for `resume`
        self._publication = None

    def synchronize(self) -> None:
        """Publish everything; stages then read the parameters themselves again."""
        self.finish()
        self._store.thaw()

    def close(self) -> None:
        """Finish, and end the thread."""
        try:
            self.synchronize()
        finally:
            self._worker.close()

    def _publish(self, version: int) -> None:
        try:
            for contents in self._scan():
                if self._table.version(contents.index) < version:
                    self._table.write(contents.index, version, partial(self._store.refresh, contents.parameters()))
        except BaseException as error:  # runs that wait for this version hear of it
            add_note_once(
                error,
                "While what step(..., is_async=True) did was made the parameters of the next run. Nothing of the step "
                "is lost: the next call of the pipeline goes on with it.",
            )
            self._table.fail(error)
            raise


def _in_ctx(step: Callable[[], Any]) -> None:
    with OptimizerCtx():
        step()


_LOG = logging.getLogger("roundpipe_runtime")


@atexit.register
def _report_failures() -> None:
    """Report an error at the end of the process that no call raised: a failed last step must not look like success."""
    for runner in list(_RUNNERS):
        for what, future in (("function given to", runner._update), ("publication of", runner._publication)):
            error = future.exception() if future is not None and future.done() else None
            if error is not None:
                _LOG.error("The %s the last step(..., is_async=True) failed.", what, exc_info=error)


_RUNNERS: weakref.WeakSet[StepRunner] = weakref.WeakSet()
_RUNNERS_LOCK = free_after_fork(threading.Lock())


def wait_for_updates() -> None:
    """Wait for every step that runs in the background, of any pipeline; errors stay for the pipeline's next call."""
    with _RUNNERS_LOCK:
        runners = list(_RUNNERS)
    for runner in runners:
        update = runner._update
        if update is not None and not runner.is_here():  # a step may ask from inside
            with contextlib.suppress(Exception):
                wait_for(update)
