"""One step of optimizers, layer by layer in the order of the forward, next to the run that waits for each layer.

::

    # function of the step   clip | optimizer.step(): layer 0, layer 1, ..., layer n | zero_grad
    # step() returns              ^ options and gradients have been read
    # next run                      forward:  wait  layer 0, wait  layer 1, ...       ^ its commit
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from ..device.outcome import on_error
from ..errors import StageError
from .parameters import LayerContents, ParameterStore
from .parts import OptimizerParts, can_step_in_parts
from .readiness import ReadinessTable
from .torch_steps import Optimizer, install, other_post_hooks, taking_over, under_way


class LayerSteps:
    """Runs the function of a step, and makes each layer readable as soon as its parameters are what the step makes."""

    # expected: number of optimizers that the function will step, as far as is known: the caller of the step goes on
    # when the last one has begun. `None`: when the function has ended.
    # has_begun: future that is done when the caller may go on: schedulers and gradients have been read
    # reason: why an optimizer was not stepped layer by layer, a sentence that names its class. Default: `None`.

    def __init__(
        self, store: ParameterStore, table: ReadinessTable, contents: Sequence[LayerContents], expected: int | None
    ) -> None:
        install()
        self.has_begun: Future[None] = Future()
        self.met = 0
        self.is_ahead = False
        self.reason: str | None = None
        self._store, self._table, self._contents, self._expected = store, table, contents, expected
        self._ended = threading.Event()
        self._targets = {c.index: store.targets(c.parameters()) for c in contents}
        self._parameters = {id(parameter) for layer in contents for parameter in layer.parameters()}
        self._in_layers = {id(target) for targets in self._targets.values() for target in targets}
        self._pending: set[int] = set()
        self._published: set[int] = set()
        self._released: dict[int, list[int]] = {}

    def wait_ended(self) -> None:
        """Wait until the function has ended, with or without an error."""
        self._ended.wait()

    def run(self, step: Callable[[], Any]) -> None:
        """Run the function of the step; when it has ended, every layer is readable."""
        try:
            with on_error(self._fail):
                with taking_over(self._take):
                    step()
                self._check()
                if self.is_ahead:
                    self.release_all()
        finally:
            self._ended.set()
            if not self.is_ahead:
                self.has_begun.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """Notify the run that reads layers meanwhile of an error."""
        if self.is_ahead:
            self._table.fail(error)

    def release_all(self) -> None:
        """Make the layers readable that are not yet, with the parameters as they are."""
        for contents in self._contents:
            if self._table.version(contents.index) < self._table.latest:
                self._release(contents, lambda: None)

    def writes(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Report whether the step may change one of these parameters of a layer."""
        return any(id(parameter) in self._parameters for parameter in parameters)

    # -- in the thread of the step -----------------------------------------------------------------------------------

    def _take(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optimizer:
        parts = OptimizerParts(optimizer, self._store.hold_state)
        mine = {id(parameter) for parameter in parts.parameters}
        obstacle = self._obstacle(optimizer, parts, [*args[1:], *kwargs.values()])
        if any(mine.intersection(map(id, self._targets[layer])) for layer in self._released):
            obstacle = f"{type(optimizer).__name__} steps parameters that were stepped before."
        if obstacle is not None and self.is_ahead:
            raise StageError(
                f"{obstacle} The next run may be reading them. Let the whole function end before:\n"
                "    model.step(step_fn)"
            )
        self.met += 1
        self.reason = obstacle or self.reason
        if self.met == 1:
            self._pending = {id(t) for targets in self._targets.values() for t in targets if t.grad is not None}
        if self.reason is not None or self._expected is None or self.met < self._expected:
            self._pending -= mine
            return self._store.take_step(optimizer, args, kwargs)  # at once, since the caller waits
        under_way(optimizer, self._ended)
        if not self.is_ahead:
            self._table.advance()
            self.is_ahead = True
            self.has_begun.set_result(None)
        self._walk(parts, mine)
        return parts.finish()

    def _walk(self, parts: OptimizerParts, left: set[int]) -> None:
        at_hand = self._store.updating(self._contents)
        for contents in self._contents:
            targets = set(map(id, self._targets[contents.index]))
            mine = left & targets
            left -= mine
            self._pending -= mine
            if contents.index in self._released:
                continue
            with at_hand(contents.index):
                if self._pending.isdisjoint(targets):  # no optimizer that is still to come changes the layer
                    self._release(contents, partial(parts.step, mine))
                else:
                    self._table.write(contents.index, self._table.latest, partial(parts.step, mine), done=False)

    def _obstacle(self, optimizer: Optimizer, parts: OptimizerParts, arguments: list[Any]) -> str | None:
        name = type(optimizer).__name__
        if any(argument is not None for argument in arguments):
            return f"the step of {name} was given a closure."
        if other_post_hooks(optimizer):
            return f"{name} has hooks after its step."
        if any(id(parameter) not in self._in_layers for parameter in parts.parameters):
            return f"{name} also updates parameters that are in no layer."
        if not can_step_in_parts(optimizer):
            return f"{name} does not update one parameter after the other."
        return None

    def _release(self, contents: LayerContents, update: Callable[[], None]) -> None:
        def fill() -> None:
            update()
            parameters = [p for p in contents.parameters() if id(p) not in self._published]
            self._store.refresh(parameters)  # one that a layer before shares may be read by now
            self._published.update(map(id, parameters))

        self._table.write(contents.index, self._table.latest, fill)
        self._released[contents.index] = self._versions(contents)

    def _versions(self, contents: LayerContents) -> list[int]:
        return [tensor._version for tensor in (*contents.parameters(), *self._targets[contents.index])]

    def _check(self) -> None:
        for contents in self._contents:
            before = self._released.get(contents.index)
            if before is not None and before != self._versions(contents):
                raise StageError(
                    f"A parameter of {contents.title} was changed after the step of its optimizer, while the next run "
                    "may have read it. Let the function of the step end before:\n"
                    "    model.step(step_fn)"
                )
