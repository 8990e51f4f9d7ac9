"""Prove, at the first call of each kind, that the pieces of a model compute each row by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs

from ..batch.flat import FlatBatch
from ..engine.config import RoundPipeRunConfig
from ..engine.driver import Engine
from ..engine.repeats import Repeats
from ..engine.rows import CannotTryError, RowTrial, first_that_mixes
from .cutting.capture import asked_for
from .cutting.check import engine_on_host
from .cutting.cut import Cut
from .cutting.cut_state import CutState
from .cutting.joined_state import CannotJoinError, state_leaves
from .cutting.pieces import LayerCall
from .loss_ways import LossWays


class RowWays:
    """Which pieces of one model mix rows, by kind of call."""

    def __init__(self, made: Cut, engine: Engine, losses: LossWays, *, shares_batches: bool) -> None:
        self._made, self._engine, self._losses, self._shares_batches = made, engine, losses, shares_batches
        self._found: dict[Hashable, int | None] = {}
        self._repeats = Repeats()

    def first_that_mixes(
        self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig, number: int
    ) -> int | None:
        """Return the first piece whose outputs for some rows of a call depend on others; ``None`` without one."""
        kind = self._losses.kind_of(args, kwargs), number
        if self._repeats.is_due(kind, None) or kind not in self._found:
            if number == 0 or len(self._engine.split(FlatBatch.of(args, kwargs, None), config)) == 1:
                return None
            self._engine.steps.wait_written()  # a step would change weights between two evaluations
            with contextlib.ExitStack() as stack:
                engine = self._engine
                if self._shares_batches:
                    engine = stack.enter_context(engine_on_host(self._made.model, self._made.pieces))
                asks = asked_for(self._made.model, kwargs) != "none"  # of hooks of transformers
                trials = (RowTrial(*one) for one in self._losses.some_rows(args, kwargs, config))
                try:
                    self._found[kind] = first_that_mixes(engine, trials, config, number, _leaves, with_hooks=asks)
                except (CannotJoinError, CannotTryError):  # it is not clear what the rows are, or the call fails itself
                    self._found[kind] = None
        return self._found[kind]

    def title(self, piece: int) -> str:
        """Return a description of a piece, for warnings."""
        found = self._made.pieces[piece]
        if isinstance(found, LayerCall):
            return f"{found.program.calls[found.place].layer} ({type(found.layer).__name__})"
        inner = type(self._made.model).__name__
        return inner if self._made.report.is_whole else f"the code of {inner} around its layers"


def _leaves(output: Any) -> Sequence[object]:
    """Return the outputs of a piece that are compared. Losses are left out: they have a proof of their own."""
    found = state_leaves(output) if isinstance(output, CutState) else pytree.tree_leaves(output)
    return [one for one in found if not isinstance(one, torch.Tensor) or one.dim() > 0]
