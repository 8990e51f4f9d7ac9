"""Run forward and backward for one rank's rows of a batch; write gradients when all ranks have succeeded."""

# opening     ranks exchange the row counts of their groups of rows and the random seed of rank 0, and check that their
#             calls agree
# runs        each rank runs its groups; gradients of a layer are summed over all ranks as soon as they are complete
# verdict     ranks exchange the losses and weights of their microbatches, or their errors
# commit      ranks compute the loss of the batch, and write scaled gradient sums and the first group's buffers

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from ... import errors
from ...batch.entries import FlatMicrobatch
from ...batch.loss import BackwardTerm, LossContract, LossValue
from ...batch.loss import Reduction as LossReduction
from ...device.protocol import NOW
from ...device.transfer import HostValue
from ...device.worker import Outcome, Uninterrupted, Worker, on_error
from ...engine.config import RoundPipeRunConfig
from ...engine.draws import move_generator, run_base
from ...engine.driver import Engine
from ...engine.one_group import Call, Cutting, OneGroup, feed_inputs
from ...engine.run import Run
from ...optim.layer_contents import LayerContents, scan
from ...optim.parameters import ParameterStore
from ...optim.readiness import ReadinessTable
from ...optim.step import StepRunner
from ..ranks.alarm import News
from ..ranks.ranks import Ranks
from ..weights import RankSteps, RankStore, ShardedStore
from .reduction import Reduction, ReductionPlan, groups_of


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    rows: list[list[int | None]]  # rows of each microbatch, for each group of the rank
    seed: int  # seed of random layers
    stated: Mapping[str, object]  # what all ranks must agree on
    failure: str | None = None  # error of this rank before the call
    reduction: LossReduction | None = None  # how losses add up; `None` if this rank has too few rows to find out


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The message of a rank to all ranks after its forward and backward: losses, or an error."""

    begun: int  # number of gradient exchanges that this rank has begun
    failure: str | None  # error of this rank
    losses: Sequence[tuple[int, LossValue]] = ()  # of its microbatches, on the host, by their indices in the batch
    had: frozenset[tuple[int, int]] = frozenset()  # parameters that got a gradient
    # buffers that its first group wrote, by layer and number
    buffers: Mapping[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    feeds: bool = False  # whether the inputs of the call require gradients
    total: Any = None  # loss of the batch, in a call in two passes
    has_drawn: bool = False  # whether a layer has drawn from torch's generators


def loss_is_trained() -> errors.DistributedError:
    return errors.DistributedError(
        "The loss function has trainable parameters that belong to no layer, so their gradients are not summed "
        "over the ranks. Move the parameters to a last layer that returns the inputs of the loss."
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class RankCall(Call):
    """The data of a forward and backward that several ranks run together."""

    plan: ReductionPlan
    first_rank: int  # rank with the first group that has rows
    # whether the backward of each microbatch follows its loss at once, so that the contract has all losses
    is_one_pass: bool = True
    total: Any = None  # loss of the batch, of a call in two passes
    # buffers written by the first group of this rank, if the model has them already
    written: Mapping[tuple[int, int], torch.Tensor] | None = None
    feeds: bool = True  # whether the call continues backward from the inputs; autograd does otherwise

    def losses(self, turn: int) -> LossContract:
        return GroupLosses(self.contract, self.firsts[turn], len(self.parts[turn]))

    def add(self, run: Run, inputs: list[HostValue]) -> None:
        if len(run.spec.contents) in run.collected.gradients:
            raise loss_is_trained()
        Call.add(self, run, inputs)  # a class with slots is created anew, so `super()` refers to another class


class GroupLosses(LossContract):
    """Collects the losses of one group of rows for the :class:`LossContract` of the whole batch."""

    # The initial gradient of a group's backward depends on the row counts of all groups. The gradients are scaled after
    # the sum over all groups, because the scale is known only when all ranks have computed their losses.

    def __init__(self, whole: LossContract, first: int, count: int) -> None:
        super().__init__(whole.reduction, whole.rows[first : first + count])
        self._whole, self._first = whole, first

    def add(self, index: int, value: Any, items: Sequence[float] = ()) -> list[BackwardTerm]:
        return self._whole.add(self._first + index, value, items)

    @property
    def kind(self) -> str | None:
        return self._whole.kind

    @property
    def weights(self) -> list[float]:
        return self._whole.weights[self._first : self._first + len(self.rows)]

    def gradient_scale(self) -> float:
        """Return 1, because the gradients are scaled after they are summed over all groups of rows."""
        return 1.0


class RankCalls(OneGroup):
    """Runs the groups of batch rows that belong to this rank, and writes gradients when all ranks have succeeded."""

    # replicas: number of groups of a batch. Default: number of ranks.
    # reduce_dtype: dtype in which gradients are sent. Default: the dtype of their sums.

    store: RankStore

    def __init__(self, ranks: Ranks, replicas: int | None = None, reduce_dtype: torch.dtype | None = None) -> None:
        self.ranks, self.reduce_dtype = ranks, reduce_dtype
        self.replicas = ranks.size if replicas is None else replicas
        if self.replicas < ranks.size:
            raise errors.ConfigError(
                f"replicas={self.replicas} makes {self.replicas} groups of rows, too few for {ranks.size} ranks: some "
                f"ranks would have no rows. Start fewer processes, or pass RoundPipe(..., replicas={ranks.size})."
            )
        self.is_first = ranks.rank == 0
        self._is_deferred = self._is_closed = False
        # gradients that calls in `no_sync()` have accumulated on this rank, by group of rows and layer
        self._kept: dict[tuple[int, int], dict[nn.Parameter, torch.Tensor]] = {}
        self._number = 0
        self._rows_of_batch: int | None = None
        self.news = News()  # of the current call

    @property
    def own(self) -> range:
        return groups_of(self.ranks.rank, self.ranks.size, self.replicas)

    def make_store(self, model: nn.Module, optim_dtype: torch.dtype | None) -> ParameterStore:
        kind = ShardedStore if self.ranks.num_shards > 1 else RankStore
        self.store = kind(model, optim_dtype, self.ranks)
        return self.store

    def make_steps(
        self, store: ParameterStore, table: ReadinessTable, scan: Callable[[], Sequence[LayerContents]]
    ) -> StepRunner:
        return RankSteps(self.store, table, scan)

    def begin(self, engine: Engine, model: nn.Module) -> None:
        options = {
            "replicas": self.replicas,
            "optim_dtype": self.store.optim_dtype,
            "reduce_dtype": self.reduce_dtype,
            "gradient_dtype": self.store.kept_dtype,
            "layers": len(engine.layers),
            "large_tables": engine.planner.rule,  # may depend on device memory
            "name": engine.tag,
        }
        stated: dict[str, object] = {name: f"{tuple(one.shape)} {one.dtype}" for name, one in _tensors(model)}
        stated |= {name: str(value) for name, value in options.items()}
        if error := errors.ranks_disagree(self.ranks.exchange(stated)):
            raise error
        share_weights(model, self.ranks)
        self._worker = Worker("reduction")

    def rows_of_batch(self, rows: int) -> int:
        return rows if self._rows_of_batch is None else self._rows_of_batch

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """If the with block raises an error, send it to the other ranks, which wait for this rank in :meth:`open`."""
        number = self._number

        def notify(error: BaseException) -> None:
            # If the number is higher, `open` has sent the error, and another exchange would belong to the next call.
            if self._number == number and not self._is_closed:
                self._number += 1
                self.ranks.exchange(Opening([], 0, {}, errors.format_failure(error)))

        with on_error(notify):
            yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_deferred = self._is_deferred, True
        try:
            yield
        finally:
            self._is_deferred = before

    def stopping(self, run: Run) -> contextlib.AbstractContextManager[None]:
        return self.news.stopping(run)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        # `open` increments the number only after it has cut the batch, which may take seconds. Errors of the previous
        # call that arrive meanwhile must be ignored.
        with News.listening(self.ranks.alarm, self._number + 1) as self.news:
            try:
                yield
            finally:
                self.news, self._rows_of_batch = News(), None

    def open(self, engine: Engine, name: str, cut: Callable[[], Cutting], config: RoundPipeRunConfig) -> RankCall:
        """Split this rank's rows into groups and microbatches, and check that all ranks make the same call."""
        # config: complete settings of the call; `num_microbatch` is the number per group
        parts: list[list[FlatMicrobatch]] = []
        reduction: LossReduction | None = None
        stated: dict[str, object] = {}
        contents = scan(engine.layers)
        # An error here is sent in the exchange below and raised afterwards, since the other ranks wait in the exchange.
        with Outcome() as outcome:
            parts, reduction = cut()
            parts = with_rows(parts)
            numbered = [(layer.index, number, p) for layer in contents for number, p in enumerate(layer.parameters())]
            trainable = [(index, number) for index, number, parameter in numbered if parameter.requires_grad]
            stated = {  # what must be equal on all ranks, by its name in an error message
                "the call": name,
                "the number of completed calls": engine.step,
                "num_microbatch": config.num_microbatch,
                "loss_reduction": config.loss_reduction,
                "no_sync": self._is_deferred,
                "the number of trainable parameters": len(trainable),
                "the digest of what is trainable": zlib.crc32(repr(trainable).encode()),
                "the training mode of the layers": all(layer.module.training for layer in contents),
            }
        failure = outcome.error
        rows = [[microbatch.rows for microbatch in part] for part in parts]
        self._number += 1
        text = None if failure is None else errors.format_failure(failure)
        said = self.ranks.exchange(Opening(rows, run_base(), stated, text, reduction))
        errors.raise_first(failure, [one.failure for one in said])
        if disagreement := errors.ranks_disagree([one.stated for one in said]):
            raise disagreement
        size, replicas = self.ranks.size, self.replicas
        groups = [said[group % size].rows[group // size] for group in range(replicas)]
        if not any(groups):
            raise errors.ConfigError("The batch has no rows on any rank. Pass at least one row.")
        # Microbatches are numbered across all groups, so that seeds do not depend on the number of processes.
        firsts = [sum(len(group) for group in groups[:number]) for number in range(replicas)]
        counts = [count for group in groups for count in group]
        self._rows_of_batch = None if None in counts else sum(count or 0 for count in counts)
        return RankCall(
            parts,
            [firsts[group] for group in self.own],
            LossContract(_agreed([one.reduction for one in said], len(counts)), counts),
            said[0].seed,
            plan=ReductionPlan(contents, self.store, replicas, self.reduce_dtype),
            first_rank=next(number for number, group in enumerate(groups) if group) % size,
        )

    def summed(self, engine: Engine, call: RankCall, work: Callable[[], None]) -> Any:
        """Run ``work`` (forward and backward), and write the gradients when all ranks have succeeded."""
        # Within `no_sync()` nothing is sent. The next call adds its gradients to the kept sums, and sends the sums
        # after the backward.
        is_late = self._is_deferred or bool(self._kept)
        reduction = Reduction(call.plan, self.ranks)
        call.land = None if is_late else reduction.land
        summed = None if is_late else self.news.watch(self._worker.submit(reduction.run))
        with Outcome() as outcome:
            work()
            engine.steps.wait_update()
            if summed is not None:
                self.news.wait(summed)
        # All ranks commit or none: if Ctrl-C stopped one rank after the verdict, its weights would differ.
        with Uninterrupted():
            verdicts = self._judge(call, reduction, summed, outcome.error)
            return self._commit(engine, call, reduction, verdicts, is_late=is_late)

    def _judge(
        self, call: RankCall, reduction: Reduction, summed: Future[None] | None, failure: BaseException | None
    ) -> list[Verdict]:
        """Exchange losses or errors with all ranks, and raise an error if any rank has failed."""
        is_own = failure is not None and not isinstance(failure, errors.StoppedByRankError)
        if is_own:
            # The other ranks exchange verdicts only after their work. The alarm stops the work.
            self.ranks.alarm.send({"call": self._number})
        begun = reduction.stop()
        with Outcome() as exchanged:
            if failure is None:
                losses = [
                    (index, dataclasses.replace(value, tensors=tuple(one.cpu() for one in value.tensors)))
                    for index, value in sorted(call.contract.values().items())
                ]
                written: Mapping[tuple[int, int], torch.Tensor] = {}
                if call.first_rank == self.ranks.rank and call.runs:
                    written = call.runs[0][0].collected.buffers.final() if call.written is None else call.written
                feeds = any(flag for run, values in call.runs for value in values for flag in value.needs_grad)
                has_drawn = any(run.draws.has_drawn for run, _ in call.runs)
                had = frozenset(reduction.had)
                verdict = Verdict(begun, None, losses, had, written, feeds, call.total, has_drawn)
            else:
                verdict = Verdict(begun, errors.format_failure(failure) if is_own else None)
            verdicts = self.ranks.exchange(verdict)
        if exchanged.error is not None:
            self._drop(call, reduction, summed, 0)
            raise failure if failure is not None and is_own else exchanged.error
        stated = [one.failure for one in verdicts]
        if failure is None and not any(stated):
            return verdicts
        # A begun exchange waits for all ranks, so each rank sends zeros up to the last exchange begun by any rank.
        self._drop(call, reduction, summed, max(one.begun for one in verdicts))
        errors.raise_first(failure if is_own else None, stated)
        assert failure is not None
        raise failure

    def _drop(self, call: RankCall, reduction: Reduction, summed: Future[None] | None, begun: int) -> None:
        reduction.finish(begun)
        if summed is not None:
            with contextlib.suppress(Exception):  # the error is already known: a rank is gone
                summed.result()
        for run, _ in call.runs:
            run.discard()

    def _commit(
        self, engine: Engine, call: RankCall, reduction: Reduction, verdicts: Sequence[Verdict], *, is_late: bool
    ) -> Any:
        total: Any
        if call.is_one_pass:
            # the losses of all ranks in one order, so that results are bitwise identical on every rank
            contract = LossContract(call.contract.reduction, call.contract.rows)
            losses = [loss for one in verdicts for loss in one.losses]
            for index, loss in sorted(losses, key=lambda pair: pair[0]):
                contract.add_value(index, loss)
            total, scale = contract.total(), contract.gradient_scale()
        else:
            total, scale = next((one.total for one in verdicts if one.total is not None), None), 1.0
        if call.feeds and any(one.feeds for one in verdicts):
            # continue the backward through the graph of the inputs; if one rank fails, all ranks raise an error
            with Outcome() as outcome:
                for run, host_values in call.runs:
                    feed_inputs(run, host_values, scale)
            failure = outcome.error
            said = self.ranks.exchange(None if failure is None else errors.format_failure(failure))
            errors.raise_first(failure, said)
        engine.steps.run_ended()
        if is_late:
            self._keep(call, scale)
            if not self._is_deferred:
                self.store.add_gradients(self._send_kept(call.plan))
        else:
            # A parameter without a gradient on this rank may have a gradient on another rank, and a sum on this rank.
            had = set().union(*(one.had for one in verdicts))
            self.store.add_gradients(reduction.results(scale, had))
        # Running statistics differ between groups. Every rank uses those of the first group with rows, so that they do
        # not depend on the number of ranks.
        contents = call.runs[0][0].spec.contents if call.runs else scan(engine.layers)
        for (layer, number), value in verdicts[call.first_rank].buffers.items():
            contents[layer].buffers[number].store(value)
        if self.replicas == 1:
            for run, _ in call.runs:
                run.draws.commit()
        elif any(one.has_drawn for one in verdicts):
            move_generator()
        engine.step += 1
        return total

    def _keep(self, call: Call, scale: float) -> None:
        turns = [turn for turn, part in enumerate(call.parts) if part]
        for turn, (run, _) in zip(turns, call.runs, strict=True):
            for layer, gradients in run.collected.gradients.items():
                kept = self._kept.setdefault((turn, layer), {})
                for parameter, (gradient, ready) in gradients.items():
                    ready.result()
                    scaled = gradient if scale == 1.0 else gradient.mul_(scale)
                    kept[parameter] = kept[parameter].add_(scaled) if parameter in kept else scaled
            run.collected.gradients.clear()

    def _send_kept(self, plan: ReductionPlan) -> list[dict[nn.Parameter, torch.Tensor]]:
        """Return the accumulated gradients, summed over the groups of all ranks; all ranks must call this method."""
        reduction = Reduction(plan, self.ranks)
        sums, self._kept = self._kept, {}
        layers = {bucket.layer for bucket in plan.buckets}
        for turn in range(len(self.own)):
            for layer in layers:  # other layers have no gradients
                found = sums.get((turn, layer), {})
                reduction.land(turn, layer, {parameter: (gradient, NOW) for parameter, gradient in found.items()})
        reduction.run()
        had: set[tuple[int, int]] = set().union(*self.ranks.exchange(reduction.had))
        return list(reduction.results(1.0, had))

    def clear(self) -> None:
        self._kept.clear()

    def close(self) -> None:
        self._is_closed = True
        self._worker.close()
        self.ranks.close()


def _agreed(reductions: Sequence[LossReduction | None], microbatches: int) -> LossReduction:
    found = sorted({one for one in reductions if one is not None})
    if len(found) == 1 or microbatches == 1:
        return found[0] if found else "sum"
    shown = f"ranks found {' and '.join(map(repr, found))}" if found else "no rank has the two rows needed to find out"
    raise errors.LossError(
        f'It is not clear whether to sum or to average the losses of microbatches: {shown}. Choose "sum" or "mean":\n'
        '    RoundPipeRunConfig(loss_reduction="mean")'
    )


def with_rows(parts: list[list[FlatMicrobatch]]) -> list[list[FlatMicrobatch]]:
    return [[] if all(microbatch.rows == 0 for microbatch in part) else part for part in parts]


@torch.no_grad()
def share_weights(model: nn.Module, ranks: Ranks) -> None:
    if ranks.size == 1:
        return
    tensors = _tensors(model)
    digests = ranks.exchange([_digest(tensor) for _, tensor in tensors])
    different = [pair for pair, *found in zip(tensors, *digests, strict=True) if len(set(found)) > 1]
    for _, tensor in different:
        received = tensor.detach().contiguous()
        ranks.broadcast(received)
        if not tensor.is_contiguous():
            tensor.copy_(received)
    if different and ranks.rank == 0:
        name, _ = different[0]
        errors.warn(
            f"The ranks began with different values of {len(different)} parameters or buffers, like "
            f"{name!r}; all ranks now use the values of rank 0. Set the same seed on all ranks:\n"
            "    torch.manual_seed(0)  # before the model is made",
            errors.RoundPipeWarning,
        )


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _digest(tensor: torch.Tensor) -> int:
    if not tensor.numel() or tensor.is_meta:
        return 0
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)
