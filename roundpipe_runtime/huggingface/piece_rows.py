"""Run a few rows of a batch through the pieces of a model, to find how its loss adds up and which pieces mix rows."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs

from ..batch.entries import FlatBatch, FlatMicrobatch
from ..batch.joining import join
from ..engine.code_state import Repeats
from ..engine.config import RoundPipeRunConfig
from ..engine.driver import Engine
from ..engine.loss_check import kind_of_value
from ..engine.rows import CannotTryError, GradientTrial, RowTrial, compare_gradients, few_rows, first_that_mixes
from ..errors import SplitError
from .batches import split_lists, split_pictures
from .cutting.check import engine_on_host
from .cutting.cut import Cut
from .cutting.cut_plan import CannotJoinError, CutState, RowAxes, join_states, state_leaves
from .cutting.pieces import LayerCall
from .loss.call_options import CALL_OPTIONS, split_options

# The fewest rows that split into two parts of different sizes.
_ROWS = 3


class PieceRows:
    """Runs a few rows through the pieces of one model, and records which pieces mix rows, by kind of call."""

    # shares_batches: whether other processes run parts of the same batches. A process may have fewer rows than a trial
    # needs, so each trial runs on the host, without waiting for other processes.

    def __init__(self, made: Cut, engine: Engine, *, shares_batches: bool) -> None:
        self.made, self.engine, self.shares_batches = made, engine, shares_batches
        self._repeats = Repeats()
        self._axes: dict[Hashable, RowAxes] = {}
        self._mixing: dict[Hashable, GradientTrial] = {}
        self._compared: collections.Counter[Hashable] = collections.Counter()

    def mixing(self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig, number: int) -> GradientTrial:
        """Check the first ``number`` pieces: which of them mixes rows, and whether gradients scale with the loss."""
        kind = self.kind_of(args, kwargs), number, config.requires_grad
        if self._repeats.is_due(kind) or kind not in self._mixing:
            batch = FlatBatch.of(args, kwargs, None)
            parts = self.engine.split(batch, config)
            if number == 0 or len(parts) == 1:
                return GradientTrial()
            self.engine.steps.wait_written()  # a step would change weights between two evaluations
            self._mixing.setdefault(kind, GradientTrial())
            self._compared[kind] += 1
            # the rows may be unknown, or the model may fail on a few rows
            with self._trial_engine() as engine, contextlib.suppress(CannotJoinError, CannotTryError):
                trials, tried = self.some_rows(batch, config), list[RowTrial]()
                found = first_that_mixes(engine, trials, config, number, _leaves, tried)
                if found is not None:
                    self._mixing[kind] = GradientTrial(found)
                elif self._compared[kind] % 2:  # calls 1, 4, 16, ...
                    rows, few = [one.rows for one in parts], partial(self.some_rows, batch, config)
                    self._mixing[kind] = compare_gradients(engine, tried, rows, few, config, number, _leaves)
        return self._mixing[kind]

    def title(self, piece: int) -> str:
        """Return a description of a piece, for warnings."""
        found = self.made.pieces[piece]
        if isinstance(found, LayerCall):
            return f"{found.program.calls[found.place].layer} ({type(found.layer).__name__})"
        inner = type(self.made.model).__name__
        return inner if self.made.report.is_whole else f"the code of {inner} around its layers"

    def join(
        self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig
    ) -> Callable[[list[CutState]], CutState] | None:
        """Return a function that joins the states of a call's microbatches after the layers of the model."""
        # returns: the function, which may raise `CannotJoinError`; `None` if joining is impossible
        if self.made.report.is_whole:
            return None
        kind = self.kind_of(args, kwargs)
        if kind not in self._axes:
            try:
                trial = next(self.some_rows(FlatBatch.of(args, kwargs, None), config))
                states, shown = self.some_states(trial, config)
                self._axes[kind] = RowAxes.of(shown, states[-1])
            except CannotJoinError:
                return None
        return partial(join_states, axes=self._axes[kind], args=args, kwargs=kwargs)

    def joined_state(self, kind: Hashable, trial: RowTrial, states: Sequence[CutState], shown: CutState) -> CutState:
        """Join the states after the layers for parts of a trial; raises `CannotJoinError` if this is impossible."""
        axes = self._axes[kind] = RowAxes.of(shown, states[-1])
        return join_states([*states], axes, *call_of(trial.whole))

    def kind_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """Return the properties of a call that may decide which code of the model runs."""
        given, options = split_options(kwargs)
        asked = options is not None and (options.loss_only, options.smoothed_loss is not None)
        named = frozenset((name, kind_of_value(value)) for name, value in given.items() if value is not None)
        return named, tuple(map(kind_of_value, args)), self.made.model.training, asked

    def repeated_rows(self, batch: FlatBatch, config: RoundPipeRunConfig) -> Iterator[RowTrial]:
        """Yield trials with the first rows of the batch, in which one row is repeated, so that both parts have it."""
        in_two = dataclasses.replace(config, num_microbatch=2)
        for trial in itertools.islice(self.some_rows(batch, config), 1):
            for one, other in itertools.permutations(range(trial.count), 2):
                whole = dataclasses.replace(trial.in_order([one, other, one]), rows=3)
                few = FlatBatch.of(*call_of(whole), None)
                found = self.engine.split(few, self._split_again(few, in_two))
                if [part.rows for part in found] == [2, 1]:
                    yield RowTrial(whole, found)

    def three_at_least(self, batch: FlatBatch, config: RoundPipeRunConfig) -> tuple[FlatBatch, RoundPipeRunConfig]:
        """Return a batch of one row with the row three times, and its settings; return other batches unchanged."""
        if [one.rows for one in self.engine.split(batch, config)] != [1]:
            return batch, config
        kwargs, options = split_options(batch.kwargs.tree)
        held = batch.args.tree, kwargs, batch.label.tree
        rows = [
            pytree.tree_map_only(torch.Tensor, torch.clone, held) for _ in range(3)
        ]  # `join` does not concatenate a tensor with itself
        args, kwargs, label = join(rows, [1, 1, 1], rows=[1, 1, 1])
        if options is not None:
            kwargs = {**kwargs, CALL_OPTIONS: options}
        few = FlatBatch.of(args, kwargs, label)
        return few, self._split_again(few, config)

    def few_rows(self, batch: FlatBatch, config: RoundPipeRunConfig) -> Iterator[RowTrial]:
        """Yield trials with a few rows of the batch and their labels each; yield none if rows cannot be split."""
        with contextlib.suppress(CannotJoinError, SplitError):
            yield from self.some_rows(batch, config)

    def some_rows(self, batch: FlatBatch, config: RoundPipeRunConfig, most: int = _ROWS) -> Iterator[RowTrial]:
        """Yield trials with a few rows of the batch each; raises `CannotJoinError` if there is none."""
        counts = [one.rows for one in self.engine.split(batch, config)]
        if None in counts:
            raise CannotJoinError("it is not clear how many rows a microbatch has")
        number, is_cut = math.ceil(sum(count or 0 for count in counts) / most), False
        for trial in few_rows(
            self.engine, batch, dataclasses.replace(config, num_microbatch=number), self._split_again
        ):
            is_cut = True
            yield trial
        if not is_cut:
            raise CannotJoinError("it is not clear how many rows a part of the batch has")

    def _split_again(self, few: FlatBatch, config: RoundPipeRunConfig) -> RoundPipeRunConfig:
        """Return settings for a few rows; replace a split function that was made for the whole batch."""
        if not getattr(config.split_input, "is_of_batch", False):
            return config
        kwargs: Kwargs = few.kwargs.tree
        pictures = split_pictures(getattr(self.made.model, "config", None), kwargs)
        return dataclasses.replace(config, split_input=split_lists(self.made.model, few.args.tree, kwargs, pictures))

    def some_states(self, trial: RowTrial, config: RoundPipeRunConfig) -> tuple[list[CutState], CutState]:
        """Return the states after the layers: one per part of a trial, and one for more rows than the last part."""
        with self._trial_engine() as engine:
            # devices have memory for the rows of a microbatch, so no more rows run at once
            shown = [trial.whole] if trial.parts[0].rows == trial.parts[-1].rows else []
            states = engine.try_layers([*trial.parts, *shown], config, range(len(engine.layers) - 1))
        return states[: len(trial.parts)], states[-1] if shown else states[0]

    def _trial_engine(self) -> contextlib.AbstractContextManager[Engine]:
        if self.shares_batches:
            return engine_on_host(self.made.model, self.made.pieces)
        return contextlib.nullcontext(self.engine)


def call_of(microbatch: FlatMicrobatch) -> tuple[tuple[Any, ...], Kwargs]:
    """Return the arguments of a microbatch as ``(args, kwargs)``."""
    args, kwargs = pytree.tree_unflatten(microbatch.inputs, microbatch.spec)
    return args, kwargs


def _leaves(output: Any) -> Sequence[object]:
    """Return the outputs of a piece that are compared, without losses, which have a separate check."""
    found = state_leaves(output) if isinstance(output, CutState) else pytree.tree_leaves(output)
    return [one for one in found if not isinstance(one, torch.Tensor) or one.dim() > 0]
