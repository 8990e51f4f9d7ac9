"""Train a causal language model on text through a pipeline, with AdamW on the host, a Trainer and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from yobx_flatten.errors import require
from yobx_flatten.errors.failures import result_or

from ..checkpoint import CheckpointError
from ..checkpoint.folder import step_of
from ..device.accelerator import parse_devices
from ..device.worker import on_error
from ..errors import ConfigError, FineTuneError
from ..huggingface.cutting.check import evaluating
from ..huggingface.wrap import WrappedModel, wrap_model_to_roundpipe
from .adapters import rounded_layers
from .data.chat_rows import ChatRows, Rows, check_packing
from .job import Interruption, Job
from .records import EvalRecord, MetricsFile, StepRecord, check_place, record_of
from .settings import Settings

if TYPE_CHECKING:  # the import of transformers takes seconds
    from .trainer import RunCallback

# Settings that may differ between processes.
_OF_PROCESS = ("devices", "keep_parameters", "host", "report_to")


class Training:
    """Fine-tunes a causal language model through a pipeline.

    ::

        with Training(model, blocks, Settings(batch=8, steps=100, devices="virtual:2")) as training:
            run(training, show=print)

    With the same rows, settings, and numbers of groups and microbatches, results are bitwise identical on any number of
    devices and processes. They are also bitwise identical if a training is continued with :meth:`save` and
    :meth:`restore`. Under torchrun, each process trains a part of each batch, and all processes call the same methods.

    Args:
        model: Hugging Face causal language model, or PEFT's wrapper of such a model. The model is trained in place.
        blocks: tokenized text from :func:`read_blocks`, or conversations from :func:`read_chats`.
        settings: settings of the training.

    Attributes:
        pipeline: wrapped model.
        optimizer: AdamW, on the host.
        trainer: Trainer that runs the steps.
        job: processes that train together.

    Raises:
        ConfigError: a device does not exist, or batches are split into fewer groups than there are processes.
        DistributedError: the processes have different texts, models or settings.
        FineTuneError: the model is not causal, or rows are longer than the model supports.
        MissingDependencyError: transformers or accelerate is not installed.
    """

    def __init__(self, model: nn.Module, blocks: Rows, settings: Settings) -> None:
        require("transformers", "accelerate", purpose="a training on text", extra="transformers,train")
        from transformers.integrations import get_reporting_integration_callbacks

        from .trainer import TextTrainer

        self.model = model
        self.settings = settings
        self.job = Job()
        self._has_groups = settings.replicas is not None or self.job.size > 1
        if isinstance(blocks, ChatRows) and self._has_groups:
            blocks = dataclasses.replace(blocks, pads_alike=True)
        self.blocks = blocks
        self.job.check_alike(self._stated())
        _check_groups(settings, self.job.size)
        try:
            for kind in get_reporting_integration_callbacks(list(settings.report_to)):
                kind()  # raises if its library is missing
        except (ImportError, RuntimeError, ValueError) as error:
            names, reason = " ".join(settings.report_to), " ".join(str(error).split())
            raise FineTuneError(f"--report-to {names}: {reason}") from error
        devices = parse_devices(settings.devices)
        if settings.check:
            self.job.together(lambda: _check_causal(model))
        if isinstance(blocks, ChatRows) and blocks.positions:
            self.job.together(lambda: check_packing(model))
        torch.manual_seed(settings.seed)
        self._dtypes = {parameter: parameter.dtype for parameter in model.parameters()}
        self.pipeline: WrappedModel = wrap_model_to_roundpipe(
            model,
            lower_threshold=0,
            name="train",
            check=settings.check,
            devices=devices,
            optim_dtype=settings.optim_dtype,
            mesh=self.job.mesh(),
            replicas=settings.replicas,
            large_tables=settings.large_tables,
            host=settings.host,
            update=settings.update,
        )
        self.optimizer = self._adamw()
        self.trainer = TextTrainer(self.pipeline, self.optimizer, blocks, settings, self.job)
        rows = settings.rows_of_group(self.pipeline.replicas)
        self.trainer.microbatches = self.job.exchange(settings.microbatches or min(len(devices) + 1, rows))[0]
        self._checkpoint: pathlib.Path | None = None  # the Trainer loads it when the training begins
        torch.manual_seed(settings.seed)  # the check may have drawn random numbers

    @property
    def step(self) -> int:
        """Number of optimizer steps done so far."""
        return int(self.trainer.state.global_step) if self._checkpoint is None else step_of(self._checkpoint)

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the whole training."""
        return int(self.trainer.args.max_steps)

    @property
    def microbatches(self) -> int | None:
        """Number of microbatches per batch."""
        return self.trainer.microbatches

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def train(self) -> None:
        """Train until the last step, or until a callback of ``trainer`` stops the training; see :func:`run`.

        Raises:
            FineTuneError: the loss or a gradient is not finite; the parameters are unchanged, except with
                ``update="in_backward"``. The error is also raised if an earlier ``train`` call was stopped.
        """
        found, self._checkpoint = self._checkpoint, None
        if found is None and self.step == self.steps:
            return
        if found is None and self.step:
            raise FineTuneError(
                f"This training was stopped after step {self.step}, and train() would begin at step 0 again. "
                "Continue from a checkpoint:\n    training = Training(...)\n    training.restore(folder)"
            )
        self.trainer.train(resume_from_checkpoint=None if found is None else os.fspath(found))

    @contextlib.contextmanager
    def first_dtypes(self) -> Iterator[None]:
        """Context manager for saving the model, in which parameters have their dtypes from before the training."""
        wide = {parameter: parameter.data for parameter, dtype in self._dtypes.items() if parameter.dtype != dtype}
        try:
            for parameter in wide:
                parameter.data = parameter.data.to(self._dtypes[parameter])
            yield
        finally:
            for parameter, data in wide.items():
                parameter.data = data

    @property
    def history(self) -> list[StepRecord | EvalRecord]:
        """Records of all steps and evaluations, including records from before :meth:`restore`."""
        found = (record_of(logs, logs["step"]) for logs in self.trainer.state.log_history)
        return [record for record in found if record is not None]

    def evaluate(self) -> EvalRecord:
        """Return the loss of the rows that are held out for evaluation."""
        record = record_of(self.trainer.evaluate(), self.step)
        assert isinstance(record, EvalRecord)
        return record

    def close(self) -> None:
        """End the threads of the pipeline. The model keeps the trained weights; the optimizer's state is discarded."""
        self.pipeline.synchronize()
        self.pipeline.close()
        self.optimizer.state.clear()

    def save(self, folder: str | os.PathLike[str], *, keep: int | None = 3) -> str:
        """Write a checkpoint, from which :meth:`restore` continues bitwise identically.

        Args:
            folder: folder of the checkpoints of this training.
            keep: number of checkpoints to keep; ``None`` keeps all.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: a value cannot be stored.
            OSError: the checkpoint could not be written.
        """
        self.save_into(folder, keep=keep)
        return self.trainer.save()

    def save_into(self, folder: str | os.PathLike[str], *, keep: int | None = 3) -> None:
        """Set the folder into which the Trainer writes its checkpoints.

        Args:
            folder: folder of the checkpoints of this training.
            keep: number of checkpoints to keep; ``None`` keeps all.

        Raises:
            FineTuneError: the folder cannot be written.
        """
        self.job.together(
            lambda: check_place(folder, "--checkpoint DIR", in_parent=False) if self.job.is_first else None
        )
        self.trainer.notes = {"same": self._same(), "replicas": self.pipeline.replicas}
        self.trainer.args.output_dir, self.trainer.args.save_total_limit = os.path.abspath(folder), keep

    def restore(self, folder: str | os.PathLike[str]) -> bool:
        """Continue from the last checkpoint, and return whether a checkpoint existed.

        Results are bitwise identical on any number of devices and processes if the numbers of groups and microbatches
        are equal to those of the checkpoint. Numbers that the settings do not contain are taken from the checkpoint.
        However, several processes take the number of groups only if each gets a group. A single process never takes it.

        Args:
            folder: folder that was passed to :meth:`save`.

        Raises:
            FineTuneError: the checkpoint was saved by a training with other text, batches, ``seed`` or ``update``, or
                more steps. In one process without ``Settings.replicas``, several groups are also an error.
            CheckpointError: the checkpoint is for a different model.
        """
        from ..huggingface.trainer.pipeline_trainer import newest_whole
        from .trainer import read_notes

        path = pathlib.Path(folder).absolute()
        found = self.job.exchange(self.job.together(lambda: newest_whole(path) if self.job.is_first else None))[0]
        if found is None:
            return False
        notes = self.job.together(lambda: read_notes(found))
        now, before = self._same(), {"update": "masters", **notes.get("same", {})}
        for name in [name for name in now if before.get(name) != now[name]]:
            if name == "model" and before.get(name) is not None:
                raise CheckpointError(
                    f"{os.fspath(folder)}: The checkpoint is for a different model. Names or shapes of weights differ."
                )
            option = f"another --{'chat' if name == 'text' and isinstance(self.blocks, ChatRows) else name}"
            if name in ("length", "batch", "accumulate", "seed", "update"):
                option = f"--{name} {before.get(name)}"
            raise FineTuneError(
                f"{os.fspath(folder)} was trained with {option}. Use the same value, or a new folder: --checkpoint DIR"
            )
        if step_of(found) > self.steps:
            raise FineTuneError(f"{folder} is at step {step_of(found)}, but --steps is only {self.steps}. Use more.")
        replicas = notes.get("replicas") or 1
        if self.settings.replicas is None and replicas not in (1, self.pipeline.replicas):
            if self.job.size == 1:
                raise FineTuneError(
                    f"{os.fspath(folder)} was trained with --replicas {replicas}. Another number would change the "
                    f"results. Continue with the same number: --replicas {replicas}"
                )
            self.pipeline._rp_keep_replicas(replicas)
        if self.settings.microbatches is None:
            self.trainer.microbatches = notes["microbatches"]
        self._checkpoint = found
        return True

    def _stated(self) -> dict[str, object]:
        settings = {field.name: getattr(self.settings, field.name) for field in dataclasses.fields(self.settings)}
        named = {name.replace("_", "-"): str(value) for name, value in settings.items() if name not in _OF_PROCESS}
        rows = f"{len(self.blocks):,} rows of {self.blocks.length} tokens, {self.blocks.digest[:8]}"
        return {**named, "the text": rows, "the model": _names_and_shapes(self.model)[:8]}

    def _same(self) -> dict[str, Any]:
        """Return the settings and digests that must be equal in a checkpoint from which this training continues."""
        return {
            "length": self.blocks.length,
            **{name: getattr(self.settings, name) for name in ("batch", "accumulate", "seed", "update")},
            "model": _names_and_shapes(self.model),
            "text": self.blocks.digest,
            "eval-share": len(self.blocks.held_out),
        }

    def _adamw(self) -> torch.optim.AdamW:
        trainable = [p for p in self.pipeline.optim_parameters() if p.requires_grad]
        decaying = [p for p in trainable if p.dim() > 1]
        others = [p for p in trainable if p.dim() <= 1]  # norms and biases
        groups: list[dict[str, Any]] = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((decaying, self.settings.weight_decay), (others, 0.0))
            if params
        ]
        # with groups of rows, the bits of the fused kernel must not depend on the number of processes
        is_fused = not self._has_groups or all(p.shape[1:].numel() % 64 == 0 for p in decaying)
        return torch.optim.AdamW(groups, lr=self.settings.lr, fused=is_fused)


def stored_replicas(folder: str | os.PathLike[str]) -> int | None:
    """Return the value of ``replicas`` in the newest checkpoint; ``None`` if batches were not split into groups.

    Args:
        folder: folder that was passed to :meth:`Training.save`.
    """
    from .trainer import read_notes

    there = sorted(pathlib.Path(folder).glob("checkpoint-*"), key=step_of)
    replicas = read_notes(there[-1]).get("replicas") if there else None
    return replicas if replicas and replicas > 1 else None


def _check_groups(settings: Settings, size: int) -> None:
    replicas = settings.replicas or size
    if settings.update != "masters" and (size > 1 or settings.replicas is not None):
        raise ConfigError(f"--update {settings.update} needs one process, without --replicas. Use: --update masters")
    if replicas < size:
        raise ConfigError(
            f"A batch is split into {replicas} groups, so some of the {size} processes would have nothing to do. "
            f"Start fewer processes, or use more groups: --replicas {size}"
        )
    if replicas > settings.batch:
        raise ConfigError(
            f"A batch of {settings.batch} rows leaves some of the {size} processes without rows. Start fewer "
            f"processes, or use a larger batch: --batch {size}"
        )


def _names_and_shapes(model: nn.Module) -> str:
    shapes = sorted(
        (name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in model.named_parameters()
    )
    grids = [(name, layer.grid) for name, layer in rounded_layers(model).items()]
    return hashlib.sha256(repr([*shapes, *grids]).encode()).hexdigest()


def _check_causal(model: nn.Module) -> None:
    """Refuse a model in which a token attends to later tokens, as in encoders."""
    one = torch.tensor([[3, 4, 5, 6]])
    other = torch.tensor([[3, 4, 5, 7]])
    with torch.no_grad(), evaluating(model):
        first, second = (model(input_ids=ids).logits[:, :3] for ids in (one, other))
    # a different token changes the routing to experts, and thereby the rounding of the other tokens
    rounding = 1e-4 if first.dtype == torch.float32 else 2e-2
    if (first - second).float().norm() > rounding * first.float().norm():
        raise FineTuneError(
            f"{type(model).__name__} sees the token that it should predict, so it cannot learn text this way. If the "
            'model is an encoder, set "is_decoder": true in config.json'
        )


_RECORDED_STEP = 5  # the first steps measure the cost of each layer; then the plan is fixed


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result of :func:`run`: exit status, last checkpoint, and number of the step whose timeline was recorded.

    Attributes:
        status: exit status: 0 for a complete training, 130 after Ctrl-C, 143 after SIGTERM.
        checkpoint: last checkpoint that was written.
        recorded: number of the step that the timeline records. An interrupted training may not have run this step.
    """

    status: int
    checkpoint: str | None
    recorded: int | None


def run(
    training: Training,
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    every: int | None = None,
    keep: int | None = 3,
    at_end: bool = False,
    metrics: str | os.PathLike[str] | None = None,
    timeline: str | os.PathLike[str] | None = None,
    show: Callable[[StepRecord | EvalRecord], None] = lambda record: None,
    save_model: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run all remaining steps of a training.

    After an error, the completed steps are saved in a checkpoint, and a note of the error names the checkpoint. After
    an error in the middle of an optimizer step, no checkpoint is saved. After Ctrl-C or SIGTERM, the current step and
    its evaluation are completed, and a checkpoint is written. A training that continues from this checkpoint gives
    bitwise identical results. A second signal ends the process at once. If there are several processes, only the first
    process writes metrics, and each process writes a timeline.

    Args:
        training: training to run, which continues from a checkpoint after :meth:`Training.restore`.
        checkpoints: folder of the checkpoints (default: no checkpoint is written).
        every: steps between two checkpoints; ``None`` writes a checkpoint only when the training is stopped.
        keep: number of checkpoints to keep; ``None`` keeps all.
        at_end: whether to write a checkpoint after the last step.
        metrics: file with a line of JSON per step and evaluation. After a restore, lines of completed steps are kept.
        timeline: file for the timeline of one step. For ``step.json``, process 2 writes ``step.2.json``.
        show: function that is called with the record of each step and evaluation, in each process.
        save_model: function that saves the model, called in each process right after the last step.

    Returns:
        The exit status, the last checkpoint, and the number of the step whose timeline was recorded.

    Raises:
        FineTuneError: the training cannot continue.
        OSError: a file could not be written.
    """
    from .trainer import RunCallback

    if checkpoints is not None:
        training.save_into(checkpoints, keep=keep)
    job, step = training.job, training.step
    with Interruption(is_silent=job.size > 1) as interruption, contextlib.ExitStack() as stack:
        file: MetricsFile | None = None
        if metrics is not None:
            file = job.together(lambda: MetricsFile(metrics, step=step) if job.is_first else None)
        if file is not None:
            stack.enter_context(file)

        def note(record: StepRecord | EvalRecord) -> None:
            if file is not None:
                file.write(record)
            show(record)

        callback = RunCallback(
            training.trainer,
            interruption,
            every=every if checkpoints is not None else None,
            at_end=at_end if checkpoints is not None else None,
            note=note,
            save_model=save_model,
            recorded=None if timeline is None else min(step + _RECORDED_STEP, training.steps),
            save_timeline=lambda drawn: drawn.save(timeline_of_rank(timeline or "", job.rank)),
        )
        training.trainer.add_callback(callback)
        stack.callback(training.trainer.remove_callback, callback)
        stack.enter_context(callback.recording)
        _train(training, callback, has_checkpoints=checkpoints is not None)
    return Outcome(callback.status, callback.saved, callback.recorded)


def _train(training: Training, callback: RunCallback, *, has_checkpoints: bool) -> None:
    """Run a training, and save the completed steps after an error."""
    first, trainer = training.step, training.trainer

    def save() -> str:
        is_saved = callback.saved is not None and callback.saved.endswith(f"checkpoint-{training.step}")
        path = callback.saved if is_saved else trainer.save()
        return f"The first {training.step} steps are saved in {path}. To continue: --resume"

    def note_saved(error: BaseException) -> None:
        if not isinstance(error, Exception):
            return  # a second signal ends the process at once
        if callback.is_model_saved:
            error.add_note("The trained model is saved.")
        # other processes may have completed a step that failed here, and a step that began to write cannot be undone
        can_undo = training.job.size == 1 and training.settings.update != "in_backward"
        is_whole = not trainer.in_step or (can_undo and not trainer.is_stepping)
        if has_checkpoints and training.step > first and is_whole:
            failed = "The first {} steps could not be saved: {}"
            error.add_note(result_or(save, lambda reason: failed.format(training.step, reason)))

    with on_error(note_saved):
        training.train()
        if not callback.status and not callback.is_model_saved:  # an earlier run made the last step
            callback.save_model()


def timeline_of_rank(path: str | os.PathLike[str], rank: int) -> pathlib.Path:
    """Return the path of the file into which a process writes its timeline.

    Args:
        path: file for the timeline of the first process.
        rank: rank of the process.

    Returns:
        The path.

    >>> timeline_of_rank("runs/step.json", 2).as_posix()
    'runs/step.2.json'
    """
    first = pathlib.Path(path)
    return first.with_name(f"{first.stem}.{rank}{first.suffix}") if rank else first
