"""Prepare and execute the runs of one model, and commit their results: a failed run changes nothing in the model."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import nn

from yobx_flatten.core.private_names.of_torch import transforms_are_active
from yobx_flatten.errors.failures import raised_as
from yobx_flatten.registry.recipe.aliases import PyTree

from ..batch.entries import FlatBatch, FlatMicrobatch
from ..batch.loss import LossContract
from ..batch.splitting import split_flat
from ..device.disk import DiskMemory
from ..device.pinning import PinnedModel
from ..device.protocol import Device
from ..device.transfer import HostValue
from ..device.worker import Outcome, Uninterrupted, collect, free_after_fork, on_error
from ..errors import DeviceError, StageError
from ..optim.disk_store import DiskStore
from ..optim.in_backward import InBackwardStore
from ..optim.layer_contents import LargeTables, LayerContents, check_gradients, scan
from ..optim.parameters import Update
from ..optim.readiness import ReadinessTable
from ..optim.step import wait_for_updates
from ..schedule.partitioning import MeasuredCosts
from ..schedule.plan import ModelExecutePlan, RunType
from ..schedule.round_robin import RoundRobin, Stage, stages_within
from ..schedule.timeline import CURRENT_TIMELINE
from .code_state import CallerState, gradient_mode_kept, is_due
from .config import NOT_COMPILED, CompiledLayers, RoundPipeRunConfig
from .draws import Draws, run_base
from .one_group import OneGroup, host_value
from .parameters.kept import GradientMemory, KeptParameters
from .parameters.on_device import SETTING_NOTHING_TO_ITSELF, Gradients
from .parameters.partial_table import NOTHING_PARTIAL, RoutedParameters
from .planner import Planner, Timer
from .run import Run, RunSpec, Trial
from .stage.visit import CopyVisit, Visit, run_stage


class CannotTryError(Exception):
    """The layers cannot be checked, because a trial with a few rows of a batch raised an error."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
    optim_dtype: torch.dtype | None  # dtype of the optimizer; `None`: that of the parameters
    tag: str
    pinned: PinnedModel | None = None  # pinned memory of the model; `None` without pinning
    # dtype of the gradients of master weights between a run and the step; `None`: dtype of the sums
    gradient_dtype: torch.dtype | None = None
    compiled: CompiledLayers = NOT_COMPILED
    large_tables: LargeTables = "whole"  # how tables of large vocabularies are copied
    disk: DiskMemory | None = None  # disk storage that replaces host memory for the training; `None` for host memory
    update: Update = "masters"


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineProgress:
    """The training progress of a pipeline; a checkpoint stores it in addition to parameters and buffers.

    Attributes:
        runs: Number of completed pipeline calls. Execution plans are computed again after 1, 2, 4, 8, ... calls.
        masters: Master weights: copies of parameters in the optimizer's dtype, by parameter name (default: none).
        gradients: Accumulated gradients that no optimizer step has used yet, by parameter name (default: none).
        replicas: Number of groups of rows that each batch was split into (default: not known).
    """

    runs: int
    masters: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    gradients: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    replicas: int | None = None


# Pipelines may share devices. This lock is held while all stages of a run are submitted, so that every device gets the
# stages of two runs in the same order. Otherwise the two runs could wait for each other.
_DISPATCH = free_after_fork(threading.Lock())

# Open pipelines of each device: the last one to close ends the device's thread.
_USERS: weakref.WeakKeyDictionary[Device, weakref.WeakSet[RunLifecycle]] = weakref.WeakKeyDictionary()


class RunLifecycle:
    """Prepares forward and backward of a model, executes the stages on devices, and writes results to the model."""

    # take_gradient: function that is called with each parameter and its gradient after each microbatch's backward
    # through a layer. If the function returns true, the gradient is not stored in the parameter.

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        devices: Sequence[Device],
        options: EngineOptions,
        groups: OneGroup,
    ) -> None:
        self.layers = list(layers)
        self._options = options
        self.devices = list(devices)
        disk, in_backward = options.disk, options.update == "in_backward"
        self.tag, self.step, self.groups = options.tag, 0, groups
        made = partial(groups.make_store, model) if disk is None else partial(DiskStore, model, disk, self.layers)
        self.store = InBackwardStore(model, options.optim_dtype) if in_backward else made(options.optim_dtype)
        self.store.kept_dtype = options.gradient_dtype
        self.store.is_in_place = options.update != "masters"
        self.table = ReadinessTable(len(self.layers))
        self.round_robin = RoundRobin(len(self.devices))
        self.is_closed = False
        with _DISPATCH:
            for device in self.devices:
                _USERS.setdefault(device, weakref.WeakSet()).add(self)
        self.planner = Planner(
            self.layers,
            self.devices,
            self.store.gradient_dtype,
            options.large_tables,
            is_compiled=not options.compiled.is_empty,
            is_host_short=disk is not None,
        )
        self.steps = groups.make_steps(self.store, self.table, partial(scan, self.layers))
        self.is_accelerated = any(device.torch_device.type != "cpu" for device in self.devices)
        # gradients that go to a disk, or directly to their step, need pinned memory only during the copy
        stay = disk is None and not in_backward
        self.gradient_memory = GradientMemory() if self.is_accelerated and stay else None
        self.kept = KeptParameters(self.devices)
        self.lock = threading.RLock()
        self.take_gradient: Callable[[nn.Parameter, torch.Tensor], bool] | None = None
        self._routed = RoutedParameters()
        self._runs: collections.Counter[RunType] = collections.Counter()
        self._shapes: dict[int, torch.Size] = {}  # by parameter identity: when the gradients were checked

    # -- a run, from its inputs to its commit --------------------------------------------------------------------------

    def prepare_batch(
        self,
        microbatches: Sequence[FlatMicrobatch],
        config: RoundPipeRunConfig,
        contract: LossContract | None = None,
        **of_spec: Any,
    ) -> tuple[Run, list[HostValue]]:
        # contract: collects the losses of forward and backward in one run. Default: a run of the forward.
        kind: RunType = "fused" if contract is not None else "train" if config.requires_grad else "infer"
        value = partial(host_value, pinned={} if self.is_accelerated else None)
        if contract is not None:
            of_spec["labels"] = [
                value(one.labels, one.label_spec, requires_grad=False, what="label") for one in microbatches
            ]
        rows = [microbatch.rows for microbatch in microbatches]
        # the number of used experts depends on the order of magnitude of the number of elements
        tensors = (leaf for one in microbatches for leaf in one.inputs if isinstance(leaf, torch.Tensor))
        size = sum(tensor.numel() for tensor in tensors).bit_length()
        run = self.prepare(kind, config, rows, contract, size=size, **of_spec)
        flows = run.spec.requires_grad
        return run, [value(one.inputs, one.spec, requires_grad=flows, what="inputs") for one in microbatches]

    def prepare(
        self,
        kind: RunType,
        config: RoundPipeRunConfig,
        rows: Sequence[int | None],
        contract: LossContract | None = None,
        span: range | None = None,
        size: int = 0,
        **of_spec: Any,
    ) -> Run:
        # rows: rows of each microbatch, `None` if not known
        # contract: collects the losses of a fused run. Default: these microbatches are the whole batch.
        # span: indices of the layers that run. Default: all.
        # size: a number that is the same for runs with inputs of similar size
        # If new parameters could not be published, for example for lack of memory, this is tried again before each run.
        # Otherwise every later run would raise the same error, even when the cause is gone.
        self.steps.resume()
        contents = self._read_layers()
        shapes = {id(slot.parameter): slot.parameter.shape for layer in contents for slot in layer.slots}
        if kind != "infer" and shapes != self._shapes:
            self.steps.wait_update()  # a background step writes gradients: no other thread may read them
            check_gradients(contents)
            self._shapes = shapes
        made = self._spec(kind, config, contents, len(rows), span, of_spec.get("loss_fn"))
        spec = dataclasses.replace(made, **of_spec)
        moves = self.groups.replicas == 1  # with several groups, the call advances the caller's generators
        draws = Draws(spec.base_seed or run_base(), spec.tag, in_order=len(rows) == 1, moves=moves)
        looks = spec.trial is None and is_due(self._runs[kind])
        self._runs[kind] += spec.trial is None
        spec = dataclasses.replace(spec, base_seed=draws.seeds, looks=looks)
        largest = max((spec.stage_nbytes(stage) for stage in spec.stages), default=0)
        nbytes_kept = self.planner.bytes_to_keep(config.keep_parameters or 0, largest)
        self.kept.choose(contents, self.store.source, self.table.latest, nbytes_kept)
        costs = self.planner.measured(kind)
        if spec.trial is None:
            timer = Timer(costs, CURRENT_TIMELINE.get(), with_events=self.planner.wants_events(kind))
        else:
            timer = Timer(MeasuredCosts(costs.costs()), None, with_events=False)
        contract = LossContract("sum", rows) if contract is None else contract
        memory = self.gradient_memory
        if memory is not None and spec.requires_grad:
            memory.prepare(spec.contents, self.store.landing_dtype)
        partial_plan = NOTHING_PARTIAL
        # compiled code reads parameters without the calls by which a layer requests them
        if config.upload_experts != "all" and spec.trial is None and spec.compiled.is_empty:
            partial_plan = self._routed.plan(contents, (kind, size), self.store.source, is_look=looks)
        if kind == "fused" and spec.trial is None:  # no gradient of a trial reaches the store
            self.store.begin_run(contents)
        at_hand = self.store.at_hand(contents, [layer for stage in spec.stages for layer in stage.layers])
        how = timer, contract, self.kept, draws, at_hand, memory, self.steps.wait_cleared, partial_plan
        return Run(spec, self.store, self.table, self.table.latest, *how)

    def _read_layers(self) -> list[LayerContents]:
        """Read the layers' parameters anew, since the user may have replaced or frozen them, or added adapters."""
        # While a step is pending, the step's thread publishes the parameters; stages read frozen copies, or wait for
        # each layer.
        if not self.steps.pending:
            self.store.publish()
            if self._options.pinned is not None:
                self._options.pinned.update()
        contents = self.planner.rule.mark(scan(self.layers))
        read = [parameter for layer in contents for parameter in layer.parameters()]
        wait_for_updates(lambda steps: steps is not self.steps and steps.writes(read))  # of other pipelines
        return contents

    def _spec(
        self,
        kind: RunType,
        config: RoundPipeRunConfig,
        contents: list[LayerContents],
        num_microbatch: int,
        span: range | None,
        loss_fn: object,
    ) -> RunSpec:
        copies = config.last_stage_copies or 1
        plan = config.execute_plan or self.planner.plan(kind, self.step, copies=copies, num_microbatch=num_microbatch)
        # `take_gradient` is called from one device, for one microbatch after the other.
        most_copies = 1 if self.take_gradient is not None else max(1, min(len(self.devices), num_microbatch))
        if contents and contents[-1].trains_tables:  # summed on the host, in a fixed order
            most_copies = 1
        span = range(len(self.layers)) if span is None else span
        number = span.stop if kind == "fused" else len(self.layers)  # the loss comes after the last layer that runs
        # The loss may be computed on the CPU.
        kinds = sorted({"cpu"} | {device.torch_device.type for device in self.devices})
        # Trials, evaluation and generation have other sizes and caches, each of which would need its own compilation.
        compiled = self._options.compiled if config.requires_grad else NOT_COMPILED
        return RunSpec(
            kind=kind,
            stages=stages_within(plan.stages(kind, number, most_copies=most_copies), span),
            span=span,
            contents=contents,
            num_microbatch=num_microbatch,
            requires_grad=bool(config.requires_grad),
            recompute_grain=config.recompute_grain or "stage",
            preserve_rng_state=config.preserve_rng_state is not False,
            base_seed=0,
            tag=self.tag,
            caller=CallerState.captured(kinds, [*self.layers, loss_fn]),
            # Between a forward and a later backward, the caller may change parameters.
            stays=kind == "fused" and self.planner.fits(),
            one_thread=not compiled.is_empty or self.planner.prefers_one_thread(kind),
            take_gradient=self.take_gradient,
            compiled=compiled,
        )

    def execute(self, run: Run, inputs: Sequence[HostValue]) -> None:
        """Execute the stages of ``run``, except backward stages that :meth:`execute_backward` executes later."""
        run.start_all(inputs)
        self._execute(run, [stage for stage in run.spec.stages if run.spec.kind != "train" or stage.kind == "forward"])

    def execute_backward(self, run: Run) -> None:
        self._execute(run, [stage for stage in run.spec.stages if stage.kind == "backward"])

    def _execute(self, run: Run, stages: Sequence[Stage]) -> None:
        self.check_can_run()
        with Uninterrupted(stop=run.mailbox.fail):
            # The version is held for the whole run: a background step must not drop copies that later stages read.
            run.version = run.table.hold_latest()
            before = self.kept.traffic
            try:
                with on_error(partial(self._drop, run)), SETTING_NOTHING_TO_ITSELF:
                    self._dispatch(run, stages)
                    self.store.wait_landed()
            finally:
                run.release()
                run.table.let_go(run.version)
            after = self.kept.traffic
            run.timer.add_parameters(after.uploaded - before.uploaded, after.skipped - before.skipped)

    def _dispatch(self, run: Run, stages: Sequence[Stage]) -> None:
        work: list[Future[None]] = []
        with on_error(partial(self._settle, self.round_robin.cursor)):
            with _DISPATCH:
                numbers = self.round_robin.assign(len(stages))
                with Outcome() as outcome:
                    for place, (stage, number) in enumerate(zip(stages, numbers, strict=True)):
                        device = self.devices[number]
                        worker = self.devices[0].worker if run.spec.one_thread else device.worker
                        after = place + len(self.devices)  # stages are assigned round-robin
                        following = stages[after] if after < len(stages) else None
                        visit = Visit if stage.copies == 1 else CopyVisit
                        work.append(worker.submit(run_stage, run, stage, device, following, visit))
                if outcome.error is not None:  # otherwise submitted stages would wait for stages that are missing
                    run.mailbox.fail(outcome.error)
            collect(run.mailbox, work)
            for device in self.devices:
                device.synchronize()  # the caller may change tensors whose copy has ended
            run.timer.finish()

    def _settle(self, cursor: int, error: BaseException) -> None:
        """Wait until no work of a failed forward or backward is left on the devices."""
        # A late error must not reach the next run, and memory must not be freed while a copy still writes to it.
        self.round_robin.cursor = cursor
        for device in self.devices:
            # torch raises a kernel's error at a wait, possibly once for each stream; the second wait is for the rest
            for _ in range(2):
                with contextlib.suppress(Exception):
                    device.synchronize()
                    break

    def _drop(self, run: Run, error: BaseException) -> None:
        self.kept.drop()  # the run may have ended in the middle of an upload
        run.discard()
        if run.spec.looks:  # if the caller catches the error of a check, the next run is checked again
            self._runs[run.spec.kind] = 0
        if run.spec.trial is None:
            self.store.note_failed(error)
            self.steps.note_raised(error)

    def commit(self, run: Run) -> None:
        if run.spec.kind != "fused":
            self.commit_forward(run)
            return
        self.wait_step(run)  # if the background step has failed, the run writes nothing
        with Uninterrupted():  # Ctrl-C must not leave half of the results in the model
            self.commit_forward(run)
            self.commit_backward(run)

    def commit_forward(self, run: Run) -> None:
        with on_error(lambda error: run.discard()):
            run.collected.buffers.check()
        if self.steps.is_exact:
            self.wait_step(run)
        with Uninterrupted():
            run.collected.buffers.commit(keep_start=run.spec.kind == "train")
            run.draws.commit()
            if self.groups.replicas == 1:  # ranks may run different numbers of forwards, but must count the same runs
                self.step += 1

    def commit_backward(self, run: Run) -> None:
        self.wait_step(run)
        with Uninterrupted():
            self.steps.run_ended()
            run.commit_gradients()
            self.store.end_run()

    def wait_step(self, run: Run) -> None:
        with on_error(lambda error: run.discard()):
            self.steps.wait_update()

    def check_can_run(self) -> None:
        if self.is_closed:
            raise DeviceError(
                f"Device {self.devices[0].name} was closed, by this pipeline. Make a new pipeline:\n"
                "    RoundPipe(model, devices=...)"
            )
        if transforms_are_active():
            raise StageError(
                "A pipeline cannot be transformed by torch.func (grad, vmap, jacrev...) or forward-mode AD: its layers "
                "run on devices and in other threads. Differentiate the output of the pipeline:\n"
                "    loss = loss_fn(pipeline(x), y)\n"
                "    gradients = torch.autograd.grad(loss, list(pipeline.parameters()))\n"
                "or transform the model itself, pipeline.model."
            )
        self.steps.check_not_here()
        if any(device.worker.is_here() for device in self.devices):
            raise StageError(
                "A layer called a pipeline that runs on the same device, which would be a deadlock. Give the inner "
                "pipeline its own devices."
            )

    def try_layers(
        self,
        microbatches: Sequence[FlatMicrobatch],
        config: RoundPipeRunConfig,
        span: range,
        trial: Trial | None = None,
    ) -> list[PyTree]:
        """Run a range of layers without side effects, and return the last layer's output for each microbatch."""
        # span: indices of the layers, starting with the first
        self.check_can_run()
        config = in_two_passes(dataclasses.replace(config, requires_grad=False))
        with self._leaving_no_trace(), torch.no_grad():
            run, host_values = self.prepare_batch(microbatches, config, span=span, trial=trial)
            self.execute(run, host_values)
            outputs = [one.rebuild() for one in run.outputs]
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
        """Run forward and backward without side effects: all gradients are passed to the function ``landed``."""
        # types: set to which the dtypes are added in which layers compute
        contract = LossContract("sum", [one.rows for one in microbatches])
        each = [range(layer, layer + 1) for layer in span]
        plan = ModelExecutePlan(each[:-1], each[::-1])  # a stage for each layer takes the least memory
        config = dataclasses.replace(config, execute_plan=plan, last_stage_copies=1)
        of_spec: dict[str, Any] = {"trial": "parts", "keep_outputs": False, "compiled": NOT_COMPILED, "span": span}
        of_spec |= {"loss_fn": loss_fn, "gradients_landed": landed, "types": types}
        with self._leaving_no_trace(), torch.enable_grad():
            run, host_values = self.prepare_batch(microbatches, config, contract, **of_spec)
            try:
                # a failed trial is not an error; if the call itself fails in its backward, that error is raised
                with raised_as(lambda error: CannotTryError(f"{type(error).__name__}: {error}")):
                    self.execute(run, host_values)
            finally:
                run.discard()

    @contextlib.contextmanager
    def _leaving_no_trace(self) -> Iterator[None]:
        """Suppress warnings in the with block, and restore the state of the pipeline after it."""
        with warnings.catch_warnings(), self.lock, gradient_mode_kept():
            warnings.simplefilter("ignore")  # warnings about single rows or missing gradients do not concern the user
            cursor = self.round_robin.cursor
            try:
                yield
            finally:
                self.round_robin.cursor = cursor

    def split(self, batch: FlatBatch, config: RoundPipeRunConfig) -> list[FlatMicrobatch]:
        number = config.num_microbatch or 1
        return split_flat(batch, number, split_input=config.split_input, split_label=config.split_label)

    def synchronize(self) -> None:
        self.steps.synchronize()
        self.store.publish()

    def zero_grad(self, set_to_none: bool) -> None:
        self.groups.clear()
        if not self.steps.is_here():  # a step in the background may still read the gradients
            self.steps.wait_update()
        self.store.zero_grad(set_to_none)

    def progress(self) -> PipelineProgress:
        self.synchronize()
        self.store.check_whole()
        masters = self.store.masters()  # before `named`, which creates master weights that no optimizer has requested
        gradients = {name: target.grad for name, target in self.store.named() if target.grad is not None}
        return PipelineProgress(self.step, masters, gradients)

    def load_progress(self, progress: PipelineProgress) -> None:
        """Load training progress that :meth:`progress` returned, after the parameters of the model have been loaded."""
        self.synchronize()
        self.store.zero_grad()
        self.store.load_masters(progress.masters)
        self.step = progress.runs
        self.store.load_gradients(progress.gradients)
        self.kept.drop()  # another process may have written shared weights

    def close(self) -> None:
        try:
            self.steps.close()
        finally:
            self.is_closed = True
            with _DISPATCH:
                for device in self.devices:
                    _USERS[device].discard(self)
                alone = [device for device in self.devices if not _USERS[device]]
            self.kept.drop()
            for device in alone:
                device.close()
            self.groups.close()
            self.store.close()


def in_two_passes(config: RoundPipeRunConfig) -> RoundPipeRunConfig:
    plan = config.execute_plan
    return config if plan is None else dataclasses.replace(config, execute_plan=plan.for_two_passes())
