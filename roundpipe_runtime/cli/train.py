"""``roundpipe train``: train, save the model, and compare the saved model with the trained one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import typer
from torch import nn

from yobx_flatten.core.terminal.command_line import UserError, console, printable, say, say_json
from yobx_flatten.errors.failures import format_bytes, raised_as

from .. import fine_tune as tuning
from ..device.composite import is_composite, stored_bytes
from ..device.disk import HOST_IN_MEMORY
from ..distributed.ranks.alarm import Alarm
from ..errors import PlanError, RoundPipeError
from ..fine_tune import ChatRows, EvalRecord, ModelSource, Rows, StepRecord, Tokenizer, Training
from ..huggingface.quantize import count_weights
from . import train_options
from .option_objects import takes_options
from .train_options import FileOptions, LearningOptions, ModelOptions, StepOptions, TextOptions


@takes_options(what=ModelOptions, data=TextOptions, step=StepOptions, learning=LearningOptions, files=FileOptions)
def train(
    context: typer.Context,
    *,
    what: ModelOptions,
    data: TextOptions,
    step: StepOptions,
    learning: LearningOptions,
    files: FileOptions,
) -> int:
    """Train a language model on text or conversations, with only as many layers on a device at a time as fit.

    Results match training without a pipeline. Ctrl-C finishes the current step, writes a checkpoint, and prints the
    command that resumes the training. The resumed training has bitwise identical results. Under torchrun, all processes
    train one model; after a restart the processes resume by themselves.

    Exit status: 0 trained, saved, and loaded again as a check; 2 an error; 130 Ctrl-C; 143 SIGTERM.
    """
    if what.print_config:
        parts = {"Model": what, "Text": data, "A step": step, "Learning": learning, "What is written": files}
        say(train_options.format_config(parts.items()))
        return 0
    Alarm.patience = files.timeout
    stdout, job = sys.stdout, tuning.Job()
    if step.host != HOST_IN_MEMORY and (job.size > 1 or step.replicas is not None):
        raise UserError(f"--host {step.host} works only in one process. Leave --replicas out, or use --host memory")
    if what.json and job.is_first:
        context.with_resource(contextlib.redirect_stdout(sys.stderr))
    if job.was_restarted():  # existing files are those of this run
        files = dataclasses.replace(files, resume=True, overwrite=True)
    job.together(lambda: files.check(what.folder) if job.is_first else None)
    replicas = step.replicas
    if files.resume and replicas is None and job.size == 1:
        replicas = tuning.stored_replicas(files.checkpoints(what.folder))
    settings = train_options.settings_of(step, learning, replicas, files.report_to)
    pupil = _prepared(context, job, what, data, step, learning)
    steps = settings.total_steps(len(pupil.rows.training))
    kept = int(files.writes_last) if files.every is None else min(files.keep + 1, steps // files.every)
    places = what.folder, files.checkpoints(what.folder)
    job.together(lambda: tuning.check_disk(pupil.model, settings, *places, kept=kept))
    given = {**vars(data), **vars(step), **vars(learning), "files": [*(data.chat or data.text or []), *what.more_text]}

    def naming_memory(error: Exception) -> Exception | None:
        if not isinstance(error, PlanError) or step.memory is None:
            return None
        lacks = str(error).partition(". Cut the layer")[0]
        return UserError(
            f"--memory {step.memory} is too little: {lacks}. Raise --memory; see a model's needs: roundpipe plan MODEL"
        )

    with contextlib.ExitStack() as stack:
        if job.size > 1:  # errors name rank, stage and layer
            stack.enter_context(raised_as(partial(tuning.named_error, job.rank), RoundPipeError))
        stack.enter_context(raised_as(naming_memory))
        training = stack.enter_context(tuning.Training(pupil.model, pupil.rows, settings))
        outcome = _run(training, pupil, what.folder, files, given)
    _say_end(training, outcome, what, files, context.obj)
    if what.json and job.is_first:
        with contextlib.redirect_stdout(stdout):
            say_json(_summary(training, outcome, pupil, what.folder))
    return outcome.status


@dataclasses.dataclass(frozen=True)
class _Pupil:
    source: ModelSource
    model: nn.Module
    tokenizer: Tokenizer
    rows: Rows


def _prepared(
    context: typer.Context,
    job: tuning.Job,
    what: ModelOptions,
    data: TextOptions,
    step: StepOptions,
    learning: LearningOptions,
) -> _Pupil:
    def read() -> tuple[ModelSource, tuning.Lora | None, Tokenizer, Rows]:
        source = dataclasses.replace(train_options.source_of(what.name), unmatched_weights=step.unmatched_weights)
        if not source.has_weights and learning.lora is not None:
            raise UserError(
                f"{source.name} has random weights, on which LoRA adapters are useless. Name a folder with weights, "
                "or leave --lora out"
            )
        if not source.has_weights and learning.quantize_aware != "none":
            raise UserError(
                f"{source.name} has random weights, and --quantize-aware does not train the embedding, which would "
                "stay random. Name a folder with weights, or leave --quantize-aware out"
            )
        adapters = None if learning.lora is None else tuning.Lora.parse(learning.lora)
        tokenizer = tuning.load_tokenizer(source, data.tokenizer)
        source = train_options.read_by(source, tokenizer)
        split: Any = {"eval_share": data.eval_share, "seed": learning.seed, "vocab_size": source.vocab_size}
        split["length"] = train_options.row_length(source, data.length)
        names = [*(data.chat or data.text or []), *what.more_text]
        if not data.chat:
            return source, adapters, tokenizer, tuning.read_blocks(names, tokenizer, field=data.field, **split)
        split |= {"template": data.chat_template, "ignored": (data.ignore_fields or "").split(",")}
        return source, adapters, tokenizer, tuning.read_chats(names, tokenizer, packed=data.pack, **split)

    source, adapters, tokenizer, rows = job.together(read)
    say(_described(rows, tokenizer))
    if isinstance(rows, ChatRows):
        show_rows(rows, tokenizer, data.show_rows)
    # no progress bars and tables of transformers, since the command prints errors in one line
    from transformers.utils import logging

    context.call_on_close(partial(logging.set_verbosity, logging.get_verbosity()))
    if logging.is_progress_bar_enabled():
        context.call_on_close(logging.enable_progress_bar)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = job.together(lambda: _learner(source, adapters, step, learning))
    say(format_model(model, source))
    return _Pupil(source, model, tokenizer, rows)


def _run(
    training: Training, pupil: _Pupil, output: pathlib.Path, files: FileOptions, given: Mapping[str, Any]
) -> tuning.Outcome:
    from tqdm.auto import tqdm
    from transformers import ProgressCallback

    job, checkpoints = training.job, files.checkpoints(output)
    if files.resume:
        is_there = training.restore(checkpoints)
        say(f"continuing after step {training.step}" if is_there else f"no checkpoint in {checkpoints} yet")
    say(format_training(training))
    if job.is_first and sys.stderr.isatty():

        class Bar(ProgressCallback):  # type: ignore[misc] # transformers counts as untyped
            def on_log(self, *args: Any, **options: Any) -> None:
                """Print nothing, because ``show`` already prints a line about the step."""

        training.trainer.add_callback(Bar())
    always, log_every = (training.step + 1, training.steps), files.log_every or max(1, min(100, training.steps // 20))

    def show(record: StepRecord | EvalRecord) -> None:
        if isinstance(record, EvalRecord) or record.step in always or record.step % log_every == 0:
            with tqdm.external_write_mode():  # the bar is drawn below the line
                say(_line(record, training.steps))

    def write() -> None:
        if job.is_first:
            saving: dict[str, Any] = {"source": pupil.source, "overwrite": files.overwrite}
            tuning.save_model(pupil.model, pupil.tokenizer, output, card=_card(training, pupil, given), **saving)

    def save() -> None:
        training.pipeline.synchronize()
        with training.first_dtypes():
            job.together(write)

    outcome = tuning.run(
        training,
        checkpoints=checkpoints,
        every=files.every,
        keep=files.keep,
        at_end=files.writes_last,
        metrics=files.metrics,
        timeline=files.timeline,
        show=show,
        save_model=save,
    )

    def finish() -> None:
        if job.is_first and not outcome.status:
            tuning.replace_card(output, _card(training, pupil, given))  # now with the last evaluation
        if job.is_first and files.plot is not None:
            tuning.save_curve(training.history, files.plot)

    job.together(finish)
    return outcome


def _card(training: Training, pupil: _Pupil, given: Mapping[str, Any]) -> str:
    data = _described(pupil.rows, pupil.tokenizer)
    # readers of the card do not have this path
    data = data.replace(pupil.tokenizer.name, pathlib.Path(pupil.tokenizer.name).name)
    names = ", ".join(pathlib.Path(name).name for name in given["files"])
    return tuning.model_card(
        pupil.source,
        training.history,
        data=f"{names}\n\n{data}\n\nDigest of the rows: `{pupil.rows.digest[:16]}`",
        options={name: value for name, value in given.items() if name not in _NOT_ON_CARD},
        is_adapter=given["lora"] is not None and given["quantize_aware"] == "none",
    )


def _say_end(training: Training, outcome: tuning.Outcome, what: ModelOptions, files: FileOptions, argv: Any) -> None:
    if outcome.status:
        say(f"stopped after step {training.step} of {training.steps}, saved in {outcome.checkpoint}. To continue:")
        words = [word for word in argv or ["train", "..."] if word != "--resume"]
        size = training.job.size
        starts = ["roundpipe"] if size == 1 else ["torchrun", f"--nproc-per-node={size}", "-m", "roundpipe_runtime"]
        say(f"    {shlex.join([*starts, *words, '--resume'])}")
        return
    say(f"saved in {what.folder}; the saved weights were loaded and compared")
    losses = [record.loss for record in training.history if isinstance(record, StepRecord)]
    if files.plot is not None and losses:
        say(f"losses: {losses[0]:.4f} to {losses[-1]:.4f}, drawn into {files.plot}")
    if files.timeline is not None:
        names = [str(tuning.timeline_of_rank(files.timeline, rank)) for rank in range(training.job.size)]
        say(f"step {outcome.recorded}:  roundpipe timeline {shlex.join(names)}")


def _summary(training: Training, outcome: tuning.Outcome, pupil: _Pupil, output: pathlib.Path) -> dict[str, Any]:
    last: dict[type, Any] = {type(record): dataclasses.asdict(record) for record in training.history}
    return {
        "model": pupil.source.name,
        "random_weights": not pupil.source.has_weights,
        "path": None if outcome.status else str(output),
        "status": outcome.status,
        "step": training.step,
        "steps": training.steps,
        "checkpoint": outcome.checkpoint,
        "last_step": last.get(StepRecord),
        "last_evaluation": last.get(EvalRecord),
    }


# Paths, and options that only change the output.
_NOT_ON_CARD = ("text", "chat", "files", "tokenizer", "chat_template", "show_rows")


def _learner(
    source: ModelSource, adapters: tuning.Lora | None, step: StepOptions, learning: LearningOptions
) -> nn.Module:
    quantize, aware = None if learning.quantize == "none" else learning.quantize, learning.quantize_aware
    dtype = train_options.dtype_named("float32" if aware != "none" and step.dtype == "auto" else step.dtype)
    learner = source.load(dtype=dtype, seed=learning.seed, quantize=quantize, host=step.host)
    if aware != "none":
        return tuning.quantize_aware(learner, aware, lora=adapters, seed=learning.seed)
    return learner if adapters is None else tuning.add_lora(learner, adapters, seed=learning.seed)


def _line(record: StepRecord | EvalRecord, steps: int) -> str:
    place = f"step {record.step}/{steps}  "
    if isinstance(record, EvalRecord):
        return f"{place}held-out loss {record.eval_loss:.4f}"
    memory = [] if record.process_bytes is None else [format_bytes(record.process_bytes)]
    memory += [] if record.device_bytes is None else [f"device {format_bytes(record.device_bytes)}"]
    words = [f"loss {record.loss:.4f}", f"{record.tokens_per_s:,.0f} tokens/s", ", ".join(memory)]
    words += [f"lr {record.lr:.2e}", *([] if record.grad_norm is None else [f"gradient {record.grad_norm:.3g}"])]
    return place + "  ".join(words)


def _described(rows: Rows, tokenizer: Tokenizer) -> str:
    if not isinstance(rows, ChatRows):
        count, held_out = len(rows.tokens), len(rows.held_out)
        read = "bytes" if tokenizer.name == "bytes" else f"tokens of {tokenizer.name}"
        total = count * rows.length + rows.left_over
        return f"text: {total:,} {read}, {count:,} rows of {rows.length}; {held_out:,} rows are held out"
    total, packed = rows.tokens_in(range(len(rows))), f" in {len(rows):,} rows" if rows.positions else ""
    notes = [f"held out: {len(rows.held_out):,}"]
    if rows.cut:
        notes.append(f"{rows.cut:,} were cut to {rows.length} tokens")
    if rows.left_out:
        notes.append(f"{rows.left_out:,} more have no answer in their first {rows.length} tokens and are left out")
    return (
        f"chat: {rows.conversations:,} conversations{packed}, {total:,} tokens of {tokenizer.name}, of which "
        f"{rows.counted:,} count; " + "; ".join(notes)
    )


def show_rows(rows: ChatRows, tokenizer: Tokenizer, count: int) -> None:
    """Show the first training rows as the model sees them: trained tokens are green, or between « and »."""
    from rich.text import Text

    shown_on = console()
    has_colour = shown_on.is_terminal and not shown_on.no_color
    for row in rows.training[:count].tolist():
        text = Text()
        pairs = zip(rows.ids[row].tolist(), rows.labels[row].tolist(), strict=True)
        for counts, run in itertools.groupby(pairs, key=lambda pair: pair[1] == pair[0]):
            words = printable(tokenizer.decode([token for token, _ in run], special=True))
            text.append(words if has_colour or not counts else f"«{words}»", style="green" if counts else "dim")
        if has_colour:
            shown_on.print(text)
        else:
            say(text.plain.rstrip("\n"))


def format_model(model: nn.Module, source: ModelSource) -> str:
    parameters, total = list(model.parameters()), count_weights(model)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = [p for p in parameters if is_composite(p)]
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    some = "" if trainable == total else f", of which {trainable:,} are trainable"
    weights = "" if source.has_weights else " with random weights"
    packed = f"; linear layers are frozen in {format_bytes(sum(map(stored_bytes, frozen)))}" if frozen else ""
    return f"model: {source.name}{weights}, {total:,} parameters in {dtype}{some}{packed}"


def format_training(training: Training) -> str:
    report, settings, replicas = training.pipeline.cut.report, training.settings, training.pipeline.replicas
    proof = ""
    if report.equivalence is not None:
        proof = f"; its gradients differ from those of the reference model by {report.equivalence.gradients:.0e}"
    batches = f"{settings.accumulate} batches of " if settings.accumulate > 1 else ""
    groups = f"{replicas} groups of " if replicas > 1 else ""
    place = f"in {training.job.size} processes, each on" if training.job.size > 1 else "on"
    return (
        f"cut: {len(report.pieces)} pieces{proof}\n"
        f"steps: {training.steps:,} of {batches}{settings.batch} rows in {groups}{training.microbatches} microbatches "
        f"{place} {', '.join(device.name for device in training.pipeline.devices)}"
    )
