"""Run a batch as one group of rows in one process, as an engine without ranks does.

::

    one group          cut | run          | commit
    groups of ranks    cut | run each one | verdict of all ranks | commit the sums      distributed/rank_groups

What differs between both is here; cutting and running are the engine's, for any number of groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import pytree

from ..batch.loss import LossContract
from ..optim.parameters import LayerContents, ParameterStore
from ..optim.readiness import ReadinessTable
from ..optim.step import StepRunner
from .config import RoundPipeRunConfig
from .outputs import Call, Cutting, feed_inputs
from .run import Run


class GroupEngine(Protocol):
    """The part of an engine that runs and commits one group."""

    def forward_here(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: RoundPipeRunConfig) -> Any:
        """Run the rows of this process forward."""

    def wait_step(self, run: Run) -> None:
        """Wait for a step in the background."""

    def commit(self, run: Run) -> None:
        """Commit the results of a complete run to the model."""


AnyEngine = TypeVar("AnyEngine", bound=GroupEngine, contravariant=True)


class OneGroup(Generic[AnyEngine]):
    """A batch that one process runs as one group of rows."""

    replicas: int = 1  # number of groups of the batch
    is_first: bool = True  # whether this process is the one that warns

    @property
    def own_groups(self) -> int:
        """The number of groups that this process runs."""
        return 1

    # -- what the engine is made of ----------------------------------------------------------------------------------

    def make_store(self, model: nn.Module, optim_dtype: torch.dtype | None) -> ParameterStore:
        """Return the store of the model's parameters."""
        return ParameterStore(model, optim_dtype)

    def make_steps(
        self, store: ParameterStore, table: ReadinessTable, scan: Callable[[], Sequence[LayerContents]]
    ) -> StepRunner:
        """Return the runner of the optimizer's steps."""
        return StepRunner(store, table, scan)

    def begin(self, engine: AnyEngine, model: nn.Module) -> None:
        """Agree with other ranks on an engine that was just made."""

    # -- a call ------------------------------------------------------------------------------------------------------

    def entering(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a call that ends in :meth:`run_call`, in which other ranks may wait for this one."""
        return contextlib.nullcontext()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which sums of gradients stay on this rank; with one process it does nothing."""
        return contextlib.nullcontext()

    def stopping(self, run: Run) -> contextlib.AbstractContextManager[None]:
        """Return the context in which news of other ranks stop a run."""
        return contextlib.nullcontext()

    @property
    def counts_forward(self) -> bool:
        """Whether a forward alone counts as a run; all ranks must agree."""
        return self.replicas == 1

    @property
    def moves_generators(self) -> bool:
        """Whether the generators of the caller move with each run that draws: in groups, with each call."""
        return self.replicas == 1

    def rows_of_batch(self, rows: int) -> int:
        """Return the row count of the whole batch; ``rows`` is that of this process."""
        return rows

    def forward(
        self, engine: AnyEngine, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: RoundPipeRunConfig
    ) -> Any:
        """Run the rows of this process forward; the caller's ``backward`` then covers the whole batch."""
        return engine.forward_here(args, kwargs, config)

    def run_call(
        self,
        engine: AnyEngine,
        name: str,
        cut: Callable[[], Cutting],
        config: RoundPipeRunConfig,
        work: Callable[[Call], None],
    ) -> Any:
        """Run forward, loss and backward, and commit when all of it has succeeded."""
        # cut: function that returns the microbatches of each group of this process
        parts, reduction = cut()
        rows = [microbatch.rows for part in parts for microbatch in part]
        call = Call(parts, [0], LossContract(reduction or "sum", rows))
        work(call)
        [(run, inputs)] = call.runs
        total = pytree.tree_map(torch.Tensor.cpu, call.contract.total())
        engine.wait_step(run)
        feed_inputs(run, inputs, call.contract.gradient_scale())
        engine.commit(run)
        return total

    # -- state between calls -----------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget sums of gradients that no target has yet."""

    def close(self) -> None:
        """Release the resources of the groups."""
