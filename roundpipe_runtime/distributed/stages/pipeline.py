"""Pipelines over several processes whose stages exchange registered objects.

``torch.distributed.pipelining`` sends tensors from stage to stage. Here a stage takes and returns any object whose
class is registered: its tensors are sent, and the object is rebuilt.

::

    process 0                      process 1                              each microbatch
    first(ids) -> State            second(State) -> Output
      flatten ── tensors ────────> unflatten                              forward
      backward <── gradients ────  backward                               backward
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from yobx_flatten import leaves
from yobx_flatten.private_names.of_torch import default_store, pytree

from ...batch.entries import check_call
from ...batch.joining import join
from ...batch.splitting import Microbatch, split
from ...errors import ConfigError, DistributedError, LossError, SplitError, format_failure, ranks_gone
from ..ranks.alarm import Alarm
from ..ranks.ranks import job_timeout
from .boundaries import Boundary, TensorSizes, agree, call_without_data, share


class DistributedPipeline:
    """Train a model whose layers are spread over processes, by a schedule of ``torch.distributed.pipelining``.

    Every process makes it with its own stages, at the same time. What crosses from stage to stage is found out once,
    here: each stage is called on tensors without data, and the structure of its output, static parts included, is sent
    to the next one. Afterwards only tensors travel.

    Args:
        stages: modules of this process by the number of their stage, from 0; a module may be a ``RoundPipe``.
        schedule: class of the schedule: ``ScheduleGPipe``, ``Schedule1F1B``, or one of several stages per process, like
            ``ScheduleInterleaved1F1B``.
        num_microbatch: number of microbatches of every batch.
        loss_fn: ``loss_fn(outputs, labels)`` of a microbatch, a tensor; given in every process. Default: the outputs
            are the loss.
        loss_reduction: how the losses of microbatches become that of the batch: ``"mean"`` where each is a mean over
            its rows, ``"sum"`` where they are added. Needed for :meth:`forward_backward` with several microbatches.
        example_args: positional arguments of a batch, in the process of stage 0; only classes and sizes count.
        example_kwargs: keyword arguments of a batch that the stages of this process get.
        example_outputs: output of one microbatch by stage, for a module that cannot be called on tensors without data.
        split_input: rule for splitting arguments, see :func:`roundpipe_runtime.batch.split`.
        split_label: rule for splitting labels.
        merge_output: rule for joining outputs, see :func:`roundpipe_runtime.batch.join`.
        group: group of the processes. Default: all of them.
        device: device of what is sent. Default: the CPU.

    Attributes:
        schedule: schedule of torch.
        stages: its stages in this process.

    Raises:
        ConfigError: stages are missing, or processes disagree.
        StageError: a stage cannot be described, in this process or in another one.

    >>> from torch.distributed.pipelining import ScheduleGPipe
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = nn.Linear(3, 1)
    >>> pipeline = DistributedPipeline(
    ...     {0: model}, ScheduleGPipe, num_microbatch=2, loss_fn=nn.functional.mse_loss, loss_reduction="mean",
    ...     example_args=(torch.ones(4, 3),))
    >>> loss = pipeline.forward_backward((torch.ones(4, 3),), label=torch.ones(4, 1))
    >>> loss.shape, model.weight.grad.shape
    (torch.Size([]), torch.Size([1, 3]))
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Callable[..., Any],
        *,
        num_microbatch: int,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        loss_reduction: Literal["mean", "sum"] | None = None,
        example_args: tuple[Any, ...] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        example_outputs: Mapping[int, Any] | None = None,
        split_input: Any = None,
        split_label: Any = None,
        merge_output: Any = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if loss_reduction not in ("sum", "mean", None):
            raise ConfigError(f'loss_reduction must be "sum" or "mean", found {loss_reduction!r}.')
        self._group, self._device = group, torch.device(device)
        self._line = StageLine(group)
        self._num_microbatch = num_microbatch
        self._loss_fn, self._reduction = loss_fn, loss_reduction
        self._rules = {"split_input": split_input, "split_label": split_label}
        self._merge = merge_output
        count = self._check_stages(stages, schedule)
        self._sizes: dict[str, TensorSizes] | None = None

        @functools.cache
        def example() -> Microbatch:
            return self._split(example_args, example_kwargs or {}, None, what="The example")[0]

        boundaries = self._boundaries(stages, count, example, example_outputs or {})
        self._sizes = _sizes(example())
        around = [None, *boundaries, None]  # nothing crosses before the first stage and after the last
        self._modules = {
            stage: StageModule(module, stage, *around[stage : stage + 2]) for stage, module in sorted(stages.items())
        }
        self._make = functools.partial(self._make_schedule, schedule, count)
        self.stages, self.schedule = self._make()

    # -- running -----------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        return_outputs: bool = False,
    ) -> Any:
        """Run forward, loss and backward of a batch; every process calls it.

        Args:
            input_args: positional arguments, in the process of stage 0.
            input_kwargs: keyword arguments that the stages of this process get.
            label: labels, in the process of the last stage.
            return_outputs: whether to also return the outputs, joined and detached.

        Returns:
            In the process of the last stage the loss of the batch, detached, or ``(loss, outputs)``; elsewhere
            ``None``.

        Raises:
            SplitError: arguments or labels cannot be split into microbatches of the agreed size.
            StageError: a stage returned other shapes or dtypes than at the first call.
            LossError: the loss is not a number in a tensor.
            ConfigError: ``loss_reduction`` was not given, and there are several microbatches.
            DistributedError: a stage of another process has failed, or its process is gone. Gradients of this batch may
                be there in part.
        """
        if self._reduction is None and self._num_microbatch > 1:
            raise ConfigError(
                "loss_reduction= was not given. If loss_fn returns a mean, the sum over microbatches is "
                f"{self._num_microbatch} times too large. State what loss_fn returns:\n"
                '    DistributedPipeline(..., loss_reduction="mean")    # or "sum"'
            )
        losses: list[torch.Tensor] = []
        with self._together():
            args, kwargs = check_call(input_args, input_kwargs)
            last = self._prepare(args, kwargs, label, self._loss, keeps=return_outputs)
            self._run(self.schedule.step, losses=losses)
        if last is None:
            return None
        loss = torch.stack([loss.detach() for loss in losses]).sum()
        return (loss, self._joined(last)) if return_outputs else loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch forward without gradients; every process calls it.

        Args:
            *args: positional arguments, in the process of stage 0.
            **kwargs: keyword arguments that the stages of this process get.

        Returns:
            In the process of the last stage the outputs, joined; elsewhere ``None``.
        """
        with self._together(), torch.no_grad():
            last = self._prepare(args, kwargs, None, None, keeps=True)
            self._run(self.schedule.eval)
        return None if last is None else self._joined(last)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Run a collective call: when one process fails, the others get an error instead of waiting for it."""
        if not self._line.is_open:  # the last call has failed, in all of them
            self._line.open()
            self.stages, self.schedule = self._make()
        with self._line.watched(self._forget):
            yield

    def _forget(self) -> None:
        """Drop the stages of torch, which hold the connections."""
        for stage in self.stages:
            stage.group = None
        self.stages, self.schedule = [], None

    def _prepare(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], label: Any, loss_fn: Any, *, keeps: bool
    ) -> StageModule | None:
        """Hand out the arguments of this process; return the last stage, if it is here."""
        if args and 0 not in self._modules:
            raise ConfigError(
                "Positional arguments go to stage 0, which runs in another process. Here, pass keyword arguments for "
                "the stages of this process, or none:\n    pipeline.forward_backward(label=labels)"
            )
        calls = self._split(args, kwargs, label, what="The batch")
        last = None
        for module in self._modules.values():
            module.calls = calls
            if module.returned is None:
                last = module
                module.loss_fn, module.outputs = loss_fn, [] if keeps else None
        return last

    def _run(self, run: Callable[..., Any], **options: Any) -> None:
        # torch splits the indices of the microbatches, and each stage looks its arguments up by index
        numbers = torch.arange(self._num_microbatch)
        try:
            run(microbatch=numbers, target=numbers, return_outputs=False, **options)
        except RuntimeError as error:
            # torch replaces an error of a forward by one that states sizes only
            if error.__cause__ is None or "failed to run forward" not in str(error):
                raise
            raise error.__cause__ from None

    def _joined(self, last: StageModule) -> Any:
        outputs, last.outputs = last.outputs or [], None
        return join(outputs, _rows(outputs, last.calls), merge=self._merge)

    def _loss(self, outputs: Any, call: Microbatch) -> torch.Tensor:
        """The part of a microbatch in the loss of the batch."""
        loss = outputs if self._loss_fn is None else self._loss_fn(outputs, call.label)
        if not (isinstance(loss, torch.Tensor) and loss.dim() == 0):
            raise LossError(
                f"The loss of microbatch {call.index} must be a 0-d tensor, found "
                f"{type(loss).__qualname__}{tuple(loss.shape) if isinstance(loss, torch.Tensor) else ''}. Sum it, or "
                "take the mean:\n"
                "    loss_fn=lambda outputs, labels: nn.functional.cross_entropy(outputs.logits, labels)"
            )
        return loss / self._num_microbatch if self._reduction == "mean" else loss

    # -- making ------------------------------------------------------------------------------------------------------

    def _check_stages(self, stages: Mapping[int, nn.Module], schedule: Any) -> int:
        """Check that all processes together have each stage once; return how many there are."""
        name = getattr(schedule, "__name__", str(schedule))
        found = share((sorted(stages), name, self._num_microbatch, self._reduction, self._loss_fn is None), self._group)
        numbers = [stage for one in found for stage in one[0]]
        if not stages or sorted(numbers) != list(range(len(numbers))):
            raise ConfigError(
                "The processes have the stages "
                + ", ".join(f"{one[0]} (rank {rank})" for rank, one in enumerate(found))
                + ". Each number, counted from 0, must be in one of them, and each process needs at least one:\n"
                "    DistributedPipeline({dist.get_rank(): module}, ...)"
            )
        if any(one[1:] != found[0][1:] for one in found):
            stated = "\n".join(
                f"    rank {rank}: {one[1]}, num_microbatch={one[2]}, loss_reduction={one[3]!r}, "
                f"{'no loss_fn' if one[4] else 'loss_fn'}"
                for rank, one in enumerate(found)
            )
            raise ConfigError(f"The processes disagree on the pipeline:\n{stated}")
        return len(numbers)

    def _boundaries(
        self, stages: Mapping[int, nn.Module], count: int, example: Callable[[], Microbatch], outputs: Mapping[int, Any]
    ) -> list[Boundary]:
        def describe(stage: int, received: Boundary | None) -> Boundary:
            what = f"Stage {stage}, a {type(stages[stage]).__qualname__},"
            if stage in outputs:
                return Boundary.of(outputs[stage], what=f"example_outputs[{stage}]")
            arrived = tuple(sizes.empty(self._device) for sizes in received.tensors) if received else ()
            args = arguments(received, arrived, example().args)
            made = call_without_data(stages[stage], args, example().kwargs, what=what)
            return Boundary.of(made, what=f"The output of stage {stage}")

        mine = {stage: functools.partial(describe, stage) for stage in stages}
        return agree(count, mine, self._group)

    def _make_schedule(self, schedule: Callable[..., Any], count: int) -> tuple[list[PipelineStage], Any]:
        """The schedule of torch with its stages, which a call that failed leaves in the middle of a batch."""
        stages = [self._stage(module, count) for module in self._modules.values()]
        is_single = isinstance(schedule, type) and issubclass(schedule, PipelineScheduleSingle)
        # gradients are sums, of losses that are shares of a mean if a mean is requested
        made = schedule(
            stages[0] if is_single else stages, self._num_microbatch, loss_fn=_returned_loss, scale_grads=False
        )
        return stages, made

    def _stage(self, module: StageModule, count: int) -> PipelineStage:
        def empty(boundary: Boundary) -> tuple[torch.Tensor, ...]:
            return tuple(sizes.empty("meta") for sizes in boundary.tensors)

        loss = (torch.zeros((), device="meta"),)
        return PipelineStage(
            module,
            module.stage,
            count,
            self._device,
            input_args=empty(module.received) if module.received else (),
            output_args=empty(module.returned) if module.returned else loss,
            group=self._line.group,
        )

    def _split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], label: Any, *, what: str) -> list[Microbatch]:
        """Split the arguments of this process; a process in the middle may have none."""
        if not args and not kwargs and label is None:
            return [Microbatch(index, (), {}, None, None) for index in range(self._num_microbatch)]
        parts = split(args, kwargs, label, self._num_microbatch, **self._rules)
        if len(parts) != self._num_microbatch:
            raise SplitError(
                f"{what} makes {len(parts)} microbatches, and the schedule runs {self._num_microbatch}. Give at least "
                "as many rows as there are microbatches."
            )
        agreed = _sizes(parts[0]) if self._sizes is None else self._sizes
        for part in parts:
            if (found := _sizes(part)) != agreed:
                raise SplitError(_different(part.index, found, agreed))
        return parts


def _returned_loss(stage_output: Any, number: torch.Tensor) -> torch.Tensor:
    """The loss for torch's schedule: the last stage has computed it."""
    loss: torch.Tensor = stage_output[0] if isinstance(stage_output, tuple) else stage_output
    return loss


def _sizes(part: Microbatch) -> dict[str, TensorSizes]:
    named = [*leaves(part.args, name="args"), *leaves(part.kwargs, name="kwargs")]
    return {leaf.path: TensorSizes.of(leaf.value) for leaf in named if isinstance(leaf.value, torch.Tensor)}


def _different(index: int, found: Mapping[str, TensorSizes], agreed: Mapping[str, TensorSizes]) -> str:
    path = next(path for path in [*found, *agreed] if found.get(path) != agreed.get(path))
    return (
        f"{path} is {found.get(path, 'missing')} in microbatch {index}, and {agreed.get(path, 'missing')} in the "
        "example that the stages were made with. All microbatches between processes have one size: drop or pad the "
        "last rows, or make the pipeline with an example of this size:\n"
        "    DistributedPipeline(..., example_args=(...), example_kwargs={...})"
    )


def _rows(outputs: Sequence[Any], calls: Sequence[Microbatch]) -> list[int | None]:
    """Rows of each microbatch: if this process only got labels, or nothing, they are counted in the outputs."""
    known = [call.rows for call in calls]
    if None not in known:
        return known
    counts = [
        {leaf.value.shape[0] for leaf in leaves(output) if isinstance(leaf.value, torch.Tensor) and leaf.value.dim()}
        for output in outputs
    ]
    return [count.pop() if len(count) == 1 else None for count in counts]


# Send data between stages in several processes, and wake waiting stages when one fails.


class StageLine:
    """The process group of a pipeline's stages; creating it is a collective call."""

    # is_open: whether messages can be sent; after a failure, `open` must be called

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._size = dist.get_world_size(group)
        self._members = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
        self._backend = dist.get_backend(group)
        self.group, self.is_open = group, False
        self.open()

    def open(self) -> None:
        """Open connections of the stages; all processes call it."""
        self.is_open = True
        rank, store = dist.get_rank(), None
        prefix = ""
        if self._size > 1:
            is_part = self._size < dist.get_world_size()
            self.group = dist.new_group(
                self._members, timeout=job_timeout(), backend=self._backend, use_local_synchronization=is_part
            )
            store, prefix = default_store(), self.group.group_name
        self._alarm = Alarm(store, self._members.index(rank), self._size, prefix=prefix)

    @contextlib.contextmanager
    def watched(self, forget: Callable[[], None]) -> Iterator[None]:
        """Run a call of all processes."""
        # forget: function that drops what holds the group, when a process has failed
        try:
            yield
        except BaseException as error:  # another error replaces it if another process failed first
            if self._size == 1:
                raise
            self.is_open = False
            found = self._error_of_others(error)
            if found is None:
                with contextlib.suppress(RuntimeError):  # the store is gone
                    self._alarm.notify_step_failed(format_failure(error))
            forget()
            self._close(error)
            if found is None:
                raise
            raise found from None

    def _error_of_others(self, error: BaseException) -> DistributedError | None:
        """The error to raise if another process has failed; ``None`` if this one has."""
        is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
        if not is_gloo and not isinstance(error, dist.DistError):
            return None
        if (failure := self._alarm.take_step_failure()) is not None:
            rank, text = failure
            return DistributedError(
                f"Rank {rank} failed, and gradients of this batch may be there in part: clear them before the next. "
                "There:\n" + "\n".join(f"    {line}" for line in text.splitlines())
            )
        gone = self._alarm.find_gone()
        return ranks_gone(gone, error, max(map(self._alarm.seconds_stopped, gone), default=0.0))

    def _close(self, error: BaseException) -> None:
        """Close the connections, which ends the waits of the other processes."""
        self._alarm.close()
        _release_frames(error)
        group, self.group = self.group, None
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)


def _release_frames(error: BaseException | None) -> None:
    """Clear the local variables of torch's schedule: pending messages keep connections open."""
    seen: set[int] = set()  # an error whose cause was raised in its place is in a circle with it
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback = error.__traceback__
        while traceback is not None:
            if str(traceback.tb_frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
                with contextlib.suppress(RuntimeError):  # of a frame that still runs
                    traceback.tb_frame.clear()
            traceback = traceback.tb_next
        error = error.__cause__ or error.__context__


# Wrap a module for ``torch.distributed.pipelining``, whose stages pass tensors only.


class StageModule(nn.Module):
    """Call a module with objects that are rebuilt from tensors, and return the tensors of its output."""

    # received: output of the previous stage; `None` for the first stage
    # returned: output of this stage; `None` for the last stage, whose only result is the loss
    # loss_fn: loss of the last stage's output for a microbatch; `None` without a loss
    # outputs: output of the last stage by microbatch, detached; `None` if not requested

    def __init__(self, module: nn.Module, stage: int, received: Boundary | None, returned: Boundary | None) -> None:
        super().__init__()
        self.module = module
        self.stage = stage
        self.received = received
        self.returned = returned
        self.calls: Sequence[Microbatch] = ()
        self.loss_fn: Callable[[Any, Microbatch], torch.Tensor] | None = None
        self.outputs: list[Any] | None = None

    def forward(self, *tensors: torch.Tensor, microbatch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run a microbatch."""
        # microbatch: number of the microbatch, as a tensor, which torch hands to each stage in its part
        number = int(microbatch)
        call = self.calls[number]
        value = self.module(*arguments(self.received, tensors, call.args), **call.kwargs)
        if self.returned is not None:
            what = f"The output of stage {self.stage} for microbatch {number}"
            return tuple(self.returned.check(value, what=what, with_gradients=torch.is_grad_enabled()))
        if self.outputs is not None:
            self.outputs.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value))
        return (torch.zeros(()) if self.loss_fn is None else self.loss_fn(value, call),)


def arguments(received: Boundary | None, tensors: tuple[torch.Tensor, ...], own: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the positional arguments of a stage: the caller's for the first stage, otherwise the received ones.

    A tuple arrives as several arguments, anything else as one.
    """
    if received is None:
        return own
    value = received.structure.rebuild(tensors)
    return value if type(value) is tuple else (value,)
