"""Run the forward of a whole batch before its backward, on several ranks."""

# forward ... backward()     each rank runs its groups forward; `backward()` sums gradients over all ranks
# forward_backward_whole     forward of all groups, exchange of the loss's inputs, loss of the whole batch, backward

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch

from yobx_flatten.core.private_names.of_torch import pytree

from ...batch.entries import FlatBatch, FlatMicrobatch
from ...device.transfer import HostValue
from ...device.worker import Outcome, Uninterrupted, noting
from ...engine.config import RoundPipeRunConfig
from ...engine.driver import Engine, input_gradients, return_outputs
from ...engine.layer_graph import other_leaves
from ...engine.one_group import Cutting, merge_outputs
from ...engine.parameters.on_device import Gradients
from ...engine.run import Run
from ...errors import StageError, StoppedByRankError, format_failure, raise_first
from .rank_calls import RankCall, RankCalls, loss_is_trained, with_rows


class BatchLoss(Protocol):
    """The interface of a loss that is computed once for the whole batch, because it is not a sum over microbatches."""

    def state(self, group: Sequence[Any]) -> Any:
        """Return the outputs of one group of rows in a form that can be sent to the other ranks for the loss."""

    def compute(self, groups: Sequence[Sequence[Any]], own: Sequence[int], stated: Sequence[Any]) -> tuple[Any, Any]:
        """Return the loss of the whole batch, and the outputs of this rank joined into one."""
        # groups: outputs of the microbatches of each group of this rank, as parts of a graph
        # returns: the loss, equal on all ranks, with a graph to the outputs of this rank; `None` without rows


class RankGroups(RankCalls):
    """Runs this rank's rows of a batch: forward and backward in one call, or in separate calls."""

    _forwarded = (0, 0)

    def forward(
        self, engine: Engine, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: RoundPipeRunConfig
    ) -> Any:
        """Run the forward for the rows of the batch that belong to this rank."""
        if not config.requires_grad or self.replicas == 1:
            return super().forward(engine, args, kwargs, config)
        passes = GroupPasses(with_rows(engine.cut(FlatBatch.of(args, kwargs, None), config)), config)
        # forwards since the last collective call, because each forward draws different random numbers
        step, count = self._forwarded
        number = count if step == engine.step else 0
        self._forwarded = engine.step, number + 1
        firsts = [group * (config.num_microbatch or 1) for group in self.own]
        # Errors of other ranks are ignored, since they may be in another call: this is outside of `calling`.
        tag = f"{engine.tag}|{number}" if number else engine.tag
        self._run_forward(engine, passes, firsts, tag=tag)
        # A rank without rows still needs outputs with a graph, since the other ranks wait for its `backward`.
        if not passes.runs:
            with torch.no_grad():
                without = dataclasses.replace(config, requires_grad=False)
                parts: list[FlatMicrobatch] = engine.split(FlatBatch.of(args, kwargs, None), without)
                run, values = engine.prepare_batch(parts, without)
                with noting(
                    "This rank has no rows, so forward called the layers on an empty batch to take part in the "
                    "backward of all ranks. forward_backward does not need that call:\n"
                    "    model.forward_backward((inputs,), label=labels, loss_fn=loss_fn)"
                ):
                    engine.execute(run, values)
            flags = [[*map(torch.is_floating_point, one.tensors)] for one in run.outputs]
            pairs = zip(run.outputs, flags, strict=True)
            passes.empty = [dataclasses.replace(one, needs_grad=own) for one, own in pairs]
        anchor = torch.empty(0, requires_grad=True)  # parameters are not inputs of the node
        held = [on_host for _, values in passes.runs for on_host in values]
        inputs = [t for one in held for t, flag in zip(one.tensors, one.needs_grad, strict=True) if flag]
        results = iter(_apply(partial(self.backward, engine, passes), passes, anchor, *inputs))
        each = [one.structure.rebuild([next(results) for _ in one.tensors]) for one in passes.outputs()]
        outputs = merge_outputs(each, passes.rows(), passes.rows(), config)
        for index, (run, _) in enumerate(passes.runs):
            # Only the first group updates the running statistics of the model, but each recomputation needs the
            # statistics from the start of its group.
            if index:
                run.collected.buffers.keep_start()
            else:
                passes.written = run.collected.buffers.final()
        for run, _ in passes.runs[:1]:
            engine.commit_forward(run)
        return outputs

    def backward(self, engine: Engine, passes: GroupPasses, gradients: Sequence[torch.Tensor | None]) -> None:
        engine.check_can_run()
        with engine.lock, self.calling(), torch.no_grad():
            call = self.open(engine, "backward", lambda: Cutting(passes.parts), passes.config)
            call = dataclasses.replace(call, is_one_pass=False, feeds=False, written=passes.written)
            self._run_backward(engine, call, passes, lambda: gradients)

    def forward_backward_whole(
        self,
        engine: Engine,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss: BatchLoss,
        config: RoundPipeRunConfig,
    ) -> tuple[Any, Any]:
        """Run forward, one loss for the whole batch, and backward; all ranks must call this method."""
        engine.check_can_run()
        with engine.lock, self.calling():

            def cut() -> Cutting:
                return Cutting(engine.cut_to_train(FlatBatch.of(args, kwargs, None), config))

            call = self.open(engine, "forward_backward of a whole batch", cut, config)
            call = dataclasses.replace(call, is_one_pass=False)
            passes = GroupPasses(call.parts, config)
            stated = self._state_halfway(engine, call, passes, loss)
            found: list[Any] = [None]

            def compute() -> Sequence[torch.Tensor | None]:
                with torch.enable_grad():
                    groups, tensors = _by_group(passes, flows=True)
                    total, outputs = loss.compute(groups, self.own, stated)
                    found[0] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
                    call.total = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, total)
                    wanted = [tensor for tensor in tensors if tensor.requires_grad]
                    losses = pytree.tree_leaves(total)
                    roots = [loss for loss in losses if isinstance(loss, torch.Tensor) and loss.requires_grad]
                    if other_leaves(roots, wanted):
                        raise loss_is_trained()
                    if roots:
                        torch.autograd.backward(roots, inputs=wanted)
                    return [tensor.grad for tensor in tensors]

            return self._run_backward(engine, call, passes, compute), found[0]

    def _run_forward(self, engine: Engine, passes: GroupPasses, firsts: Sequence[int], **of_spec: Any) -> None:
        for turn, (part, first) in enumerate(zip(passes.parts, firsts, strict=True)):
            if not part:
                continue
            run, values = engine.prepare_batch(
                part, passes.config, first_microbatch=first, gradients_landed=partial(passes.land, turn), **of_spec
            )
            passes.runs.append((run, values))
            with self.stopping(run):
                engine.execute(run, values)
            run.remember_forward()
            run.collected.buffers.check()

    def _state_halfway(self, engine: Engine, call: RankCall, passes: GroupPasses, loss: BatchLoss) -> list[Any]:
        own: list[Any] = []
        with Outcome() as outcome:
            with torch.enable_grad():
                self._run_forward(engine, passes, call.firsts, base_seed=call.seed)
            own = [loss.state(group) for group in _by_group(passes, flows=False)[0]]
        failure = outcome.error
        with Uninterrupted():
            is_own = failure is not None and not isinstance(failure, StoppedByRankError)
            if is_own:
                self.ranks.alarm.send({"call": self._number})
            text = format_failure(failure) if failure is not None and is_own else None
            with Outcome() as exchanged:
                said = self.ranks.exchange((own, text))
                raise_first(failure if is_own else None, [text for _, text in said])
            # precedence: the error of this rank, then that of the exchange, then those of other ranks
            errors = [failure if is_own else None, exchanged.error, failure]
            error = next((error for error in errors if error is not None), None)
            if error is not None:
                for run, _ in passes.runs:
                    run.discard()
                raise error
        size = self.ranks.size
        return [said[group % size][0][group // size] for group in range(self.replicas)]

    def _run_backward(
        self,
        engine: Engine,
        call: RankCall,
        passes: GroupPasses,
        gradients: Callable[[], Sequence[torch.Tensor | None]],
    ) -> Any:
        call.runs += passes.runs

        def work() -> None:
            passes.landed = call.land
            found, runs = iter(gradients()), iter(passes.runs)
            for turn, part in enumerate(passes.parts):
                if part:
                    run, _ = next(runs)
                    run.start_backward(found)
                    with self.stopping(run):
                        engine.execute_backward(run)
                for layer in range(len(engine.layers)):  # other layers have no gradients
                    passes.land(turn, layer, {})

        return self.summed(engine, call, work)


def _by_group(passes: GroupPasses, *, flows: bool) -> tuple[list[list[Any]], list[torch.Tensor]]:
    # flows: whether the tensors require gradients where the tensors of the model do
    outputs, tensors = [], []
    for on_host in passes.outputs():
        flags = zip(on_host.tensors, on_host.needs_grad, strict=True)
        own = [tensor.detach().requires_grad_(flag and flows) for tensor, flag in flags]
        outputs.append(on_host.structure.rebuild(own))
        tensors += own
    found = iter(outputs)
    return [[next(found) for _ in part] for part in passes.parts], tensors


@dataclasses.dataclass(slots=True)
class GroupPasses:
    parts: list[list[FlatMicrobatch]]  # microbatches of each group
    config: RoundPipeRunConfig  # settings of the call
    # runs of the groups that have rows, with the inputs of each microbatch
    runs: list[tuple[Run, list[HostValue]]] = dataclasses.field(default_factory=list)
    # function that gets gradients as they arrive; `None` leaves them in the run
    landed: Callable[[int, int, Gradients], None] | None = None
    written: dict[tuple[int, int], torch.Tensor] | None = None  # buffers that the first run wrote
    empty: list[HostValue] = dataclasses.field(default_factory=list)  # outputs without rows, on a rank that has none

    def land(self, turn: int, layer: int, gradients: Gradients) -> None:
        if self.landed is not None:
            self.landed(turn, layer, gradients)

    def rows(self) -> list[int | None]:
        return [microbatch.rows for part in self.parts for microbatch in part] or [0] * len(self.empty)

    def outputs(self) -> list[HostValue]:
        return [output for run, _ in self.runs for output in run.outputs] or self.empty


class _Groups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, back: Any, passes: GroupPasses, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.back, ctx.passes = back, passes
        return return_outputs(ctx, passes.outputs())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        passes, ctx.passes = ctx.passes, None
        if torch.is_grad_enabled() or passes is None:
            raise StageError(
                "A pipeline's forward supports one backward, without create_graph=True or retain_graph=True. Call "
                "forward again. For second-order gradients, use the model itself:\n"
                "    model = pipeline.model"
            )
        ctx.back(gradients)
        flags = [(run, [on_host.needs_grad for on_host in values]) for run, values in passes.runs]
        return (None, None, None, *(gradient for run, own in flags for gradient in input_gradients(run, own)))


_apply = cast(Callable[..., tuple[torch.Tensor, ...]], _Groups.apply)
