"""Check on a few rows whether rows influence each other in a module, and how microbatch losses must be weighted.

At calls 1, 2, 4, ... with similar arguments, the code after the last layer runs on a few rows, and on two subsets of
these rows. If the losses of the subsets cannot be weighted to give the loss of all rows, the batch gets a single loss.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call

from yobx_flatten.core.compare import compare
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ..batch.entries import FlatBatch, FlatMicrobatch
from ..batch.joining import join
from ..batch.loss import read_loss
from ..batch.loss_proof import LossProof, NoDropout, NotProvenError, Part, Role, Way, in_32_bits
from ..engine.code_state import Repeats
from ..engine.config import RoundPipeRunConfig
from ..engine.digests import children
from ..engine.driver import Engine
from ..engine.loss_check import ONE_MICROBATCH, LossChecks, Sample, calls_apart, kind_of_value, loss_code
from ..engine.rows import CannotTryError, GradientTrial, RowTrial, compare_gradients, few_rows, first_that_mixes
from ..errors import BatchStructureError, ConfigError, DeviceMemoryError, RoundPipeError, SplitError
from .batches import split_lists, split_pictures
from .cutting.check import checking, engine_on_host
from .cutting.cut import Cut
from .cutting.cut_plan import CannotJoinError, CutState, RowAxes, drops_layers, join_states
from .cutting.pieces import LayerCall
from .cutting.stub import Key
from .loss.call_options import CALL_OPTIONS, CallOptions, gives_share, split_options
from .loss.own_loss import counting, has_auxiliary_loss, label_names, loss_of, with_loss_weight, without_auxiliary_loss

_ROWS = 3  # the fewest rows that split into two parts of different sizes


class PieceRows:
    """Runs a few rows of a batch through the model, to find modules in which rows influence each other."""

    def __init__(self, made: Cut, engine: Engine, *, shares_batches: bool) -> None:
        self.made, self.engine, self.shares_batches = made, engine, shares_batches
        self._repeats = Repeats()
        self.axes: dict[Hashable, RowAxes] = {}
        self._mixing: dict[Hashable, GradientTrial] = {}
        self._compared: collections.Counter[Hashable] = collections.Counter()

    def mixing(self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig, number: int) -> GradientTrial:
        """Check whether rows of a batch influence each other in one of the first ``number`` modules."""
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
                if (found := first_that_mixes(engine, trials, config, number, tried, _compared)) is not None:
                    self._mixing[kind] = GradientTrial(found)
                elif self._compared[kind] % 2:  # calls 1, 4, 16, ...
                    # `compare_gradients` gives the largest number of rows
                    rows, few = [one.rows for one in parts], partial(self.some_rows, batch, config)
                    self._mixing[kind] = compare_gradients(engine, tried, rows, few, config, number, _compared)
        return self._mixing[kind]

    def title(self, piece: int) -> str:
        found = self.made.pieces[piece]
        if isinstance(found, LayerCall):
            return f"{found.program.calls[found.place].layer} ({type(found.layer).__name__})"
        inner = type(self.made.model).__name__
        return inner if self.made.report.is_whole else f"the code of {inner} around its layers"

    def join(
        self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig
    ) -> Callable[[list[CutState]], CutState] | None:
        # returns: the function, which may raise `CannotJoinError`; `None` if joining is impossible
        if self.made.report.is_whole:
            return None
        kind = self.kind_of(args, kwargs)
        if kind not in self.axes:
            try:
                trial = next(self.some_rows(FlatBatch.of(args, kwargs, None), config))
                states, shown = self.some_states(trial, config)
                self.axes[kind] = RowAxes.of(shown, states[-1])
            except CannotJoinError:
                return None
        return partial(join_states, axes=self.axes[kind], args=args, kwargs=kwargs)

    def kind_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """Return the properties of a model's arguments that may decide which code of the model runs."""
        given, options = split_options(kwargs)
        asked = options is not None and (options.loss_only, options.smoothed_loss is not None)
        named = frozenset((name, kind_of_value(value)) for name, value in given.items() if value is not None)
        return named, tuple(map(kind_of_value, args)), self.made.model.training, asked

    def repeated_rows(self, batch: FlatBatch, config: RoundPipeRunConfig) -> Iterator[RowTrial]:
        """Yield sets of three rows (A, B, A), each split into (A, B) and (A); A and B are rows of the batch."""
        in_two = dataclasses.replace(config, num_microbatch=2)
        trial = next(self.some_rows(batch, config))
        for one, other in itertools.permutations(range(trial.count), 2):
            whole = dataclasses.replace(trial.in_order([one, other, one]), rows=3)
            few = FlatBatch.of(*call_of(whole), None)
            found = self.engine.split(few, self._split_again(few, in_two))
            if [part.rows for part in found] == [2, 1]:
                yield RowTrial(whole, found)

    def three_at_least(self, batch: FlatBatch, config: RoundPipeRunConfig) -> tuple[FlatBatch, RoundPipeRunConfig]:
        """Return a batch that can be split, with its configuration: a single row is repeated three times."""
        if [one.rows for one in self.engine.split(batch, config)] != [1]:
            return batch, config
        kwargs, options = split_options(batch.kwargs.tree)
        held = batch.args.tree, kwargs, batch.label.tree
        # copies, because `join` does not concatenate a tensor with itself
        rows = [pytree.tree_map_only(torch.Tensor, torch.clone, held) for _ in range(3)]
        args, kwargs, label = join(rows, [1, 1, 1], rows=[1, 1, 1])
        few = FlatBatch.of(args, kwargs if options is None else {**kwargs, CALL_OPTIONS: options}, label)
        return few, self._split_again(few, config)

    def few_rows(self, batch: FlatBatch, config: RoundPipeRunConfig) -> Iterator[RowTrial]:
        """Yield sets of a few rows of the batch and their labels; yield nothing if the batch cannot be split."""
        with contextlib.suppress(CannotJoinError, SplitError):
            yield from self.some_rows(batch, config)

    def some_rows(self, batch: FlatBatch, config: RoundPipeRunConfig, most: int = _ROWS) -> Iterator[RowTrial]:
        """Yield sets of a few rows of the batch; raise `CannotJoinError` if the batch cannot be split into rows."""
        if None in (counts := [one.rows for one in self.engine.split(batch, config)]):
            raise CannotJoinError("it is not clear how many rows a microbatch has")
        in_few = dataclasses.replace(config, num_microbatch=math.ceil(sum(count or 0 for count in counts) / most))
        is_cut = False
        for trial in few_rows(self.engine, batch, in_few, self._split_again):
            is_cut = True
            yield trial
        if not is_cut:
            raise CannotJoinError("the batch has no subset of rows that can be split into two parts")

    def _split_again(self, few: FlatBatch, config: RoundPipeRunConfig) -> RoundPipeRunConfig:
        if not getattr(config.split_input, "is_of_batch", False):
            return config
        kwargs: Kwargs = few.kwargs.tree
        pictures = split_pictures(getattr(self.made.model, "config", None), kwargs)
        return dataclasses.replace(config, split_input=split_lists(self.made.model, few.args.tree, kwargs, pictures))

    def some_states(self, trial: RowTrial, config: RoundPipeRunConfig) -> tuple[list[CutState], CutState]:
        """Return the layer outputs for each part of a set of rows, and for more rows than the last part has."""
        # axes that are longer in the larger set are row axes
        with self._trial_engine() as engine:
            # devices have memory for the rows of a microbatch, so no more rows run at once
            shown = [trial.whole] if trial.parts[0].rows == trial.parts[-1].rows else []
            states = engine.try_layers([*trial.parts, *shown], config, range(len(engine.layers) - 1))
        return states[: len(trial.parts)], states[-1] if shown else states[0]

    def _trial_engine(self) -> contextlib.AbstractContextManager[Engine]:
        # other processes run parts of the same batches. A process may have fewer rows than a trial needs, so each trial
        # runs on the host, without waiting for other processes.
        if self.shares_batches:
            return engine_on_host(self.made.model, self.made.pieces)
        return contextlib.nullcontext(self.engine)


def call_of(microbatch: FlatMicrobatch) -> tuple[tuple[Any, ...], Kwargs]:
    args, kwargs = pytree.tree_unflatten(microbatch.inputs, microbatch.spec)
    return args, kwargs


def _compared(output: Any) -> PyTree:
    """Return the outputs of a module that must not depend on other rows: all outputs except losses."""
    output = (output.values, output.boxes) if isinstance(output, CutState) else output
    if isinstance(output, torch.Tensor):
        return output if output.dim() > 0 else None
    held = children(output)[1]
    return output if any(one is output for one in held) else [*map(_compared, held)]


# Labels that losses ignore: torch's default; and a position after the end of any text, for question answering.
_IGNORED = (-100, 10**6)
_ALL: Sequence[Way] = ("items", "rows", "sum")
# Errors of a model that rejects a few rows of a batch; errors about the whole batch are raised by the call itself.
_REFUSED = (RoundPipeError, RuntimeError, ValueError, IndexError, TypeError, KeyError)


@dataclasses.dataclass(frozen=True)
class SomeRows:
    """Inputs of the last module of the pipeline for some rows of a batch: arguments of the model and layer outputs."""

    args: tuple[object, ...]  # positional arguments of the model
    kwargs: Kwargs  # keyword arguments of the model, without the options of the call
    count: int  # number of rows
    label: Any = None  # labels of the caller's loss function
    state: CutState | None = None  # outputs of the layers; `None` for a model in one piece


@dataclasses.dataclass(frozen=True)
class LossOfModel:
    """The caller's ``loss_fn`` and ``label``. The model also computes a loss, but the loss of ``loss_fn`` is used."""

    function: Callable[[Any, Any], Any]
    label: Any


class LossWays:
    """Finds how microbatch losses are combined to the loss of the batch, and stores results for similar calls."""

    def __init__(self, rows: PieceRows) -> None:
        self._rows, self._made, self._engine = rows, rows.made, rows.engine
        self._engine.loss_checks = LossChecks()  # results from before a change of the model are discarded
        self.shown: list[str] = []  # lines for the report of the split

    def find(
        self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig, function: LossOfModel | None = None
    ) -> LossProof:
        """Return how the loss of a batch is computed from the losses of its microbatches."""
        # function: function of the model's loss, whose weights are already known. Default: the model's own loss.
        kind, code, label = self._rows.kind_of(args, kwargs), None, None
        if function is not None:
            kind, code, label = (kind, loss_code(function.function)), function.function, function.label
        before = self._engine.loss_checks.proofs.get(kind)

        def show(known: LossProof | None) -> LossProof:
            batch, settings = FlatBatch.of(args, kwargs, label), config
            rows = [one.rows for one in self._engine.split(batch, config)]
            if len(rows) == 1:
                if not self._rows.shares_batches or rows == [0]:  # other processes have all rows of this batch
                    return ONE_MICROBATCH
                batch, settings = self._rows.three_at_least(batch, config)
            self._engine.steps.wait_written()  # a step would change weights between two evaluations
            found: LossProof | None = None
            trials = itertools.chain(self._rows.some_rows(batch, settings), self._rows.repeated_rows(batch, settings))
            try:
                with _with_all_layers(self._made):
                    for trial in trials:
                        try:
                            found = self._proof(kind, trial, batch.kwargs.tree, settings, function, known)
                        except CannotJoinError as error:  # other rows may be joined, as a mask may exist for some only
                            found = LossProof("whole", str(error))
                            continue
                        if found.compared or found.way != "joined":
                            break  # otherwise no labels count in these rows, and other rows are tried
            except (torch.OutOfMemoryError, DeviceMemoryError, BatchStructureError, ConfigError):
                raise
            except CannotJoinError as error:
                return LossProof("whole", str(error))
            except _REFUSED as error:
                return LossProof("whole", f"the model does not run on a few of the rows: {error}")
            return found or LossProof("joined", "the batch has no labels that count, or its loss is not finite")

        proof = self._engine.loss_checks.find(kind, code, show)
        has_loss = proof.compared or proof.way not in ("items", "joined")
        if function is None and has_loss and (before is None or before.way != proof.way):
            mode = "training" if self._made.model.training else "evaluation"
            given = ", ".join(name for name, value in split_options(kwargs)[0].items() if value is not None)
            self.shown.append(f"{mode} with {given}: {proof}")
        return proof

    def _proof(
        self,
        kind: Hashable,
        trial: RowTrial,
        of_batch: Kwargs,
        config: RoundPipeRunConfig,
        function: LossOfModel | None,
        known: LossProof | None,
    ) -> LossProof:
        others, given = split_options(of_batch)
        made, rows, nbytes = self._made, list[SomeRows](), 0
        for microbatch in (trial.whole, *trial.parts):
            args, kwargs = call_of(microbatch)
            label = pytree.tree_unflatten(microbatch.labels, microbatch.label_spec)
            rows.append(SomeRows(args, split_options(kwargs)[0], microbatch.rows or 0, label))
        tail = Tail(made, given or CallOptions(), others, function)
        if not made.report.is_whole:
            states, shown = self._rows.some_states(trial, config)
            rows[1:] = [dataclasses.replace(part, state=state) for part, state in zip(rows[1:], states, strict=True)]
            nbytes = sum(value.nbytes for state in states for value in state.values.values())
        is_new = function is None and (known is None or not known.compared)
        if is_new and (found := tail.without_proof(rows[1])) is not None:
            return found
        if not made.report.is_whole:
            axes = self._rows.axes[kind] = RowAxes.of(shown, states[-1])
            rows[0] = dataclasses.replace(rows[0], state=join_states([*states], axes, *call_of(trial.whole)))
        return dataclasses.replace(tail.prove(rows, known), row_nbytes=nbytes // max(rows[0].count, 1))


class Tail:
    """Computes the loss of some rows of a batch by the part of the model after its last layer, in at least float32."""

    # kwargs: keyword arguments of the model in the checked call

    def __init__(self, made: Cut, options: CallOptions, kwargs: Kwargs, function: LossOfModel | None) -> None:
        self._model, self._piece, self._kwargs, self._function = made.model, made.pieces[-1], kwargs, function
        self._own_way = options.weight_by
        self._options = dataclasses.replace(options, weight_by="rows")  # a loss over no items stays unchanged
        self._has_auxiliary = has_auxiliary_loss(made.model, kwargs)
        # detached, because an old graph may belong to a parameter from before a resize
        apart = {
            parameter: in_32_bits(parameter.detach()).requires_grad_(parameter.requires_grad)
            for parameter in self._piece.parameters()
        }
        # one name for each module: torch's functional_call fails to restore a module with two names
        self._parameters = {
            f"{path}.{name}".lstrip("."): apart[parameter]
            for path, module in self._piece.named_modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        }

    def without_proof(self, rows: SomeRows) -> LossProof | None:
        """Return a `LossProof` if the model has no loss with a gradient, or if the loss is random; else ``None``."""
        values = {} if rows.state is None else rows.state.values
        held = {key: value.detach().requires_grad_(value.is_floating_point()) for key, value in values.items()}
        with calls_apart(self._piece):
            first, has_drawn = self._loss(rows, held, seed=1)
            if first is None or not first.losses[0].requires_grad:
                return LossProof("items")
            again = self._loss(rows, held, seed=2)[0] if has_drawn else first
            if again is None or not compare(first.losses[0], again.losses[0], "sums"):
                return LossProof("whole", "the model draws random numbers after its layers")
        return None

    def prove(self, rows: Sequence[SomeRows], known: LossProof | None) -> LossProof:
        """Find factors by which the losses of subsets of rows must be multiplied to add up to the loss of all rows."""
        # rows: all rows at once, then the same rows in consecutive parts
        # known: an earlier proof of this kind of call, whose weights must match again
        otherwise: Literal["whole", "joined"] = "whole" if rows[0].state is None else "joined"
        roles: dict[str, Role] = {}
        labels = label_names(self._model)
        for name, value in sorted(rows[0].kwargs.items()):
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows[0].count:
                if name in labels and value.dtype != torch.bool:
                    roles[name] = "label"
                elif value.dim() > 1 and bool(((value == 0) | (value == 1)).all()):
                    roles[name] = "mask"
        keys = [] if rows[0].state is None else list(rows[0].state.values)
        leaves = [
            [*(one.kwargs[name] for name in roles), *(one.state.values[key] for key in keys if one.state is not None)]
            for one in rows
        ]
        others = {place: self._kwargs[name] for place, name in enumerate(roles) if roles[name] == "label"}
        outputs: list[Role] = ["output"] * len(keys)
        spec = pytree.tree_structure([*roles, *keys])
        sample = Sample(leaves, [one.count for one in rows], [*roles.values(), *outputs], others, spec).widened()
        is_share = gives_share(self._kwargs)
        # several weights match rows with equally many labels, so the weights of an earlier proof must match again
        way = known.way if known is not None and known.compared else None
        fixed = [one for one in _ALL if one == (way if self._function is None else self._own_way)]
        ways: Sequence[Way] = ("items", "sum") if fixed == ["items"] and is_share else fixed or _ALL
        own = getattr(getattr(self._model, "config", None), "semantic_loss_ignore_index", None)
        ignored = (*_IGNORED, *([own] if isinstance(own, int) else []))

        def loss(number: int, leaves: Sequence[Any]) -> Part:
            some, named = rows[number], dict(zip(roles, leaves, strict=False))
            values = dict(zip(keys, leaves[len(roles) :], strict=True))
            found, _ = self._loss(dataclasses.replace(some, kwargs=some.kwargs | named), values, seed=1)
            if found is None:
                raise ValueError("no loss")
            return found

        called = self._piece, None if self._function is None else self._function.function
        try:
            found = sample.prove(loss, called, ways, ignored, again=way is not None)
        except NotProvenError as error:
            return LossProof(otherwise, str(error), 1)
        if not found.compared:
            return LossProof(otherwise, "the first rows have no labels that count, or their loss is not finite")
        if found.way is None:
            reason = "the loss is not a mean or sum over rows, nor over labels that torch's loss functions count"
            if self._function is not None:
                reason = "it is not a multiple of the model's loss, with or without a constant term"
            return LossProof(otherwise, reason, found.compared)
        # if the loss is a share, the items are those of the batch
        return LossProof("items" if found.way == "sum" and is_share else found.way, compared=found.compared)

    def _loss(self, rows: SomeRows, values: dict[Key, torch.Tensor], *, seed: int) -> tuple[Part | None, bool]:
        """Return the loss of some rows of a batch, and whether the model drew random numbers."""
        # values: outputs of the layers
        torch.default_generator.manual_seed(seed)
        before = torch.default_generator.get_state()
        args, kwargs, values = pytree.tree_map(in_32_bits, (rows.args, rows.kwargs, values))
        if rows.state is None:
            kwargs = {**kwargs, CALL_OPTIONS: self._options}
        else:
            call, own = (args, kwargs), self._options
            args, kwargs = (dataclasses.replace(rows.state, call=call, values=values, options=own, seed=seed),), {}
        with counting() as items, NoDropout():
            output, _, _ = functional_call(self._piece, self._parameters, args, kwargs, tie_weights=False)
            loss = loss_of(output)
            if loss is not None and self._has_auxiliary:
                loss = without_auxiliary_loss(self._model, output)
        has_drawn = not torch.equal(before, torch.default_generator.get_state())
        if loss is None:
            return None, has_drawn
        _, count, _ = with_loss_weight({}, items, rows.count)
        found = read_loss(loss if self._function is None else self._function.function(output, rows.label))
        if found.kind == "sequence":
            raise ValueError("it returns several losses")
        return Part(found.tensors, rows.count, count if 0 <= count < float("inf") else None, found.weight), has_drawn


@contextlib.contextmanager
def _with_all_layers(made: Cut) -> Iterator[None]:
    """Context manager in which a model that has LayerDrop or batch norms is in evaluation mode."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    normalizes = any(isinstance(module, kinds) for module in made.model.modules())
    if not made.model.training or not (normalizes or drops_layers(made.model)):
        yield
        return
    with checking(made.model):
        made.sync()
        yield
    made.sync()
