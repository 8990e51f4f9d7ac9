"""Step the optimizer on shards, and send the new weights to the other ranks.

::

    run t | step t | run t+1                         the step is that of this rank's rows
                   | layer 0 | layer 1 | layer 2     weights after the step, gathered layer by layer next to run t+1,
                                                     which waits for each layer before it reads it
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from ...device.worker import Outcome, Uninterrupted
from ...errors import DistributedError, RankStepError, format_failure
from ...optim.parameters import LayerContents
from ...optim.readiness import ReadinessTable
from ...optim.step import OptimizerCtx, StepRunner
from ...optim.torch_steps import hear_steps
from ..ranks.ranks import Ranks
from .shards import RankStore

# Optimizers that compute sums over a whole matrix, or over all parameters.
_NOT_ELEMENTWISE = {"adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap", "sparseadam"}
_IN_BLOCKS = ("4bit", "8bit", "fp8")  # quantized moments, with a scale for each block


class RankSteps(StepRunner):
    """Runs the optimizer steps of one rank, and exchanges the updated weights with the other ranks."""

    _store: RankStore
    ranks: Ranks

    def __init__(self, store: RankStore, table: ReadinessTable, scan: Callable[[], Sequence[LayerContents]]) -> None:
        super().__init__(store, table, lambda: self._contents)
        self.ranks = store.ranks
        # Read by the caller's thread, while no copies of a run are in the places of parameters.
        self._scan_now = scan
        self._contents: Sequence[LayerContents] = ()
        self._is_inside = False
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        _runners().add(self)

    def run(self, step: Callable[[], Any]) -> None:
        """Run an optimizer step now, in this thread; the next run waits until each layer's new weights have arrived."""
        self.synchronize()
        self._store.adopt()
        self._run_agreed(step)
        self._publish_next()

    def start(self, step: Callable[[], Any]) -> None:
        """Run an optimizer step in the background; the new parameters are used after the next run."""
        super().start(partial(self._run_agreed, step))

    def run_exact(self, step: Callable[[], Any], lock: contextlib.AbstractContextManager[Any]) -> None:
        """Run an optimizer step now; the new weights of all ranks are gathered in parallel with the next run."""
        self.run(step)

    def run_ended(self) -> None:
        """Note that the run in parallel with the last step has succeeded, so that the new weights may be exchanged."""
        if self._unpublished:
            self.wait_update()
            self._start_publication()
        super().run_ended()

    def _run_agreed(self, step: Callable[[], Any]) -> None:
        """Run a step; raise an error on all ranks if it fails on one."""
        self._is_inside = True
        with Outcome() as outcome, OptimizerCtx():
            step()
        self._is_inside = False
        failure = outcome.error
        if failure is None:
            # Fails if the step failed on another rank; otherwise one model would have weights of two steps.
            self.ranks.exchange(None, "step")
            return
        if not isinstance(failure, RankStepError):
            self.ranks.fail_step(format_failure(failure))
        raise failure

    def _publish_next(self) -> None:
        """Publish the step of all ranks, layer by layer, in parallel with the next run."""
        if self.ranks.num_shards == 1:
            self._store.publish(stepped=True)
            return
        self._start_publication()
        # Runs wait for the new version, so the publishing must have been submitted before the version is announced.
        with Uninterrupted():
            self._publication = self._worker.submit(self._publish, self._table.latest + 1)
            self._table.advance()

    def _start_publication(self) -> None:
        # The publishing thread cannot scan, since a parallel run has replaced parameters by its device copies.
        self._contents = self._scan_now()
        self._store.start_publication()

    def close(self) -> None:
        """Finish the current step, and end the thread that runs steps."""
        _runners().discard(self)
        super().close()

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer updates this pipeline; raise an error if the optimizer cannot update shards."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        targets = {id(target) for target in self._store.all_targets()}
        own = held & targets
        if optimizer in self._checked or self.ranks.num_shards == 1:
            return bool(own)
        whole = {id(parameter) for parameter in self._store.model.parameters()} - targets
        if held & whole:
            raise DistributedError(
                f"{type(optimizer).__name__} was made from the full parameters of the model, which get no gradient: "
                "this rank has the gradients of its own rows only. Create the optimizer inside OptimizerCtx:\n"
                "    with OptimizerCtx():\n"
                f"        optimizer = {type(optimizer).__name__}(model.parameters(), ...)"
            )
        if own:
            self._check_elementwise(optimizer)
        self._checked.add(optimizer)
        return bool(own)

    def _check_elementwise(self, optimizer: torch.optim.Optimizer) -> None:
        names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
        if any(name in _NOT_ELEMENTWISE for name in names):
            problem = "sums over whole matrices, so its results for shards would be wrong"
        elif any(name.endswith(_IN_BLOCKS) for name in names):
            problem = "has one scale per block of values, and shards cut blocks, so its results would be wrong"
        else:
            return
        raise DistributedError(
            f"{type(optimizer).__name__} {problem}. Each rank has one of {self.ranks.num_shards} shards of each "
            "matrix. Keep whole matrices on each host; the results stay the same:\n"
            f'    mesh = init_device_mesh("cpu", ({self.ranks.size}, 1))\n    model = RoundPipe(model, mesh=mesh)'
        )

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait until all weights have arrived before an optimizer changes them; raise an error as in :meth:`owns`."""
        if self.owns(optimizer) and not self._is_inside:
            self.synchronize()
            self._store.adopt()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange the new weights after the caller has run an optimizer step on all ranks."""
        if not self._is_inside and self.ranks.num_shards > 1 and self.owns(optimizer):
            self._publish_next()


@cache
def _runners() -> weakref.WeakSet[RankSteps]:
    """Return the set of runners that are notified of the steps of all optimizers."""
    found: weakref.WeakSet[RankSteps] = weakref.WeakSet()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for runner in list(found):
            runner.before_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for runner in list(found):
            runner.after_step(optimizer)

    hear_steps(before, after)
    return found
