"""The calls of one pipeline: split a batch into groups and microbatches, run them, and join the results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from yobx_flatten.errors.failures import raised_as
from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import PyTree

from ..batch.entries import FlatBatch, FlatMicrobatch, check_labels
from ..batch.joining import join
from ..batch.loss import LossContract, warn_if_uneven
from ..batch.splitting import split, split_flat
from ..device.protocol import Device
from ..device.transfer import HostValue
from ..errors import ConfigError, SplitError
from ..schedule.plan import ModelExecutePlan
from .autograd import call
from .caller_state import gradient_mode_kept
from .compiled import NOT_COMPILED
from .config import RoundPipeRunConfig
from .lifecycle import EngineOptions, RunLifecycle
from .loss_check import LossChecks, Sample, on_host
from .one_group import Call, Cutting, OneGroup, host_value, merge_outputs, outputs_of
from .parameters.on_device import Gradients
from .rows import CannotTryError, RowCheck, RowTrial, few_rows, set_apart
from .run import Run, Trial

_FEW = 3  # rows of a sample for the check of a loss


class Engine(RunLifecycle):
    """Runs the layers of one model on its devices."""

    # row_check: checks that layers treat rows independently, before a batch is split; `None` if the caller has checked
    # this
    # few_rows: function that yields trials with a few rows of a batch each

    groups: OneGroup[Engine]  # runs the groups of a batch, in one process or on several ranks

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        devices: Sequence[Device],
        options: EngineOptions,
        groups: OneGroup[Engine] | None = None,
    ) -> None:
        super().__init__(model, layers, devices, options, OneGroup() if groups is None else groups)
        self._warned = False
        self.row_check: RowCheck | None = RowCheck()
        self.loss_checks = LossChecks()
        self.few_rows: Callable[[FlatBatch, RoundPipeRunConfig], Iterator[RowTrial]] = partial(few_rows, self)
        self.groups.begin(self, model)

    # -- what a user calls -------------------------------------------------------------------------------------------

    def forward(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: RoundPipeRunConfig, *, is_checked: bool = False
    ) -> Any:
        """Run the layers forward; if gradients are computed, the outputs are part of the caller's autograd graph."""
        # is_checked: whether the rows of this call were checked
        self.check_can_run()
        with self.lock, gradient_mode_kept(), torch.set_grad_enabled(bool(config.requires_grad)), self._noting_ends():
            checked, self.row_check = self.row_check, None if is_checked else self.row_check
            try:
                return self.groups.forward(self, args, kwargs, config)
            finally:
                self.row_check = checked

    def forward_here(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: RoundPipeRunConfig) -> Any:
        """Run all rows of this process forward, as one group; see :meth:`forward`."""
        microbatches = self.cut_group(FlatBatch.of(args, kwargs, None), config)
        rows = [microbatch.rows for microbatch in microbatches]
        run, host_values = self.prepare_forward(microbatches, config)
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
        """Run all layers but the last microbatch by microbatch, and the last layer once for all rows.

        ::

            # layers 0 to n-2    m0  m1  m2 --join--> layer n-1    with gradients, two nodes of the caller's graph
        """
        # join: function that joins the outputs of the layer before the last one
        self.check_can_run()
        config = in_two_passes(config)
        with self.lock, gradient_mode_kept(), torch.set_grad_enabled(bool(config.requires_grad)):
            microbatches = self.cut_group(FlatBatch.of(args, kwargs, None), config)
            last = len(self.layers) - 1
            run, host_values = self.prepare_forward(microbatches, config, span=range(last))
            # Two runs, and two nodes of the graph: the input of the last layer depends on all microbatches of the
            # first run.
            whole = join(self._forward_outputs(run, host_values))
            rows = None if any(one.rows is None for one in microbatches) else sum(one.rows or 0 for one in microbatches)
            tail = self.prepare(run.spec.kind, config, [rows], span=range(last, last + 1))
            joined = host_value(
                *pytree.tree_flatten(whole),
                requires_grad=run.spec.requires_grad,
                what="what layers return for the whole batch",
                pinned=self._pins(),
            )
            output = merge_outputs(self._forward_outputs(tail, [joined]), [rows], [rows], config)
            if run.spec.kind == "infer":
                self.commit(run)
                self.commit(tail)
            return output

    def wait_exact_step(self) -> None:
        """Wait for an optimizer step in the background whose weights the next run needs, and raise the step's error."""
        if self.steps.is_exact:
            self.steps.wait_update()

    def try_layers(
        self,
        microbatches: Sequence[FlatMicrobatch],
        config: RoundPipeRunConfig,
        span: range,
        trial: Trial | None = None,
    ) -> list[PyTree]:
        """Run the layers of a span without lasting effects, and return the last layer's output for each microbatch."""
        # span: indices of the layers, starting with the first
        self.check_can_run()
        config = in_two_passes(dataclasses.replace(config, requires_grad=False))
        with self._leaving_no_trace(), torch.no_grad():
            run, host_values = self.prepare_forward(microbatches, config, span=span, trial=trial)
            outputs = self._forward_outputs(run, host_values)
            run.discard()
            return outputs

    def try_backward(
        self,
        microbatches: Sequence[FlatMicrobatch],
        config: RoundPipeRunConfig,
        span: range,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        landed: Callable[[int, Gradients], None],
        types: set[torch.dtype],
    ) -> None:
        """Run forward and backward as a trial: ``landed`` gets the gradients of each layer, and parameters get none."""
        contract = LossContract("sum", [one.rows for one in microbatches])
        each = [range(layer, layer + 1) for layer in span]
        plan = ModelExecutePlan(each[:-1], each[::-1])  # a stage for each layer takes the least memory
        config = dataclasses.replace(config, execute_plan=plan, last_stage_copies=1)
        of_spec: dict[str, Any] = {"trial": "parts", "keep_outputs": False, "compiled": NOT_COMPILED, "span": span}
        of_spec |= {"loss_fn": loss_fn, "gradients_landed": landed, "types": types}
        with self._leaving_no_trace(), torch.enable_grad():
            run, host_values = self.prepare_fused(microbatches, config, contract, **of_spec)
            try:
                # a failed trial is not an error; if the call itself fails in its backward, that error is raised
                with raised_as(lambda error: CannotTryError(f"{type(error).__name__}: {error}")):
                    run.start_all(host_values)
                    self.execute(run, run.spec.stages)
            finally:
                run.discard()

    @contextlib.contextmanager
    def _leaving_no_trace(self) -> Iterator[None]:
        """Suppress warnings of a trial, and restore the gradient mode and the device of the next stage afterwards."""
        with warnings.catch_warnings(), self.lock, gradient_mode_kept():
            warnings.simplefilter("ignore")  # warnings about single rows or missing gradients do not concern the user
            cursor = self.round_robin.cursor
            try:
                yield
            finally:
                self.round_robin.cursor = cursor

    def _forward_outputs(self, run: Run, host_values: Sequence[HostValue]) -> list[PyTree]:
        """Run the forward of a run, and return the output of each microbatch."""
        if run.spec.kind == "train":
            return call(self, run, host_values)
        run.start_all(host_values)
        self.execute(run, run.spec.stages)
        return outputs_of(run)

    def forward_backward(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        label: Any,
        loss_fn: Callable[[Any, Any], Any],
        return_outputs: bool,
        config: RoundPipeRunConfig,
    ) -> Any:
        """Run forward, loss and backward of a batch, and return the loss, with the outputs if requested."""
        self.check_can_run()
        with self.lock, gradient_mode_kept(), self._noting_ends():
            outputs = None

            def work(call: Call) -> None:
                nonlocal outputs
                self._run_groups(call, loss_fn, return_outputs, config)
                if return_outputs and call.runs:
                    outputs = _outputs_of_groups(call, config)
                self._warn_of_rows(call, config)

            # Split inside the collective call: an error of one rank must reach the others.
            cut = partial(self._cut_for_loss, args, kwargs, label, loss_fn, config)
            total = self.groups.run_call(self, "forward_backward", cut, config, work)
            self.loss_checks.warn()
            return (total, outputs) if return_outputs else total

    def _run_groups(
        self, call: Call, loss_fn: Callable[[Any, Any], Any], keep_outputs: bool, config: RoundPipeRunConfig
    ) -> None:
        for turn, (part, first) in enumerate(zip(call.parts, call.firsts, strict=True)):
            if part:
                run, host_values = self.prepare_fused(
                    part,
                    config,
                    call.losses(turn),
                    loss_fn=loss_fn,
                    keep_outputs=keep_outputs,
                    base_seed=call.seed,
                    first_microbatch=first,
                    gradients_landed=None if call.land is None else partial(call.land, turn),
                )
                with self.groups.stopping(run):
                    run.start_all(host_values)
                    self.execute(run, run.spec.stages)
                call.add(run, host_values)
            if call.land is not None:
                # The sum over groups waits for every layer of every group, also for layers without gradients.
                for layer in range(len(self.layers)):
                    call.land(turn, layer, {})

    def _warn_of_rows(self, call: Call, config: RoundPipeRunConfig) -> None:
        """Warn once if microbatches of different sizes are summed, because their losses may be means."""
        is_sum = config.loss_reduction == "sum" and call.contract.kind not in ("pair", None)
        if is_sum and self.groups.is_first and not self._warned:
            number = (config.num_microbatch or 1) * self.groups.replicas
            self._warned = warn_if_uneven(call.contract.rows, number)

    # -- splitting a batch ---------------------------------------------------------------------------------------------

    def cut_to_train(self, batch: FlatBatch, config: RoundPipeRunConfig) -> list[list[FlatMicrobatch]]:
        """Split a batch like :meth:`cut`, for a call that computes gradients."""
        if not config.requires_grad:
            raise ConfigError("forward_backward computes gradients, but gradients are switched off here. Use forward.")
        return self.cut(batch, config)

    def _cut_for_loss(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        label: Any,
        loss_fn: Callable[[Any, Any], Any],
        config: RoundPipeRunConfig,
    ) -> Cutting:
        batch = FlatBatch.of(args, kwargs, label)
        parts = self.cut_to_train(batch, config)
        microbatches = [one for part in parts for one in part]
        stated = config.loss_reduction or "auto"
        is_split = len(microbatches) > 1 or (
            self.groups.replicas > 1 and sum(one.rows or 0 for one in microbatches) > 1
        )
        if not is_split:  # one microbatch needs no weights, and one row proves nothing; other ranks may have more rows
            return Cutting(parts, None if stated == "auto" else "mean" if stated == "mean" else "sum")
        samples = partial(self._samples, batch, microbatches, config)
        is_nonlinear = self.row_check is not None and self.row_check.is_nonlinear
        return Cutting(parts, self.loss_checks.reduction(loss_fn, stated, microbatches, samples, is_nonlinear))

    def _samples(
        self, batch: FlatBatch, microbatches: Sequence[FlatMicrobatch], config: RoundPipeRunConfig
    ) -> Iterator[Sample]:
        """Yield samples made of a few rows on which the layers run, and then samples made of a microbatch's outputs."""
        self.wait_exact_step()
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
            raise SplitError("There is one row.")
        for trial in trials:
            outputs = [pytree.tree_unflatten(one.inputs, one.spec)[0][0] for one in (trial.whole, *trial.parts)]
            yield Sample.of(trial, outputs, others)

    @contextlib.contextmanager
    def _noting_ends(self) -> Iterator[None]:
        """After a call, warn about what its checks have found, and record the state of layers and losses."""
        try:
            yield
            if self.row_check is not None:
                self.row_check.warn()
        finally:
            self.loss_checks.end()
            if self.row_check is not None:
                self.row_check.end()

    def cut(self, batch: FlatBatch, config: RoundPipeRunConfig) -> list[list[FlatMicrobatch]]:
        """Split a batch into the groups of this process, and each group into microbatches; groups may be empty."""
        count = self.groups.own_groups
        check_labels(batch.label)
        if count == 1:
            return [self.cut_group(batch, config, is_cut=self.groups.replicas > 1)]
        args, kwargs, label = (one.tree for one in batch)
        groups = split(args, kwargs, label, count, split_input=config.split_input, split_label=config.split_label)
        if len(groups) > count:
            raise ConfigError(
                f"The batch is given in {len(groups)} parts, but this rank has {count} groups. With replicas, give "
                "whole tensors, or one part for each group of the rank."
            )
        self._check_rows(batch, [group.rows for group in groups], config)
        parts = [self.split(FlatBatch.of(group.args, group.kwargs, group.label), config) for group in groups]
        return parts + [[] for _ in range(count - len(parts))]

    def cut_group(self, batch: FlatBatch, config: RoundPipeRunConfig, *, is_cut: bool = False) -> list[FlatMicrobatch]:
        """Split a group of rows into microbatches; ``is_cut``: whether other groups have other rows of the batch."""
        microbatches = self.split(batch, config)
        rows = [microbatch.rows for microbatch in microbatches]
        if is_cut or len(rows) > 1:
            self._check_rows(batch, rows, config)
        return microbatches

    def _check_rows(self, batch: FlatBatch, rows: Sequence[int | None], config: RoundPipeRunConfig) -> None:
        if self.row_check is not None:
            self.row_check.check(self, batch, rows, config)

    def split(self, batch: FlatBatch, config: RoundPipeRunConfig) -> list[FlatMicrobatch]:
        """Split arguments and labels into microbatches."""
        number = config.num_microbatch or 1
        return split_flat(batch, number, split_input=config.split_input, split_label=config.split_label)


def _outputs_of_groups(call: Call, config: RoundPipeRunConfig) -> Any:
    outputs = [output for run, _ in call.runs for output in outputs_of(run)]
    rows = [count for run, _ in call.runs for count in run.contract.rows]
    weights: list[float | None] = [weight for run, _ in call.runs for weight in run.contract.weights]
    return merge_outputs(outputs, weights if call.contract.kind == "pair" else rows, rows, config)


def in_two_passes(config: RoundPipeRunConfig) -> RoundPipeRunConfig:
    """Return the settings with a plan that has separate forward and backward stages."""
    plan = config.execute_plan
    return config if plan is None else dataclasses.replace(config, execute_plan=plan.for_two_passes())
