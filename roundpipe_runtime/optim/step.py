"""Optimizer steps: which parameters the optimizer gets, when its step runs, and the gradient scaler."""

# exact (default)   run t | step t | run t+1 ...            the step runs in the caller's thread
# is_async="exact"  run t | run t+1 ...                     a thread, layer by layer: run t+1 waits for each
#                         | step t   |                      layer's update, with results as by default
# is_async=True     run t | run t+1       | run t+2 ...     a thread next to the runs; run t+1 reads the
#                         | step t   |pub.| step t+1        parameters before step t

from __future__ import annotations

import atexit
import contextlib
import contextvars
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch.amp import GradScaler as _GradScaler

from ..device.worker import Uninterrupted, Worker, error_of, free_after_fork, is_done, noting, on_error, wait_for
from ..errors import RoundPipeWarning, StageError, warn
from .layer_contents import LayerContents
from .parameters import ParameterStore
from .parts import OptimizerParts, can_step_in_parts
from .readiness import ReadinessTable
from .torch_steps import Optimizer, install, other_post_hooks, taking_over, under_way


class GradScaler(_GradScaler):
    """torch's gradient scaler, for gradients on the host and losses on any device.

    The loss function calls ``scale``, the step function ``step``, and the training loop ``update``::

        loss_fn=lambda outputs, labels: scaler.scale(criterion(outputs, labels))
        model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
        scaler.update()

    ``update`` waits for an optimizer step in the background, since it needs the step's result.

    Args:
        init_scale: initial scale.
        growth_factor: multiplies the scale after ``growth_interval`` steps without infinite gradients.
        backoff_factor: multiplies the scale after a step with infinite gradients.
        growth_interval: number of steps without infinite gradients before the scale grows.
        enabled: whether to scale; ``False`` makes everything except ``step`` do nothing.

    >>> scaler = GradScaler(init_scale=4.0)
    >>> scaler.scale(torch.tensor(2.0)), scaler.get_scale()
    (tensor(8.), 4.0)
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if enabled:
            # two devices may scale their first losses at the same time, so the tensor must exist before
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def scale(self, outputs: Any) -> Any:
        """Return losses times the scale; first wait for a background optimizer step, which may set the scale."""
        wait_for_updates(lambda runner: runner.is_exact)
        return super().scale(outputs)

    def update(self, new_scale: float | torch.Tensor | None = None, is_async: bool = True) -> None:
        """Set the scale of the next step.

        Args:
            new_scale: scale to set (default: the current scale, which becomes smaller after infinite or NaN gradients,
                and larger after ``growth_interval`` steps in a row without such gradients).
            is_async: has no effect: the new scale is always set when this method returns.
        """
        wait_for_updates()
        super().update(new_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a scaler state that :meth:`state_dict` returned."""
        super().load_state_dict(state_dict)
        if self._enabled:
            self._scale = torch.full((), state_dict["scale"], dtype=torch.float32)

    def get_growth_factor(self, up_to_date: bool = False) -> float:
        """Return the growth factor; ``up_to_date`` has no effect here."""
        return super().get_growth_factor()

    def get_backoff_factor(self, up_to_date: bool = False) -> float:
        """Return the backoff factor; ``up_to_date`` has no effect here."""
        return super().get_backoff_factor()

    def get_growth_interval(self, up_to_date: bool = False) -> int:
        """Return the growth interval; ``up_to_date`` has no effect here."""
        return super().get_growth_interval()


_DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("roundpipe_optimizer_ctx", default=0)


class OptimizerCtx:
    """A context manager in which ``parameters()`` of a pipeline returns the tensors that an optimizer updates.

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

    def __exit__(self, *_: object) -> None:
        _DEPTH.set(_DEPTH.get() - 1)


def in_optimizer_ctx() -> bool:
    return _DEPTH.get() > 0


class StepRunner:
    """Runs optimizer steps now or during the next forward and backward, and writes their results to the parameters."""

    def __init__(
        self, store: ParameterStore, table: ReadinessTable, scan: Callable[[], Sequence[LayerContents]]
    ) -> None:
        self._store, self._table, self._scan = store, table, scan
        self._worker = Worker("optimizer")
        self._update: Future[None] | None = None
        self._publication: Future[None] | None = None
        self._unpublished = False
        self._ahead: LayerSteps | None = None
        self._expected: int | None = None
        self._warned: set[str] = set()
        _RUNNERS.add(self)

    def run(self, step: Callable[[], Any]) -> None:
        """Run an optimizer step in this thread; the next pipeline call reads the new parameters."""
        self.synchronize()
        self._store.adopt()
        _in_ctx(step)
        self._store.publish(stepped=True)

    def start(self, step: Callable[[], Any]) -> None:
        """Run an optimizer step in the background; the next pipeline call still reads the old parameters."""
        self.finish()
        self._store.adopt()
        self._store.freeze()
        with Uninterrupted():
            self._unpublished = True
            self._update = self._worker.submit(_in_ctx, step)

    def run_exact(self, step: Callable[[], Any], lock: contextlib.AbstractContextManager[Any]) -> None:
        """Start an optimizer step that updates one layer after the other in the background."""
        self.synchronize()

        def not_begun(error: BaseException) -> None:
            self._ahead = None

        with lock:  # a run of another thread has ended, and finds the step when it begins
            self.synchronize()  # again, because no run may begin between this call and the start of the step
            self._store.adopt()
            self._store.note_names()
            steps = LayerSteps(self._store, self._table, self._scan(), self._expected)
            with Uninterrupted(), on_error(not_begun):
                self._ahead = steps
                self._update = self._worker.submit(_in_ctx, partial(steps.run, step))
        wait_for(steps.has_begun)  # the step has read its inputs, or has ended
        if steps.met:
            self._expected = max(steps.met, self._expected or 0)
        if steps.reason is not None and steps.reason not in self._warned:
            self._warned.add(steps.reason)
            warn(
                f'{steps.reason} So step(..., is_async="exact") returns at the end of the step, as step(step_fn) does.',
                RoundPipeWarning,
            )
        if not steps.is_ahead:
            self.synchronize()
            self._store.publish(stepped=True)

    @property
    def pending(self) -> bool:
        """Whether the parameters may lack the result of a background optimizer step."""
        ahead = self._ahead is not None and (self._ahead.is_ahead or not self.is_here())
        return self._unpublished or self._publication is not None or ahead

    def writes(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether a background step may change one of the parameters before the next pipeline call reads it."""
        ahead = self._ahead
        return ahead is not None and ahead.is_ahead and any(id(one) in ahead.parameters for one in parameters)

    @property
    def is_exact(self) -> bool:
        """Whether the next pipeline call waits, layer by layer, for the optimizer step in the background."""
        return (ahead := self._ahead) is not None and ahead.is_ahead

    def run_ended(self) -> None:
        """After a successful pipeline call, start to copy the result of a background step to the parameters."""
        self.wait_update()
        if self._unpublished:
            with Uninterrupted():
                # advance after the work is accepted, because a run waits forever for a version that is not published
                self._publication = self._worker.submit(self._publish, self._table.latest + 1)
                self._table.advance()
                self._unpublished = False

    def wait_cleared(self) -> None:
        """Wait for the end of an optimizer step in another thread, because the step may clear gradients at its end."""
        if (ahead := self._ahead) is not None and ahead.is_ahead:
            ahead.ended.wait()

    def is_here(self) -> bool:
        return self._worker.is_here()

    def check_not_here(self) -> None:
        """Raise an error if the caller is a step function that runs in the background layer by layer."""
        if self.is_exact and self.is_here():
            self.wait_update()

    def wait_update(self) -> None:
        """Wait for the optimizer step in the background, and raise its error if it failed."""
        update, ahead = self._update, self._ahead
        if self.is_here():  # `_update` may not be set yet
            if ahead is not None and not ahead.is_ahead:
                return  # the step runs as it would in the caller's thread, which waits for it
            raise StageError(
                f"A function given to {self._call()} called the pipeline, which waits for that function. In a step "
                "function, call the optimizer, but not the model. Run an optimizer that calls the model, like LBFGS, "
                "in the foreground:\n    model.step(step_fn)"
            )
        if update is None:
            return
        call = self._call()
        try:
            with noting(f"The error was found while waiting for the function given to {call}."):
                wait_for(update)
        finally:
            if is_done(update):  # an interruption ends the wait, but not the step
                self._update = None
                self._end_exact()

    def _call(self) -> str:
        return "step(..., is_async=True)" if self._ahead is None else 'step(..., is_async="exact")'

    def _end_exact(self) -> None:
        """After a background step has finished or failed, let the next pipeline call read the step's result."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead.is_ahead:
                ahead.release_all()
                self._table.fail(None)
                self._store.note_published()
            self._store.thaw()

    def note_raised(self, error: BaseException) -> None:
        """Forget an error of a background optimizer step, because a pipeline call has already raised this error."""
        update = self._update
        if self._ahead is not None and update is not None and not self.is_here():
            with contextlib.suppress(BaseException):
                wait_for(update)
            if error_of(update) is error:
                self._update = None
                self._end_exact()

    def resume(self) -> None:
        """Continue to copy the result of an optimizer step to the parameters, if an error has stopped the copy."""
        update = self._update
        if self.is_exact and update is not None and is_done(update) and error_of(update) is None:
            self.wait_update()
        failed = self._publication
        if failed is not None and error_of(failed) is not None and not self._worker.is_closed:
            with Uninterrupted():
                self._table.fail(None)
                self._publication = self._worker.submit(self._publish, self._table.latest)

    def finish(self) -> None:
        self.resume()
        try:
            self.run_ended()
        finally:
            self.run_ended()  # an error of the step is raised once, and its result is still published
            self._wait_publication()

    def _wait_publication(self) -> None:
        if (publication := self._publication) is not None:
            wait_for(publication)  # a failed publication is kept for `resume`
            self._publication = None

    def wait_written(self) -> None:
        """Wait until no thread writes parameters, even if the result of a background step is not copied to them yet."""
        self.resume()
        self.wait_update()
        if not self.is_here():
            self._wait_publication()

    def synchronize(self) -> None:
        """Write the result of the background step to the parameters, and delete the copies made for the step."""
        self.finish()
        if not self.is_here():
            self._store.thaw()

    def close(self) -> None:
        try:
            self.synchronize()
        finally:
            self._worker.close()

    def _publish(self, version: int) -> None:
        note = (
            "The error occurred while the result of step(..., is_async=True) was copied to the parameters. No update "
            "is lost: the next call of the pipeline continues the copy."
        )
        with on_error(self._table.fail), noting(note):  # also runs that wait for this version raise the error
            for contents in self._scan():
                if self._table.version(contents.index) < version:
                    self._table.write(contents.index, version, partial(self._store.refresh, contents.parameters()))


def _in_ctx(step: Callable[[], Any]) -> None:
    with OptimizerCtx():
        step()


_LOG = logging.getLogger("roundpipe_runtime")


@atexit.register
def _report_failures() -> None:
    """At the end of the process, log errors of background optimizer steps that were never raised."""
    for runner in list(_RUNNERS):
        for what, future in (("function given to", runner._update), ("publication of", runner._publication)):
            error = None if future is None else error_of(future)
            if error is not None:
                _LOG.error("The %s the last %s failed.", what, runner._call(), exc_info=error)


_RUNNERS: weakref.WeakSet[StepRunner] = weakref.WeakSet()
_RUNNERS_LOCK = free_after_fork(threading.Lock())


def wait_for_updates(which: Callable[[StepRunner], bool] = lambda runner: True) -> None:
    """Wait for background optimizer steps of all pipelines; the next call of each pipeline raises its errors."""
    with _RUNNERS_LOCK:
        runners = list(_RUNNERS)
    for runner in runners:
        # a step must not wait for itself
        if (update := runner._update) is not None and which(runner) and not runner.is_here():
            with contextlib.suppress(Exception):
                wait_for(update)


class LayerSteps:
    """Runs an optimizer step in the background; the next pipeline call waits for each layer until it is updated."""

    # expected: number of optimizers that the function steps; the caller continues when the last step has begun. `None`
    # if the number is not known: the caller continues when the function has ended.
    # has_begun: future that is done when the caller may continue, because options and gradients have been read
    # reason: why an optimizer was not stepped layer by layer, as a sentence

    def __init__(
        self, store: ParameterStore, table: ReadinessTable, contents: Sequence[LayerContents], expected: int | None
    ) -> None:
        install()
        self.has_begun: Future[None] = Future()
        self.met, self.is_ahead = 0, False
        self.reason: str | None = None
        self._store, self._table, self._contents, self._expected = store, table, contents, expected
        self.ended = threading.Event()
        self._targets = {c.index: store.targets(c.parameters()) for c in contents}
        self.parameters = {id(parameter) for layer in contents for parameter in layer.parameters()}
        self._in_layers = {id(target) for targets in self._targets.values() for target in targets}
        self._pending: set[int] = set()
        self._published: set[int] = set()
        self._released: dict[int, list[int]] = {}

    def run(self, step: Callable[[], Any]) -> None:
        try:
            with on_error(lambda error: self._table.fail(error) if self.is_ahead else None):
                with taking_over(self._take):
                    step()
                for contents in self._contents:
                    before = self._released.get(contents.index)
                    if before is not None and before != self._versions(contents):
                        raise StageError(
                            f"A parameter of {contents.title} was changed after the step of its optimizer, while the "
                            "next forward may have read it. End the step before the next forward:\n    "
                            "model.step(step_fn)"
                        )
                if self.is_ahead:
                    self.release_all()
        finally:
            self.ended.set()
            if not self.is_ahead:
                self.has_begun.set_result(None)

    def release_all(self) -> None:
        """Let the next pipeline call read all layers that still wait for an update, with their current parameters."""
        for contents in self._contents:
            if self._table.version(contents.index) < self._table.latest:
                self._release(contents, lambda: None)

    def _take(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optimizer:
        parts, name, obstacle = OptimizerParts(optimizer, self._store.hold_state), type(optimizer).__name__, None
        left = {id(parameter) for parameter in parts.parameters}
        if any(left.intersection(map(id, self._targets[layer])) for layer in self._released):
            obstacle = f"{name} updates parameters that were already updated in this step."
        elif any(argument is not None for argument in (*args[1:], *kwargs.values())):
            obstacle = f"The step of {name} was given a closure."
        elif other_post_hooks(optimizer):
            obstacle = f"{name} has hooks that run after its step."
        elif not left <= self._in_layers:
            obstacle = f"{name} also updates parameters that are in no layer."
        elif not can_step_in_parts(optimizer):
            obstacle = f"{name} does not update one parameter after the other."
        if obstacle is not None and self.is_ahead:
            raise StageError(
                f"{obstacle} The next forward may already read the weights. End the step before the next forward:\n"
                "    model.step(step_fn)"
            )
        self.met += 1
        self.reason = obstacle or self.reason
        if self.met == 1:
            self._pending = {id(t) for targets in self._targets.values() for t in targets if t.grad is not None}
        if self.reason is not None or self._expected is None or self.met < self._expected:
            self._pending -= left
            return self._store.take_step(optimizer, args, kwargs)  # the caller waits for this step
        under_way(optimizer, self.ended)
        if not self.is_ahead:
            self._table.advance()
            self.is_ahead = True
            self.has_begun.set_result(None)
        at_hand = self._store.updating(self._contents)
        for contents in self._contents:
            targets = set(map(id, self._targets[contents.index]))
            mine = left & targets
            left -= mine
            self._pending -= mine
            if contents.index in self._released:
                continue
            with at_hand(contents.index):
                if self._pending.isdisjoint(targets):  # no later optimizer changes the layer
                    self._release(contents, partial(parts.step, mine))
                else:
                    self._table.write(contents.index, self._table.latest, partial(parts.step, mine), done=False)
        return parts.finish()

    def _release(self, contents: LayerContents, update: Callable[[], None]) -> None:
        def fill() -> None:
            update()
            parameters = [p for p in contents.parameters() if id(p) not in self._published]
            self._store.refresh(parameters)  # a parameter that an earlier layer shares may already be read
            self._published.update(map(id, parameters))

        self._table.write(contents.index, self._table.latest, fill)
        self._released[contents.index] = self._versions(contents)

    def _versions(self, contents: LayerContents) -> list[int]:
        return [tensor._version for tensor in (*contents.parameters(), *self._targets[contents.index])]
