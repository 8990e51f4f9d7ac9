"""Decide how each kind of call is computed: its loss, and pieces that mix rows. It is shown again at calls 2, 4, 8."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs

from ..batch.flat import FlatBatch, FlatMicrobatch
from ..engine.config import RoundPipeRunConfig
from ..engine.driver import Engine
from ..engine.loss_check import loss_code
from ..engine.repeats import Repeats
from ..engine.rows import CannotTryError, RowTrial, few_rows, first_that_mixes
from ..errors import DeviceMemoryError, RoundPipeError, SplitError
from .batches import split_pictures
from .cutting.capture import asked_for
from .cutting.check import checking, engine_on_host
from .cutting.cut import Cut
from .cutting.cut_plan import CutState, drops_layers
from .cutting.joined_state import CannotJoinError, RowAxes, join_states, state_leaves
from .cutting.pieces import LayerCall
from .errors import BatchStructureError
from .loss.call_options import CallOptions, split_options
from .loss_proof import LossOfModel, LossProof, SomeRows, Tail
from .row_lists import split_lists

# Rows that a proof runs: the fewest of which two parts have different numbers.
_ROWS = 3


class LossWays:
    """The ways in which losses of one model are computed, and which pieces mix rows, by kind of call.

    A kind is what may decide which code of the model runs: the arguments that are given, their types, and the mode.
    """

    # shares_batches: whether other processes run parts of the same batches. They may have fewer rows than a proof
    # needs, so it runs on the host of each one, and no process waits for another.

    def __init__(self, made: Cut, engine: Engine, *, shares_batches: bool) -> None:
        self._made, self._engine, self._shares_batches = made, engine, shares_batches
        self.proofs: dict[Hashable, LossProof] = {}
        self.shown: list[str] = []  # lines for the report of the cut
        self.repeats = Repeats()
        self._axes: dict[Hashable, RowAxes] = {}
        self._mixing: dict[Hashable, int | None] = {}

    def find(
        self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig, function: LossOfModel | None = None
    ) -> LossProof:
        """Return how the loss of a call is computed; a proof runs at calls 1, 2, 4, 8, ... of its kind."""
        # function: function of the model's loss, whose weights were found before. Default: the loss is the model's.
        kind, code = self.kind_of(args, kwargs), None
        if function is not None:
            kind, code = (kind, loss_code(function.function)), function.function
        is_due = self.repeats.is_due(kind, code)
        known = self.proofs.get(kind)
        # a batch that shows less takes nothing back: what was not a weighted sum once is never one
        if known is not None and (not is_due or known.way in ("joined", "whole")):
            return known
        batch = FlatBatch.of(args, kwargs, None if function is None else function.label)
        if len(self._engine.split(batch, config)) == 1:
            return LossProof("items")  # nothing to weigh
        self._engine.steps.wait_written()  # a step would change weights between two evaluations
        try:
            with _with_all_layers(self._made):
                proof = self._prove(kind, batch, config, function)
        except CannotJoinError as error:
            proof = LossProof("whole", str(error))
        except (torch.OutOfMemoryError, DeviceMemoryError, BatchStructureError):
            raise
        except (RoundPipeError, RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
            # a model may refuse a few rows of a batch; what concerns the whole batch is raised by the call itself
            proof = LossProof("whole", f"it does not run on {_ROWS} of the rows: {error}")
        before = None if known is None else known.way
        if proof.variants or proof.way != "joined":
            self.proofs[kind] = proof
        has_loss = proof.variants or proof.way not in ("items", "joined")
        if function is None and before != proof.way and has_loss:
            mode = "training" if self._made.model.training else "evaluation"
            given = ", ".join(name for name, value in split_options(kwargs)[0].items() if value is not None)
            self.shown.append(f"{mode} with {given}: {proof}")
        return proof

    def first_that_mixes(
        self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig, number: int
    ) -> int | None:
        """Return the first piece whose outputs for some rows of a call depend on others; ``None`` without one."""
        kind = self.kind_of(args, kwargs), number
        if self.repeats.is_due(kind) or kind not in self._mixing:
            batch = FlatBatch.of(args, kwargs, None)
            if number == 0 or len(self._engine.split(batch, config)) == 1:
                return None
            self._engine.steps.wait_written()  # a step would change weights between two evaluations
            with self._trial_engine() as engine:
                asks = asked_for(self._made.model, kwargs) != "none"  # of hooks of transformers
                trials = self.some_rows(batch, config)
                try:
                    self._mixing[kind] = first_that_mixes(engine, trials, config, number, _leaves, with_hooks=asks)
                except (CannotJoinError, CannotTryError):  # it is not clear what the rows are, or the call fails itself
                    self._mixing[kind] = None
        return self._mixing[kind]

    def title(self, piece: int) -> str:
        """Return a description of a piece, for warnings."""
        found = self._made.pieces[piece]
        if isinstance(found, LayerCall):
            return f"{found.program.calls[found.place].layer} ({type(found.layer).__name__})"
        inner = type(self._made.model).__name__
        return inner if self._made.report.is_whole else f"the code of {inner} around its layers"

    def join(
        self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig
    ) -> Callable[[list[CutState]], CutState] | None:
        """Return the function that joins the layers' outputs for the microbatches of a call."""
        # returns: the function, which raises `CannotJoinError`; `None` where nothing can be joined
        if self._made.report.is_whole:
            return None
        kind = self.kind_of(args, kwargs)
        if kind not in self._axes:
            try:
                trial = next(self.some_rows(FlatBatch.of(args, kwargs, None), config))
                states, shown = self._some_states(trial, config)
                self._axes[kind] = RowAxes.of(shown, states[-1])
            except CannotJoinError:
                return None
        return functools.partial(join_states, axes=self._axes[kind], args=args, kwargs=kwargs)

    def kind_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """Return the facts of a call that may decide which code of the model runs."""
        given, options = split_options(kwargs)
        asked = options is not None and (options.loss_only, options.smoothed_loss is not None)
        named = frozenset((name, _kind(value)) for name, value in given.items() if value is not None)
        return named, tuple(map(_kind, args)), self._made.model.training, asked

    def _prove(
        self, kind: Hashable, batch: FlatBatch, config: RoundPipeRunConfig, function: LossOfModel | None
    ) -> LossProof:
        proof = LossProof("joined", "no labels count in this batch, or it is not finite")
        error: CannotJoinError | None = None
        for trial in itertools.chain(self.some_rows(batch, config), self._repeated_rows(batch, config)):
            try:
                proof = self._prove_with(kind, trial, batch.kwargs.tree, config, function)
            except CannotJoinError as found:  # of these rows: a mask may be there for some only
                error = found
                continue
            if proof.variants or proof.way != "joined":
                return proof  # else no labels count in these rows: others may have some
            error = None
        if error is not None:
            raise error
        return proof

    def _repeated_rows(self, batch: FlatBatch, config: RoundPipeRunConfig) -> Iterator[RowTrial]:
        """Yield the first rows once more, one of them in both parts: what layers get for it is there in both."""
        in_two = dataclasses.replace(config, num_microbatch=2)
        for trial in itertools.islice(self.some_rows(batch, config), 1):
            for one, other in itertools.permutations(range(trial.count), 2):
                whole = dataclasses.replace(trial.in_order([one, other, one]), rows=3)
                few = FlatBatch.of(*_call_of(whole), None)
                found = self._engine.split(few, self._split_again(few, in_two))
                if [part.rows for part in found] == [2, 1]:
                    yield RowTrial(whole, found)

    def _prove_with(
        self,
        kind: Hashable,
        trial: RowTrial,
        of_batch: Kwargs,
        config: RoundPipeRunConfig,
        function: LossOfModel | None,
    ) -> LossProof:
        others, given = split_options(of_batch)
        made, rows = self._made, [*map(_rows_of, (trial.whole, *trial.parts))]
        tail = Tail(made.model, made.pieces[-1], given or CallOptions(), others, function)
        nbytes = 0
        if not made.report.is_whole:
            states, shown = self._some_states(trial, config)
            rows[1:] = [dataclasses.replace(part, state=state) for part, state in zip(rows[1:], states, strict=True)]
        if function is None and (found := tail.without_proof(rows[1])) is not None:
            return found
        if not made.report.is_whole:
            axes = self._axes[kind] = RowAxes.of(shown, states[-1])
            rows[0] = dataclasses.replace(rows[0], state=join_states(states, axes, *_call_of(trial.whole)))
            nbytes = sum(value.nbytes for state in states for value in state.values.values())
        proof = tail.prove(rows, self.proofs.get(kind))
        return dataclasses.replace(proof, row_nbytes=nbytes // max(rows[0].count, 1))

    def few_rows(self, batch: FlatBatch, config: RoundPipeRunConfig) -> Iterator[RowTrial]:
        """Yield a few rows of a batch at a time, with their labels; none where they cannot be cut."""
        with contextlib.suppress(CannotJoinError, SplitError):
            yield from self.some_rows(batch, config)

    def some_rows(self, batch: FlatBatch, config: RoundPipeRunConfig) -> Iterator[RowTrial]:
        """Yield a few rows of a batch at a time; one time at least."""
        counts = [one.rows for one in self._engine.split(batch, config)]
        if None in counts:
            raise CannotJoinError("it is not clear how many rows a microbatch has")
        number, is_cut = math.ceil(sum(count or 0 for count in counts) / _ROWS), False
        for trial in few_rows(
            self._engine, batch, dataclasses.replace(config, num_microbatch=number), self._split_again
        ):
            is_cut = True
            yield trial
        if not is_cut:
            raise CannotJoinError("it is not clear how many rows a part of the batch has")

    def _split_again(self, few: FlatBatch, config: RoundPipeRunConfig) -> RoundPipeRunConfig:
        """The settings for a few rows: a split function that was made for the batch is made for them."""
        if not getattr(config.split_input, "is_of_batch", False):
            return config
        kwargs: Kwargs = few.kwargs.tree
        pictures = split_pictures(getattr(self._made.model, "config", None), kwargs)
        return dataclasses.replace(config, split_input=split_lists(self._made.model, few.args.tree, kwargs, pictures))

    def _some_states(self, trial: RowTrial, config: RoundPipeRunConfig) -> tuple[list[CutState], CutState]:
        """Outputs of the layers for parts of some rows, and for more rows than the last part has."""
        with self._trial_engine() as engine:
            # devices have room for a microbatch, so no more rows run at once than it takes
            shown = [trial.whole] if trial.parts[0].rows == trial.parts[-1].rows else []
            states = engine.outputs_before_last([*trial.parts, *shown], config)
        return states[: len(trial.parts)], states[-1] if shown else states[0]

    def _trial_engine(self) -> contextlib.AbstractContextManager[Engine]:
        if self._shares_batches:
            return engine_on_host(self._made.model, self._made.pieces)
        return contextlib.nullcontext(self._engine)


def _call_of(microbatch: FlatMicrobatch) -> tuple[tuple[Any, ...], Kwargs]:
    args, kwargs = pytree.tree_unflatten(microbatch.inputs, microbatch.spec)
    return args, kwargs


def _rows_of(microbatch: FlatMicrobatch) -> SomeRows:
    args, kwargs = _call_of(microbatch)
    label = pytree.tree_unflatten(microbatch.labels, microbatch.label_spec)
    return SomeRows(args, split_options(kwargs)[0], microbatch.rows or 0, label)


def _kind(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    if isinstance(value, bool | str):
        return type(value), value
    return type(value).__qualname__


def _leaves(output: Any) -> Sequence[object]:
    """The outputs of a piece that are compared. Losses are left out: they have their own proof."""
    found = state_leaves(output) if isinstance(output, CutState) else pytree.tree_leaves(output)
    return [one for one in found if not isinstance(one, torch.Tensor) or one.dim() > 0]


def _depends_on_parts(model: nn.Module) -> bool:
    """Whether a model computes different values for parts of a batch by design: it drops layers, or has batch norms."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    normalizes = any(isinstance(module, kinds) for module in model.modules())
    return model.training and (normalizes or drops_layers(model))


@contextlib.contextmanager
def _with_all_layers(made: Cut) -> Iterator[None]:
    """Evaluate a model of which parts of a batch would be computed otherwise in training."""
    if not _depends_on_parts(made.model):
        yield
        return
    with checking(made.model):
        made.sync()
        yield
    made.sync()
