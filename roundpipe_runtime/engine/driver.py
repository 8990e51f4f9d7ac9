"""Split a batch into groups of rows and microbatches, run the microbatches on devices, and join the results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.errors.failures import raised_as
from yobx_flatten.registry.recipe.aliases import PyTree

from ..batch.entries import FlatBatch, FlatMicrobatch, check_labels
from ..batch.joining import join
from ..batch.loss import Reduction, warn_if_uneven
from ..batch.splitting import split
from ..device.protocol import Device
from ..device.transfer import HostValue
from ..errors import ConfigError, SplitError, StageError
from ..optim.parameters import added
from .code_state import gradient_mode_kept
from .config import RoundPipeRunConfig
from .lifecycle import EngineOptions, RunLifecycle, in_two_passes
from .loss_check import LossChecks, Sample, on_host
from .one_group import Call, Cutting, OneGroup, PinnedCopies, host_value, merge_outputs
from .rows import RowCheck, RowTrial, few_rows, set_apart
from .run import Run, arrived

_FEW = 3  # rows of a sample for the check of a loss


class Engine(RunLifecycle):
    # row_check: checks, before a batch is split, that layers treat rows independently; `None` if the caller has checked

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        devices: Sequence[Device],
        options: EngineOptions,
        groups: OneGroup | None = None,
    ) -> None:
        super().__init__(model, layers, devices, options, OneGroup() if groups is None else groups)
        self._warned = False
        self.row_check: RowCheck | None = RowCheck()
        self.loss_checks = LossChecks()
        self.few_rows: Callable[[FlatBatch, RoundPipeRunConfig], Iterator[RowTrial]] = partial(few_rows, self)
        self.groups.begin(self, model)

    def forward(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: RoundPipeRunConfig, *, is_checked: bool = False
    ) -> Any:
        self.check_can_run()
        with self.lock, gradient_mode_kept(), torch.set_grad_enabled(bool(config.requires_grad)), self._noting_ends():
            checked, self.row_check = self.row_check, None if is_checked else self.row_check
            try:
                return self.groups.forward(self, args, kwargs, config)
            finally:
                self.row_check = checked

    def forward_here(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: RoundPipeRunConfig) -> Any:
        microbatches = self.cut_group(FlatBatch.of(args, kwargs, None), config)
        rows = [microbatch.rows for microbatch in microbatches]
        run, host_values = self.prepare_batch(microbatches, config)
        joined = merge_outputs(self._forward_outputs(run, host_values), rows, rows, config)
        if run.spec.kind == "infer":
            self.commit(run)
        return joined

    def forward_joined(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        config: RoundPipeRunConfig,
        join: Callable[[list[PyTree]], PyTree],
    ) -> PyTree:
        """Run the last layer once for all rows, and all other layers for each microbatch."""
        # join: function that joins the outputs of the layer before the last one
        self.check_can_run()
        config = in_two_passes(config)
        with self.lock, gradient_mode_kept(), torch.set_grad_enabled(bool(config.requires_grad)):
            microbatches = self.cut_group(FlatBatch.of(args, kwargs, None), config)
            last = len(self.layers) - 1
            run, host_values = self.prepare_batch(microbatches, config, span=range(last))
            # Two runs, and two nodes of the graph: the input of the last layer depends on all microbatches of the
            # first run.
            whole = join(self._forward_outputs(run, host_values))
            rows = None if any(one.rows is None for one in microbatches) else sum(one.rows or 0 for one in microbatches)
            tail = self.prepare(run.spec.kind, config, [rows], span=range(last, last + 1))
            leaves, what = pytree.tree_flatten(whole), "what layers return for the whole batch"
            pinned: PinnedCopies | None = {} if self.is_accelerated else None
            joined = host_value(*leaves, requires_grad=run.spec.requires_grad, what=what, pinned=pinned)
            output = merge_outputs(self._forward_outputs(tail, [joined]), [rows], [rows], config)
            if run.spec.kind == "infer":
                self.commit(run)
                self.commit(tail)
            return output

    def _forward_outputs(self, run: Run, host_values: Sequence[HostValue]) -> list[PyTree]:
        """Run the forward, and connect the outputs to the caller's autograd graph if a backward can follow."""
        if run.spec.kind != "train":
            self.execute(run, host_values)
            return [one.rebuild() for one in run.outputs]
        inputs = [t for one in host_values for t, flag in zip(one.tensors, one.needs_grad, strict=True) if flag]
        # A node has a backward only if an input of the node requires a gradient, and parameters whose gradients have
        # another dtype are not inputs of the node.
        anchor = torch.empty(0, requires_grad=True)
        # trained parameters whose gradients have the dtype of the parameter; torch sums and hands out these gradients
        held = [parameter for layer in run.spec.span for parameter in run.spec.contents[layer].parameters()]
        of, between = run.store.gradient_dtype, run.store.dtype_between
        learned = [*{id(p): p for p in held if p.requires_grad and of(p) == between(p) == p.dtype}.values()]
        results = iter(_apply(self, run, host_values, learned, anchor, *inputs, *learned))
        found = [run.collected.outputs.pop(number) for number in range(run.spec.num_microbatch)]
        return [one.structure.rebuild([next(results) for _ in one.tensors]) for one in found]

    def forward_backward(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        label: Any,
        loss_fn: Callable[[Any, Any], Any],
        return_outputs: bool,
        config: RoundPipeRunConfig,
    ) -> Any:
        self.check_can_run()
        with self.lock, gradient_mode_kept(), self._noting_ends():
            outputs = None

            def cut() -> Cutting:  # in the collective call: an error of one rank must reach the others
                batch = FlatBatch.of(args, kwargs, label)
                parts = self.cut_to_train(batch, config)
                return Cutting(parts, self._reduction(batch, parts, loss_fn, config))

            def work(call: Call) -> None:
                nonlocal outputs
                for turn, (part, first) in enumerate(zip(call.parts, call.firsts, strict=True)):
                    if part:
                        run, host_values = self.prepare_batch(
                            part,
                            config,
                            call.losses(turn),
                            loss_fn=loss_fn,
                            keep_outputs=return_outputs,
                            base_seed=call.seed,
                            first_microbatch=first,
                            gradients_landed=None if call.land is None else partial(call.land, turn),
                        )
                        with self.groups.stopping(run):
                            self.execute(run, host_values)
                        call.add(run, host_values)
                    if call.land is not None:
                        # The sum over groups waits for every layer of every group, also for layers without gradients.
                        for layer in range(len(self.layers)):
                            call.land(turn, layer, {})
                kind = call.contract.kind
                if return_outputs and call.runs:
                    runs = [run for run, _ in call.runs]
                    rows = [count for run in runs for count in run.contract.rows]
                    weights: list[float | None] = [weight for run in runs for weight in run.contract.weights]
                    each = [output.rebuild() for run in runs for output in run.outputs]
                    outputs = merge_outputs(each, weights if kind == "pair" else rows, rows, config)
                # losses of microbatches with different numbers of rows may be means, which do not add up
                is_sum = config.loss_reduction == "sum" and kind not in ("pair", None)
                if is_sum and self.groups.is_first and not self._warned:
                    number = (config.num_microbatch or 1) * self.groups.replicas
                    self._warned = warn_if_uneven(call.contract.rows, number)

            with self.groups.calling():
                call = self.groups.open(self, "forward_backward", cut, config)
                total = self.groups.summed(self, call, partial(work, call))
                del call  # holds the inputs and outputs of its runs
            self.loss_checks.warn()
            return (total, outputs) if return_outputs else total

    def cut_to_train(self, batch: FlatBatch, config: RoundPipeRunConfig) -> list[list[FlatMicrobatch]]:
        if not config.requires_grad:
            raise ConfigError("forward_backward computes gradients, but gradients are switched off here. Use forward.")
        return self.cut(batch, config)

    def _reduction(
        self,
        batch: FlatBatch,
        parts: Sequence[Sequence[FlatMicrobatch]],
        loss_fn: Callable[[Any, Any], Any],
        config: RoundPipeRunConfig,
    ) -> Reduction | None:
        """Find how the losses of microbatches add up to the batch's loss; ``None`` if the rows are too few to test."""
        microbatches = [one for part in parts for one in part]
        stated = config.loss_reduction or "auto"
        rows = sum(one.rows or 0 for one in microbatches)
        is_split = len(microbatches) > 1 or (self.groups.replicas > 1 and rows > 1)
        if not is_split:  # one microbatch needs no weights, and one row proves nothing; other ranks may have more rows
            return None if stated == "auto" else "mean" if stated == "mean" else "sum"
        samples = partial(self._samples, batch, microbatches, config)
        is_nonlinear = self.row_check is not None and self.row_check.is_nonlinear
        return self.loss_checks.reduction(loss_fn, stated, microbatches, samples, is_nonlinear)

    def _samples(
        self, batch: FlatBatch, microbatches: Sequence[FlatMicrobatch], config: RoundPipeRunConfig
    ) -> Iterator[Sample]:
        if self.steps.is_exact:
            self.steps.wait_update()
        others = [on_host(leaf.value) for leaf in batch.label.leaves]
        tried = [] if self.row_check is None else self.row_check.tried
        span, alone = range(len(self.layers)), dataclasses.replace(config, execute_plan=None, output_device=None)

        def run(given: Sequence[FlatMicrobatch]) -> list[PyTree]:
            reason = "the layers do not run on some rows of the batch"
            with set_apart(self.layers), raised_as(lambda e: SplitError(f"{reason}: {type(e).__name__}: {e}")):
                return self.try_layers(given, alone, span, "parts")

        # a function that splits this batch may not be able to split a few rows of it
        is_cut_by_user = self.row_check is not None and (callable(config.split_input) or callable(config.split_label))
        for trial in tried or (() if is_cut_by_user else self.few_rows(batch, config)):
            yield Sample.of(trial, trial.outputs or run([trial.whole, *trial.parts]), others)
        largest = max(microbatches, key=lambda one: one.rows or 0)
        chosen = [largest] if (largest.rows or 0) > 1 else microbatches[:_FEW]
        rows = [one.rows or 0 for one in chosen]
        labels = [pytree.tree_unflatten([*map(on_host, one.labels)], one.label_spec) for one in chosen]
        held = run(chosen), labels
        output, label = (one[0] if len(chosen) == 1 else join(one, rows, rows=rows) for one in held)
        cut = RoundPipeRunConfig(num_microbatch=math.ceil(sum(rows) / _FEW))
        trials = [*few_rows(self, FlatBatch.of((output,), {}, label), cut)]
        if not trials:
            raise SplitError("The batch has one row.")
        for trial in trials:
            outputs = [pytree.tree_unflatten(one.inputs, one.spec)[0][0] for one in (trial.whole, *trial.parts)]
            yield Sample.of(trial, outputs, others)

    @contextlib.contextmanager
    def _noting_ends(self) -> Iterator[None]:
        try:
            yield
            if self.row_check is not None:
                self.row_check.warn()
        finally:
            self.loss_checks.end()
            if self.row_check is not None:
                self.row_check.end()

    def cut(self, batch: FlatBatch, config: RoundPipeRunConfig) -> list[list[FlatMicrobatch]]:
        """Split this process's rows of a batch into groups (see ``replicas``), and each group into microbatches."""
        count = len(self.groups.own)
        check_labels(batch.label)
        if count == 1:
            return [self.cut_group(batch, config, is_cut=self.groups.replicas > 1)]
        args, kwargs, label = (one.tree for one in batch)
        groups = split(args, kwargs, label, count, split_input=config.split_input, split_label=config.split_label)
        if len(groups) > count:
            raise ConfigError(
                f"This rank splits its rows of a batch into {count} groups (replicas=), but a split function or "
                f"RoundPipePackedData gives {len(groups)} parts. Give one part per group, or pass whole tensors."
            )
        if self.row_check is not None:
            self.row_check.check(self, batch, [group.rows for group in groups], config)
        parts = [self.split(FlatBatch.of(group.args, group.kwargs, group.label), config) for group in groups]
        return parts + [[] for _ in range(count - len(parts))]

    def cut_group(self, batch: FlatBatch, config: RoundPipeRunConfig, *, is_cut: bool = False) -> list[FlatMicrobatch]:
        # is_cut: whether other groups have rows of the same batch
        microbatches = self.split(batch, config)
        rows = [microbatch.rows for microbatch in microbatches]
        if self.row_check is not None and (is_cut or len(rows) > 1):
            self.row_check.check(self, batch, rows, config)
        return microbatches


# A run is one node of the caller's autograd graph, and the node's backward runs the backward stages.
#
# The inputs of the node are the model's inputs and parameters. So torch sums the gradients in `grad`, runs hooks, and
# returns gradients from `torch.autograd.grad`. The engine adds only gradients of a dtype other than the parameter's.


def return_outputs(ctx: Any, values: Sequence[HostValue]) -> tuple[torch.Tensor, ...]:
    ctx.set_materialize_grads(False)
    pairs = [pair for on_host in values for pair in zip(on_host.tensors, on_host.needs_grad, strict=True)]
    ctx.mark_non_differentiable(*(tensor for tensor, needs_grad in pairs if not needs_grad))
    return tuple(tensor for tensor, _ in pairs)


class _Pipeline(torch.autograd.Function):
    """An autograd function whose ``forward`` and ``backward`` run the forward and backward stages of a pipeline."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        run: Run,
        host_values: Sequence[HostValue],
        learned: Sequence[torch.Tensor],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        engine.execute(run, host_values)
        ctx.engine, ctx.run, ctx.learned = engine, run, learned
        ctx.flags = [on_host.needs_grad for on_host in host_values]
        run.remember_forward()
        engine.commit_forward(run)
        return return_outputs(ctx, run.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        engine, run = ctx.engine, ctx.run
        if torch.is_grad_enabled():
            raise StageError(
                "create_graph=True asks for second-order gradients, which a pipeline cannot compute. Compute them with "
                "the model itself:\n    model = pipeline.model"
            )
        if run is None:
            raise StageError(
                "backward() already ran through this forward of the pipeline and freed its saved tensors; "
                "retain_graph has no effect. Call backward once for the sum of several losses, or call forward again:\n"
                "    (loss + other_loss).backward()"
            )
        ctx.run = None
        run.start_backward(iter(gradients))
        with engine.lock:
            engine.execute_backward(run)
            # torch sums the gradients of these parameters; layers may share a parameter
            totals: dict[int, torch.Tensor | None] = dict.fromkeys(map(id, ctx.learned))
            for _, gradients_of_layer in sorted(run.collected.gradients.items(), reverse=True):
                for parameter in [parameter for parameter in gradients_of_layer if id(parameter) in totals]:
                    gradient = arrived(gradients_of_layer.pop(parameter))
                    before = totals[id(parameter)]
                    totals[id(parameter)] = gradient if before is None else added(before, gradient)
            engine.commit_backward(run)
        return (None, None, None, None, None, *input_gradients(run, ctx.flags), *totals.values())


def input_gradients(run: Run, flags: Sequence[Sequence[bool]]) -> list[torch.Tensor | None]:
    # flags: for each microbatch, whether each input requires a gradient
    copies = run.collected.input_gradients
    pairs = [pair for number, own in enumerate(flags) for pair in zip(own, copies[number], strict=True)]
    return [None if copy is None else arrived(copy) for flag, copy in pairs if flag]


_apply = cast(Callable[..., tuple[torch.Tensor, ...]], _Pipeline.apply)
