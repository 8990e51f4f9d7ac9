"""The engine of one rank: it runs the groups of this rank, and commits when all ranks have succeeded.

::

    opening     rows of every group, the seed of rank 0, whether all ranks call alike          one exchange
    runs        one per own group; gradients of a layer go to the reduction as they land
    verdict     losses and weights of all microbatches, or the error of a rank                one exchange
    commit      loss and scale of the whole batch; sums into the targets; buffers of the first group
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import nn

from ..batch.arguments import check_labels
from ..batch.flat import FlatBatch, FlatMicrobatch
from ..batch.loss import LossContract, warn_if_uneven
from ..batch.splitting import split
from ..device.interrupts import Uninterrupted
from ..device.pinning import PinnedModel
from ..device.virtual import Device
from ..device.worker import Worker
from ..engine.config import RoundPipeRunConfig
from ..engine.draws import move_generator, run_base
from ..engine.driver import Engine
from ..engine.inputs import feed_inputs
from ..engine.outputs import merge_outputs, outputs_of
from ..errors import ConfigError, DistributedError
from ..optim.parameters import scan
from ..optim.step import StepRunner
from .agreement import describe_call, describe_model, share_weights
from .call import Call, Opening, Verdict
from .errors import StoppedByRankError, format_failure, raise_first, ranks_disagree
from .kept import KeptSums
from .losses import GroupLosses, report_losses, total_contract
from .news import News
from .publication import RankSteps
from .ranks import Ranks
from .reduction import Reduction, ReductionPlan
from .replicas import groups_of
from .shards import RankStore, ShardedStore
from .shared_store import SharedStore

__all__ = ["FusedRankEngine"]


class FusedRankEngine(Engine):
    """Runs the layers of one model on the devices of this rank, for its part of each batch.

    Args:
        model: model that has the parameters and buffers.
        layers: layers, in order.
        devices: devices of this rank.
        optim_dtype: dtype in which the optimizer works.
        tag: name that distinguishes pipelines that run in the same step, for the seeds of random layers.
        pinned: pinned memory of the model.
        ranks: ranks of the model.
        replicas: number of groups that a batch is cut into. Default: number of ranks.
        reduce_dtype: dtype in which gradients travel. Default: that of their sums.
        gradient_dtype: dtype of the gradients of master weights between a run and the step. Default: that of the sums.
        host_weights: ``"shared"`` if the ranks of a machine have one copy of the weights.

    Raises:
        ConfigError: there are fewer groups than ranks, or weights that cannot be shared.
        DistributedError: the ranks have different models or options.
    """

    store: RankStore
    steps: RankSteps

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        devices: Sequence[Device],
        optim_dtype: torch.dtype | None,
        tag: str,
        pinned: PinnedModel | None,
        ranks: Ranks,
        replicas: int | None = None,
        reduce_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        host_weights: str = "own",
    ) -> None:
        self.ranks, self.reduce_dtype = ranks, reduce_dtype
        self.replicas = ranks.size if replicas is None else replicas
        if self.replicas < ranks.size:
            raise ConfigError(
                f"replicas={self.replicas} is less than the number of ranks, {ranks.size}: some would have nothing to "
                f"do. Start fewer processes, or give RoundPipe(..., replicas={ranks.size})."
            )
        self._shares = host_weights == "shared" and ranks.size > 1
        if self._shares and ranks.num_shards == 1:
            raise ConfigError(
                'host_weights="shared" needs shards, each with one process that steps it, and with this mesh every '
                "process steps everything:\n"
                f'    mesh = init_device_mesh("cpu", ({ranks.size},))'
            )
        super().__init__(model, layers, devices, optim_dtype, tag, pinned)
        self.store.kept_dtype = gradient_dtype
        dtypes = {"optim_dtype": optim_dtype, "reduce_dtype": reduce_dtype, "gradient_dtype": gradient_dtype}
        options = {"replicas": self.replicas, "host_weights": host_weights, **dtypes}
        stated = describe_model(model, **options, layers=len(layers), name=tag)
        if error := ranks_disagree(ranks.exchange(stated)):
            raise error
        share_weights(model, ranks)
        if isinstance(self.store, SharedStore):
            self.store.share()
        self._worker = Worker("reduction")
        self._is_deferred = False
        self._kept = KeptSums()
        self._number = 0
        self._rows_of_batch: int | None = None
        self._news = News(ranks.alarm)

    def make_store(self, model: nn.Module, optim_dtype: torch.dtype | None) -> RankStore:
        """Return the store of the model's parameters."""
        kind = SharedStore if self._shares else ShardedStore if self.ranks.num_shards > 1 else RankStore
        return kind(model, optim_dtype, self.ranks)

    def make_steps(self) -> StepRunner:
        """Return what runs the optimizer's steps."""
        layers = self.layers
        return RankSteps(self.store, self.table, lambda: scan(layers))

    def moves_generators(self) -> bool:
        """Report whether the generators of the caller move with each run that draws: in groups, with each call."""
        return self.replicas == 1

    def rows_of_batch(self, rows: int) -> int:
        """Return the rows of the whole batch in a call.

        Args:
            rows: rows of this rank.
        """
        return rows if self._rows_of_batch is None else self._rows_of_batch

    def cuts(self, rows: Sequence[int | None]) -> bool:
        """Report whether a batch is cut between rows: it is between the groups, if not within this one."""
        return self.replicas > 1 or len(rows) > 1

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Notify the other ranks of an error on the way to :meth:`forward_backward`: they wait there for this one."""
        number = self._number
        try:
            yield
        except BaseException as error:
            if self._number == number and not self._closed:
                self._number += 1
                self.ranks.exchange(Opening([], 0, {}, format_failure(error)))
            raise

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the sums of calls in the block on this rank; the first call after it sends them with its own."""
        before, self._is_deferred = self._is_deferred, True
        try:
            yield
        finally:
            self._is_deferred = before

    def step_exact(self, step: Callable[[], Any]) -> None:
        """Run an optimizer step now: the weights of all ranks are gathered next to the run that follows."""
        self.steps.run(step)

    # -- a call ------------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        label: Any,
        loss_fn: Callable[[Any, Any], Any],
        return_outputs: bool,
        config: RoundPipeRunConfig,
    ) -> Any:
        """Run forward, loss and backward of this rank's rows, and return the loss of all rows of all ranks.

        Args:
            args: positional arguments of the model.
            kwargs: keyword arguments of the model.
            label: labels, split like the inputs.
            loss_fn: loss function of a microbatch.
            return_outputs: whether to also return the outputs of this rank's rows; ``None`` if it has none.
            config: settings of the call, without gaps. ``num_microbatch`` is that of each group.

        Returns:
            The loss of the batch; with ``return_outputs``, ``(loss, outputs)``.

        Raises:
            DistributedError: another rank failed, is gone, or calls in another way.
            BaseException: the error of this rank.
        """
        self._check_can_run()
        with self.lock, self._calling():
            call = self._open("forward_backward", partial(self._cut, args, kwargs, label, config), config)
            outputs = None

            def work(reduction: Reduction | None) -> None:
                nonlocal outputs
                self._run_groups(call, reduction, loss_fn, return_outputs, config)
                if return_outputs and call.runs:
                    outputs = self._outputs(call, config)

            total = self._summed(call, work)
            if self.ranks.rank == 0:
                self._warn_of_rows(call, config)
            return (total, outputs) if return_outputs else total

    def _summed(self, call: Call, work: Callable[[Reduction | None], None]) -> Any:
        """Do the work of this rank, and commit when all ranks have succeeded; return the loss.

        Args:
            call: call that all ranks have agreed on.
            work: function that is given the sums to which gradients go as they land; ``None`` where they stay here.
        """
        is_late = self._is_deferred or bool(self._kept)
        reduction = Reduction(call.plan, self.ranks)
        summed = None if is_late else self._news.watch(self._worker.submit(reduction.run))
        failure: BaseException | None = None
        try:
            work(None if is_late else reduction)
            self.steps.wait_update()
            if summed is not None:
                self._news.wait(summed)
        except BaseException as error:
            failure = error
        with Uninterrupted():
            verdicts = self._judge(call, reduction, summed, failure)
            return self._commit(call, reduction, verdicts, is_late=is_late)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        with self._news.listening(lambda: self._number):
            try:
                yield
            finally:
                self._rows_of_batch = None

    def _open(self, name: str, cut: Callable[[], list[list[FlatMicrobatch]]], config: RoundPipeRunConfig) -> Call:
        """Cut this rank's rows into its groups, and agree with all ranks on the call.

        Args:
            name: name of the call, which all ranks must make.
            cut: function that returns the microbatches of each group of this rank.
            config: settings of the call.
        """
        parts: list[list[FlatMicrobatch]] = []
        failure: BaseException | None = None
        stated: dict[str, object] = {}
        contents = scan(self.layers)
        try:
            if not config.requires_grad:
                raise ConfigError("forward_backward computes gradients, but they are switched off. Use forward.")
            self.store.check()
            parts = cut()
            stated = describe_call(contents, config, call=name, step=self.step, is_deferred=self._is_deferred)
        except BaseException as error:
            failure = error
        rows = [[microbatch.rows for microbatch in part] for part in parts]
        self._number += 1
        text = None if failure is None else format_failure(failure)
        said = self.ranks.exchange(Opening(rows, run_base(), stated, text))
        raise_first(failure, [one.failure for one in said])
        if disagreement := ranks_disagree([one.stated for one in said]):
            raise disagreement
        size, replicas = self.ranks.size, self.replicas
        groups = [said[group % size].rows[group // size] for group in range(replicas)]
        if not any(groups):
            raise ConfigError("The batch has no rows on any rank.")
        firsts = [sum(len(group) for group in groups[:number]) for number in range(replicas)]
        counts = [count for group in groups for count in group]
        self._rows_of_batch = None if None in counts else sum(count or 0 for count in counts)
        return Call(
            parts,
            [firsts[group] for group in groups_of(self.ranks.rank, size, replicas)],
            LossContract(config.reduction_of_parts, counts),
            ReductionPlan(contents, self.store, replicas, self.reduce_dtype),
            said[0].seed,
            next(number for number, group in enumerate(groups) if group) % size,
        )

    def _cut(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], label: Any, config: RoundPipeRunConfig
    ) -> list[list[FlatMicrobatch]]:
        """The microbatches of each group of this rank; none for a group without rows."""
        count = len(groups_of(self.ranks.rank, self.ranks.size, self.replicas))
        if count == 1:
            batches = [FlatBatch.of(args, kwargs, label)]
        else:
            rules = {"split_input": config.split_input, "split_label": config.split_label}
            groups = split(args, kwargs, label, count, **rules)
            if len(groups) > count:
                raise ConfigError(
                    f"The batch is given in {len(groups)} parts, and this rank has {count} groups. With replicas, give "
                    "whole tensors, or one part for each group of the rank."
                )
            batches = [FlatBatch.of(group.args, group.kwargs, group.label) for group in groups]
        parts = []
        for batch in batches:
            check_labels(batch.label)
            microbatches = self.split(batch, config)
            self._check_rows(batch, [one.rows for one in microbatches], config)
            parts.append([] if all(one.rows == 0 for one in microbatches) else microbatches)
        return parts + [[] for _ in range(count - len(parts))]

    def _run_groups(
        self,
        call: Call,
        reduction: Reduction | None,
        loss_fn: Callable[[Any, Any], Any],
        keep_outputs: bool,
        config: RoundPipeRunConfig,
    ) -> None:
        layers = range(len(self.layers))
        for turn, (part, first) in enumerate(zip(call.parts, call.firsts, strict=True)):
            if part:
                run, host_values = self.prepare_fused(
                    part,
                    config,
                    GroupLosses(call.contract, first, len(part)),
                    loss_fn=loss_fn,
                    keep_outputs=keep_outputs,
                    base_seed=call.seed,
                    first_microbatch=first,
                    gradients_landed=None if reduction is None else partial(reduction.land, turn),
                )
                with self._news.stopping(run):
                    run.start_all(host_values)
                    self.execute(run, run.spec.stages)
                if len(layers) in run.collected.gradients:
                    raise DistributedError(
                        "The loss function trains parameters of its own, which no layer holds, so they are not summed "
                        "over the ranks. Make them part of the model: a last layer that returns what the loss needs."
                    )
                run.collected.buffers.check()
                call.runs.append((run, host_values))
            if reduction is not None:
                for layer in layers:  # what has not landed has no gradient
                    reduction.land(turn, layer, {})

    def _outputs(self, call: Call, config: RoundPipeRunConfig) -> Any:
        outputs = [output for run, _ in call.runs for output in outputs_of(run)]
        rows = [count for run, _ in call.runs for count in run.contract.rows]
        weights: list[float | None] = [weight for run, _ in call.runs for weight in run.contract.weights]
        return merge_outputs(outputs, weights if call.contract.kind == "pair" else rows, rows, config)

    # -- success or failure, of all ranks alike ----------------------------------------------------------------------

    def _judge(
        self, call: Call, reduction: Reduction, summed: Future[None] | None, failure: BaseException | None
    ) -> list[Verdict]:
        """Return what all ranks state, when all have succeeded.

        Raises:
            BaseException: the error of this rank, or that of another one.
        """
        is_own = failure is not None and not isinstance(failure, StoppedByRankError)
        if is_own:
            self.ranks.alarm.raise_for(self._number)
        begun = reduction.stop()
        try:
            if failure is None:
                verdict = Verdict(
                    begun,
                    None,
                    report_losses(call.contract),
                    frozenset(reduction.had),
                    self._written_buffers(call),
                    any(flag for run, values in call.runs for value in values for flag in value.needs_grad),
                    call.total,
                    any(run.draws.has_drawn for run, _ in call.runs),
                )
            else:
                verdict = Verdict(begun, format_failure(failure) if is_own else None)
            verdicts = self.ranks.exchange(verdict)
        except BaseException:
            self._drop(call, reduction, summed, 0)
            if failure is not None and is_own:
                raise failure from None
            raise
        stated = [one.failure for one in verdicts]
        if failure is None and not any(stated):
            return verdicts
        self._drop(call, reduction, summed, max(one.begun for one in verdicts))
        raise_first(failure if is_own else None, stated)
        assert failure is not None
        raise failure

    def _drop(self, call: Call, reduction: Reduction, summed: Future[None] | None, begun: int) -> None:
        """Forget a call that has failed."""
        reduction.finish(begun)
        if summed is not None:
            with contextlib.suppress(Exception):  # a rank is gone, which is known
                summed.result()
        for run, _ in call.runs:
            run.discard()

    def _commit(self, call: Call, reduction: Reduction, verdicts: Sequence[Verdict], *, is_late: bool) -> Any:
        total: Any
        if call.is_one_pass:
            contract = total_contract(call.contract, [report for one in verdicts for report in one.losses])
            total, scale = contract.total(), contract.gradient_scale()
        else:
            total, scale = next((one.total for one in verdicts if one.total is not None), None), 1.0
        if call.feeds and any(one.feeds for one in verdicts):
            self._feed(call, scale)
        self.steps.run_ended()
        if is_late:
            self._kept.add(call, scale)
            if not self._is_deferred:
                self.store.add_gradients(self._kept.send(call.plan, self.ranks))
        else:
            had = set().union(*(one.had for one in verdicts))
            self.store.add_gradients(reduction.results(scale, had))
        contents = call.runs[0][0].spec.contents if call.runs else scan(self.layers)
        for (layer, number), value in verdicts[call.first_rank].buffers.items():
            contents[layer].buffers[number].store(value)
        if self.replicas == 1:
            for run, _ in call.runs:
                run.draws.commit()
        elif any(one.has_drawn for one in verdicts):
            move_generator()
        self.step += 1
        return total

    def _feed(self, call: Call, scale: float) -> None:
        """Continue backward from the inputs; an error of one rank is raised on all, before a gradient is written."""
        failure: BaseException | None = None
        try:
            for run, host_values in call.runs:
                feed_inputs(run, host_values, scale)
        except BaseException as error:
            failure = error
        said = self.ranks.exchange(None if failure is None else format_failure(failure))
        raise_first(failure, said)

    def _written_buffers(self, call: Call) -> Mapping[tuple[int, int], torch.Tensor]:
        """The buffers that the first group of the batch wrote; those of other groups are not kept."""
        if call.first_rank != self.ranks.rank or not call.runs:
            return {}
        if call.written is not None:
            return call.written
        return call.runs[0][0].collected.buffers.final()

    def _warn_of_rows(self, call: Call, config: RoundPipeRunConfig) -> None:
        if not self._warned and config.loss_reduction == "sum" and call.contract.kind not in ("pair", None):
            self._warned = warn_if_uneven(call.contract.rows, (config.num_microbatch or 1) * self.replicas)

    # -- state between calls -------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear all gradients, and sums that stayed on this rank."""
        self._kept.clear()
        super().zero_grad(set_to_none)

    def close(self) -> None:
        """Finish work that is under way and end the threads."""
        try:
            super().close()
        finally:
            self._worker.close()
            self.ranks.close()
