"""The engine that drives a run: it splits the batch, assigns stages to devices, waits, and joins the results.

The results of a run are collected outside of the model and reach it in :meth:`Engine.commit`, when nothing can fail
any more. A run that fails changes no gradient, no buffer and no seed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import PyTree

from ..batch.arguments import check_labels
from ..batch.flat import FlatBatch, FlatMicrobatch
from ..batch.loss import LossContract, warn_if_uneven
from ..batch.splitting import split_flat
from ..device.forking import free_after_fork
from ..device.interrupts import Uninterrupted
from ..device.pinning import PinnedModel
from ..device.transfer import HostValue
from ..device.virtual import Device
from ..device.worker import collect
from ..errors import ConfigError, DeviceError, StageError
from ..optim.parameters import ParameterStore, scan
from ..optim.readiness import ReadinessTable
from ..optim.step import StepRunner, wait_for_updates
from ..schedule.costs import MeasuredCosts
from ..schedule.plan import RunType
from ..schedule.round_robin import RoundRobin, Stage, stages_within
from ..timeline.record import current_timeline
from .autograd import call, check_not_transformed
from .config import RoundPipeRunConfig
from .copied_stage import CopyVisit
from .draws import Draws, run_base
from .gradient_memory import GradientMemory
from .inputs import PinnedCopies, feed_inputs, host_value
from .kept_parameters import KeptParameters
from .looks import is_due
from .loss_check import LossChecks
from .outputs import merge_outputs, outputs_of
from .planner import Planner
from .progress import PipelineProgress
from .rows import RowCheck
from .run import Run
from .run_spec import RunSpec, Trial, captured_autocast
from .stage import Visit, run_stage
from .timer import Timer

__all__ = ["Engine"]

# Pipelines may share devices. All stages of a run are handed out in one go: then every device has them in the same
# order, and no two runs can wait for each other.
_DISPATCH = free_after_fork(threading.Lock())

# How often a device that failed is waited for: once for its error, and once for everything else.
_ATTEMPTS = 2

# The pipelines that are open on a device: the last one that closes ends its thread.
_USERS: weakref.WeakKeyDictionary[Device, weakref.WeakSet[Engine]] = weakref.WeakKeyDictionary()


class Engine:
    """Runs the layers of one model on its devices.

    Args:
        model: model that has the parameters and buffers.
        layers: layers, in order.
        devices: devices on which they run.
        optim_dtype: dtype in which the optimizer works.
        tag: name that distinguishes pipelines that run in the same step, for the seeds of random layers.
        pinned: pinned memory of the model. Default: nothing is pinned.

    Attributes:
        row_check: proof that layers compute each row by itself, before a batch is cut between rows; ``None`` for layers
            of which the caller has one.
        take_gradient: function that is offered each parameter and its gradient as soon as a microbatch has gone back
            through a layer. A gradient for which it returns true does not reach the parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        devices: Sequence[Device],
        optim_dtype: torch.dtype | None,
        tag: str,
        pinned: PinnedModel | None = None,
    ) -> None:
        self.layers = list(layers)
        self.devices = list(devices)
        self.tag = tag
        self.step = 0
        self.store = self.make_store(model, optim_dtype)
        self.table = ReadinessTable(len(self.layers))
        self.round_robin = RoundRobin(len(self.devices))
        self.planner = Planner(self.layers, self.devices, self.store.gradient_dtype)
        self.steps = self.make_steps()
        is_accelerated = any(device.torch_device.type != "cpu" for device in self.devices)
        self.gradient_memory = GradientMemory() if is_accelerated else None
        self.kept = KeptParameters(self.devices)
        self.lock = threading.RLock()
        self.take_gradient: Callable[[nn.Parameter, torch.Tensor], bool] | None = None
        self.pin(pinned)
        self._loss_checks = LossChecks()
        self._closed = False
        with _DISPATCH:
            for device in self.devices:
                _USERS.setdefault(device, weakref.WeakSet()).add(self)
        self._warned = False
        self.row_check: RowCheck | None = RowCheck()
        self._runs: collections.Counter[RunType] = collections.Counter()

    def make_store(self, model: nn.Module, optim_dtype: torch.dtype | None) -> ParameterStore:
        """Return the store of the model's parameters."""
        return ParameterStore(model, optim_dtype)

    def make_steps(self) -> StepRunner:
        """Return what runs the optimizer's steps."""
        layers = self.layers
        return StepRunner(self.store, self.table, lambda: scan(layers))

    def pin(self, pinned: PinnedModel | None) -> None:
        """Set the pinned memory of the model, which later runs keep up to date."""
        self._pinned = pinned

    def entering(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a call that ends in :meth:`forward_backward`, where other ranks may wait."""
        return contextlib.nullcontext()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which sums of gradients stay on this rank; of one process they do anyway."""
        return contextlib.nullcontext()

    def moves_generators(self) -> bool:
        """Report whether the generators of the caller move with each run that draws."""
        return True

    def rows_of_batch(self, rows: int) -> int:
        """Return the rows of the whole batch in a call, of which ``rows`` are those of this process."""
        return rows

    def cuts(self, rows: Sequence[int | None]) -> bool:
        """Report whether a batch is cut between rows, of which these are in the microbatches of this process."""
        return len(rows) > 1

    # -- what a user calls -------------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: RoundPipeRunConfig) -> Any:
        """Run the layers forward; with gradients, the outputs are part of the caller's graph.

        Args:
            args: positional arguments of the model.
            kwargs: keyword arguments of the model.
            config: settings of the call, without gaps.

        Returns:
            The output of the batch.

        Raises:
            SplitError: inputs cannot be split into microbatches.
            JoinError: outputs cannot be joined.
        """
        self._check_can_run()
        with self.lock, torch.set_grad_enabled(bool(config.requires_grad)):
            batch = FlatBatch.of(args, kwargs, None)
            microbatches = self.split(batch, config)
            rows = [microbatch.rows for microbatch in microbatches]
            self._check_rows(batch, rows, config)
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
        """Run all layers but the last one by microbatches, and the last one once, on what they return for all rows.

        ::

            # layers 0 to n-2    m0  m1  m2 --join--> layer n-1    with gradients, two nodes of the caller's graph

        Args:
            args: positional arguments of the model.
            kwargs: keyword arguments of the model.
            config: settings of the call, without gaps.
            join: function that makes the input of the last layer of the outputs of the one before it.

        Returns:
            The output of the batch.

        Raises:
            SplitError: inputs cannot be split into microbatches.
        """
        self._check_can_run()
        config = _in_two_passes(config)
        with self.lock, torch.set_grad_enabled(bool(config.requires_grad)):
            batch = FlatBatch.of(args, kwargs, None)
            microbatches = self.split(batch, config)
            self._check_rows(batch, [microbatch.rows for microbatch in microbatches], config)
            last = len(self.layers) - 1
            run, host_values = self.prepare_forward(microbatches, config, span=range(last))
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

    def outputs_before_last(self, microbatches: Sequence[FlatMicrobatch], config: RoundPipeRunConfig) -> list[PyTree]:
        """Return what the layer before the last one returns for each microbatch; nothing of the run is committed.

        Args:
            microbatches: microbatches of the run.
            config: settings of the call, without gaps.
        """
        return self._outputs_within(microbatches, config, range(len(self.layers) - 1))

    def try_layers(
        self, microbatches: Sequence[FlatMicrobatch], config: RoundPipeRunConfig, span: range, trial: Trial
    ) -> list[PyTree]:
        """Return what the last layer of a span returns for each microbatch, to be compared.

        Args:
            microbatches: microbatches of the run.
            config: settings of the call, without gaps.
            span: indices of the layers, from the first one on.
            trial: what is compared, see :class:`RunSpec`.
        """
        with warnings.catch_warnings():  # those of single rows, or of no gradients, are not the user's
            warnings.simplefilter("ignore")
            return self._outputs_within(microbatches, config, span, trial=trial)

    def _outputs_within(
        self, microbatches: Sequence[FlatMicrobatch], config: RoundPipeRunConfig, span: range, **of_spec: Any
    ) -> list[PyTree]:
        """What layers return in a run that is dropped."""
        self._check_can_run()
        config = _in_two_passes(dataclasses.replace(config, requires_grad=False))
        with self.lock, torch.no_grad():
            run, host_values = self.prepare_forward(microbatches, config, span=span, **of_spec)
            cursor = self.round_robin.cursor
            outputs = self._forward_outputs(run, host_values)
            run.discard()
            self.round_robin.cursor = cursor  # the next run goes to the devices to which it would have gone
            return outputs

    def _check_rows(self, batch: FlatBatch, rows: Sequence[int | None], config: RoundPipeRunConfig) -> None:
        """Check that layers compute each row by itself, unless who calls the engine has done so."""
        if self.row_check is not None and self.cuts(rows):
            self.row_check.check(self, batch, rows, config)

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
        """Run forward, loss and backward.

        Args:
            args: positional arguments of the model.
            kwargs: keyword arguments of the model.
            label: labels, split like the inputs.
            loss_fn: loss function of a microbatch.
            return_outputs: whether to also return the outputs.
            config: settings of the call, without gaps.

        Returns:
            The loss of the batch; with ``return_outputs``, ``(loss, outputs)``.

        Raises:
            ConfigError: gradients are switched off, or a label requires one.
            SplitError: inputs or labels cannot be split into microbatches.
            LossError: ``loss_fn`` returned something that is not a loss.
        """
        if not config.requires_grad:
            raise ConfigError("forward_backward computes gradients, but they are switched off. Use forward.")
        self._check_can_run()
        with self.lock:
            batch = FlatBatch.of(args, kwargs, label)
            check_labels(batch.label)
            microbatches = self.split(batch, config)
            rows = [microbatch.rows for microbatch in microbatches]
            self._check_rows(batch, rows, config)
            run, host_values = self.prepare_fused(microbatches, config, loss_fn=loss_fn, keep_outputs=return_outputs)
            run.start_all(host_values)
            self.execute(run, run.spec.stages)
            outputs = None
            if return_outputs:
                weights = run.contract.weights if run.contract.kind == "pair" else rows
                outputs = merge_outputs(outputs_of(run), weights, rows, config)
            total = pytree.tree_map(torch.Tensor.cpu, run.contract.total())
            self._warn(run, rows, config)
            run.collected.buffers.check()
            self._wait_step(run)
            feed_inputs(run, host_values, run.contract.gradient_scale())
            self.commit(run)
            return (total, outputs) if return_outputs else total

    # -- the parts of a run ------------------------------------------------------------------------------------------

    def split(self, batch: FlatBatch, config: RoundPipeRunConfig) -> list[FlatMicrobatch]:
        """Split arguments and labels into microbatches.

        Args:
            batch: arguments and labels.
            config: settings of the call.

        Returns:
            The microbatches, in the order of the rows.

        Raises:
            SplitError: it is not clear what to cut.
        """
        number = config.num_microbatch or 1
        return split_flat(batch, number, split_input=config.split_input, split_label=config.split_label)

    def prepare_forward(
        self, microbatches: Sequence[FlatMicrobatch], config: RoundPipeRunConfig, **of_spec: Any
    ) -> tuple[Run, list[HostValue]]:
        """Return a run of a forward that has not started, and its inputs.

        Args:
            microbatches: microbatches of the run.
            config: settings of the call, without gaps.
            **of_spec: further fields of :class:`RunSpec`.

        Returns:
            The run, and the inputs of each microbatch.
        """
        rows = [microbatch.rows for microbatch in microbatches]
        run = self.prepare("train" if config.requires_grad else "infer", config, rows, **of_spec)
        return run, _inputs_of(microbatches, run, self._pins())

    def prepare_fused(
        self,
        microbatches: Sequence[FlatMicrobatch],
        config: RoundPipeRunConfig,
        contract: LossContract | None = None,
        *,
        loss_fn: Callable[[Any, Any], Any],
        **of_spec: Any,
    ) -> tuple[Run, list[HostValue]]:
        """Return a run of forward, loss and backward that has not started, and its inputs.

        Args:
            microbatches: microbatches of the run.
            config: settings of the call, without gaps.
            contract: contract of the losses. Default: these microbatches are the whole batch.
            loss_fn: loss function, which is checked in its first run.
            **of_spec: further fields of :class:`RunSpec`.

        Returns:
            The run, and the inputs of each microbatch.
        """
        pinned = self._pins()
        labels = [
            host_value(one.labels, one.label_spec, requires_grad=False, what="label", pinned=pinned)
            for one in microbatches
        ]
        rows = [microbatch.rows for microbatch in microbatches]
        is_split = len(rows) > 1 or contract is not None  # a part of the batch of all ranks
        first = microbatches[0].labels if microbatches else ()
        check = self._loss_checks.of(loss_fn, config.reduction_of_parts, first) if is_split else None
        of_spec |= {"loss_fn": loss_fn, "loss_check": check}
        run = self.prepare("fused", config, rows, contract, labels=labels, **of_spec)
        return run, _inputs_of(microbatches, run, pinned)

    def prepare(
        self,
        kind: RunType,
        config: RoundPipeRunConfig,
        rows: Sequence[int | None],
        contract: LossContract | None = None,
        span: range | None = None,
        **of_spec: Any,
    ) -> Run:
        """Return a run that has not started.

        Args:
            kind: ``"infer"``, ``"train"`` or ``"fused"``.
            config: settings of the call, without gaps.
            rows: rows of each microbatch, ``None`` where they are not known.
            contract: contract of the losses of a fused run. Default: these microbatches are the whole batch.
            span: indices of the layers that run. Default: all.
            **of_spec: fields of :class:`RunSpec` that a fused run has in addition, or has others of.

        Returns:
            The run, which reads the parameters of this moment.

        Raises:
            PlanError: the plan of the configuration is not one for these layers.
            StageError: a layer has parameters without a shape.
        """
        span = range(len(self.layers)) if span is None else span
        copies = config.last_stage_copies or 1
        plan = config.execute_plan or self.planner.plan(kind, self.step, copies=copies, num_microbatch=len(rows))
        # Who is offered gradients gets them from one device, microbatch after microbatch.
        most_copies = 1 if self.take_gradient is not None else max(1, min(len(self.devices), len(rows)))
        # A publication that failed, for want of memory for example, is tried again before each run: the run would get
        # its error otherwise, also after the cause is gone.
        self.steps.resume()
        # Stages read the values of the master weights only after this. While a step is pending they read frozen copies,
        # or wait for each layer, and the thread of the step writes the parameters.
        if not self.steps.pending:
            self.store.publish()
            if self._pinned is not None:
                self._pinned.update()
        # Read again for every run: the user may have replaced a parameter, frozen it, or added an adapter.
        contents = scan(self.layers)
        read = [parameter for layer in contents for parameter in layer.parameters()]
        wait_for_updates(lambda steps: steps is not self.steps and steps.writes(read))  # of a pipeline that shares some
        # Autocast belongs to the thread of the caller. Labels and losses may also stay on the CPU.
        kinds = sorted({"cpu"} | {device.torch_device.type for device in self.devices})
        spec = RunSpec(
            kind=kind,
            stages=stages_within(plan.stages(kind, len(self.layers), most_copies=most_copies), span),
            span=span,
            contents=contents,
            num_microbatch=len(rows),
            requires_grad=bool(config.requires_grad),
            recompute_grain=config.recompute_grain or "stage",
            preserve_rng_state=config.preserve_rng_state is not False,
            base_seed=0,
            tag=self.tag,
            autocast=captured_autocast(kinds),
            # In a run that goes backward later, the caller may change parameters in between.
            stays=kind == "fused" and self.planner.fits(),
            one_thread=self.planner.prefers_one_thread(kind),
            take_gradient=self.take_gradient,
            looks=not of_spec.get("trial") and is_due(self._count(kind)),
        )
        spec = dataclasses.replace(spec, **of_spec)
        draws = Draws(spec.base_seed or run_base(), spec.tag, in_order=len(rows) == 1, moves=self.moves_generators())
        spec = dataclasses.replace(spec, base_seed=draws.seeds)
        largest = max((spec.stage_nbytes(stage) for stage in spec.stages), default=0)
        nbytes_kept = self.planner.bytes_to_keep(config.keep_parameters or 0, largest)
        self.kept.choose(contents, self.store.source, self.version(), nbytes_kept)
        timer = (
            Timer(MeasuredCosts(self.planner.measured(kind).costs()), None, with_events=False)
            if spec.trial
            else Timer(self.planner.measured(kind), current_timeline(), with_events=self.planner.wants_events(kind))
        )
        contract = LossContract(config.reduction_of_parts, rows) if contract is None else contract
        memory = self.gradient_memory
        if memory is not None and spec.requires_grad:
            memory.prepare(spec.contents, self.store.landing_dtype)
        wait_cleared = self.steps.wait_cleared
        return Run(
            spec, self.store, self.table, self.version(), timer, contract, self.kept, draws, memory, wait_cleared
        )

    def _count(self, kind: RunType) -> int:
        """Count the runs of a kind; return how many there were before."""
        self._runs[kind] += 1
        return self._runs[kind] - 1

    def step_exact(self, step: Callable[[], Any]) -> None:
        """Run an optimizer step layer by layer, next to the run that follows, which waits for each layer.

        Args:
            step: function of the step.
        """
        self.steps.synchronize()
        with self.lock:  # a run of another thread has ended, and finds the step when it begins
            steps = self.steps.begin_exact(step)
        self.steps.wait_exact(steps)

    def execute(self, run: Run, stages: Sequence[Stage]) -> None:
        """Run stages to their end.

        Args:
            run: run that the stages belong to.
            stages: stages in the order of dispatch.

        Raises:
            BaseException: the first error of any of them, when all have ended.
        """
        self._check_can_run()
        with Uninterrupted(stop=run.mailbox.fail):
            self._execute(run, stages)

    def _execute(self, run: Run, stages: Sequence[Stage]) -> None:
        cursor = self.round_robin.cursor
        run.version = run.table.hold_latest()
        try:
            with _DISPATCH:
                numbers = self.round_robin.assign(len(stages))
                work = []
                try:
                    for place, (stage, number) in enumerate(zip(stages, numbers, strict=True)):
                        device = self.devices[number]
                        worker = self.devices[0].worker if run.spec.one_thread else device.worker
                        after = place + len(self.devices)  # stages go round
                        following = stages[after] if after < len(stages) else None
                        visit = Visit if stage.copies == 1 else CopyVisit
                        work.append(worker.submit(run_stage, run, stage, device, following, visit))
                except BaseException as refusal:  # of a device that was closed
                    run.mailbox.fail(refusal)
            collect(run.mailbox, work)
            for device in self.devices:
                device.synchronize()  # the caller may change what was copied from
            run.timer.finish()
        except BaseException as error:
            self.round_robin.cursor = cursor
            self._settle()
            self.kept.drop()  # the run may have ended in the middle of an upload
            run.discard()
            self.steps.note_raised(error)
            raise
        finally:
            run.release()
            run.table.let_go(run.version)

    def _settle(self) -> None:
        """Wait until nothing of a failed run is under way on a device; its later errors are not those of the next run.

        Memory that a copy writes must not be given back before.
        """
        for device in self.devices:
            # torch's error of a kernel is raised at a wait, and may be there for each stream
            for _ in range(_ATTEMPTS):
                with contextlib.suppress(Exception):
                    device.synchronize()
                    break

    def commit(self, run: Run) -> None:
        """Commit the results of a complete run to the model."""
        if run.spec.kind != "fused":
            self.commit_forward(run)
            return
        self._wait_step(run)
        with Uninterrupted():
            self.commit_forward(run)
            self.commit_backward(run)

    def commit_forward(self, run: Run) -> None:
        """Commit the buffers that a run wrote to the model, and count the run."""
        try:
            run.collected.buffers.check()
        except BaseException:
            run.discard()
            raise
        if self.steps.is_exact:
            self._wait_step(run)
        with Uninterrupted():
            run.collected.buffers.commit(keep_start=run.spec.kind == "train")
            run.draws.commit()
            self.step += 1

    def commit_backward(self, run: Run) -> None:
        """Commit the gradients of a run whose forward was committed before."""
        self._wait_step(run)
        with Uninterrupted():
            self.steps.run_ended()
            run.commit_gradients()

    def _wait_step(self, run: Run) -> None:
        """Wait for a step in the background: its error comes before anything of this run is written."""
        try:
            self.steps.wait_update()
        except BaseException:
            run.discard()
            raise

    # -- state between runs ------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for a background step; afterwards parameters and master weights agree."""
        self.steps.synchronize()
        self.store.publish()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear all gradients; a background step reads them, so it ends first, unless it asks itself."""
        if not self.steps.is_here():
            self.steps.wait_update()
        self.store.zero_grad(set_to_none)

    def progress(self) -> PipelineProgress:
        """Return what is to be saved in addition to parameters and buffers, after the last step."""
        self.synchronize()
        masters = self.store.masters()  # before `named`, which makes those that no optimizer has asked for
        gradients = {name: target.grad for name, target in self.store.named() if target.grad is not None}
        return PipelineProgress(self.step, masters, gradients)

    def load_progress(self, progress: PipelineProgress) -> None:
        """Load what :meth:`progress` returned, after the parameters."""
        self.synchronize()
        self.store.zero_grad()
        self.store.load_masters(progress.masters)
        self.step = progress.runs
        self.store.load_gradients(progress.gradients)
        self.kept.drop()  # another process may have written weights that are shared

    def version(self) -> int:
        """Return the version of the parameters that a run reads now."""
        return self.table.latest

    def close(self) -> None:
        """Finish work that is under way and end the threads."""
        try:
            self.steps.close()
        finally:
            self._closed = True
            with _DISPATCH:
                alone = [device for device in self.devices if self._leaves(device)]
            self.kept.drop()
            for device in alone:
                device.close()

    def _leaves(self, device: Device) -> bool:
        """Stop using a device; report whether no other engine uses it."""
        users = _USERS.get(device, weakref.WeakSet())
        users.discard(self)
        return not users

    def _check_can_run(self) -> None:
        if self._closed:
            raise DeviceError(
                f"{self.devices[0].name} was closed, by this pipeline. Make a new pipeline:\n"
                "    RoundPipe(model, devices=...)"
            )
        check_not_transformed()
        self.steps.check_not_here()
        if any(device.worker.is_here() for device in self.devices):
            raise StageError(
                "A pipeline was called from inside of a layer that runs on one of its own devices, which would wait "
                "for itself. Give the inner pipeline devices of its own."
            )

    def _pins(self) -> PinnedCopies | None:
        """What keeps the pinned copies of a batch; ``None`` where no device copies from the host directly."""
        return None if self.gradient_memory is None else {}

    def _warn(self, run: Run, rows: Sequence[int | None], config: RoundPipeRunConfig) -> None:
        if not self._warned and config.loss_reduction == "sum" and run.contract.kind != "pair":
            self._warned = warn_if_uneven(rows, config.num_microbatch or 1)


def _inputs_of(microbatches: Sequence[FlatMicrobatch], run: Run, pinned: PinnedCopies | None) -> list[HostValue]:
    flows = run.spec.requires_grad
    return [host_value(one.inputs, one.spec, requires_grad=flows, what="inputs", pinned=pinned) for one in microbatches]


def _in_two_passes(config: RoundPipeRunConfig) -> RoundPipeRunConfig:
    """The settings of a call with the stages of its plan, which is one for a fused run perhaps, for two passes."""
    plan = config.execute_plan
    return config if plan is None else dataclasses.replace(config, execute_plan=plan.for_two_passes())
