"""``roundpipe train``: train, save the model, and compare the saved model with the trained one."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import typer
from torch import nn

from yobx_flatten.errors.failures import raised_as
from yobx_flatten.terminal.failures import UserError
from yobx_flatten.terminal.output import say, say_json

from ... import fine_tune as tuning
from ...device.disk import HOST_IN_MEMORY
from ...distributed.ranks.alarm import Alarm
from ...errors import PlanError, RoundPipeError
from ..models import read_by, source_of
from ..option_objects import flat_options, takes_options
from .config_file import format_config
from .display import Display, format_chats, format_model, format_text, format_training, show_rows
from .options import (
    FileOptions,
    LearningOptions,
    ModelOptions,
    StepOptions,
    TextOptions,
    dtype_named,
    few_bits,
    settings_of,
)


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
    """Train a language model on text, with only as many layers on a device as fit.

    Results match training without a pipeline. Ctrl-C finishes the step, writes a checkpoint and prints the line that
    resumes from it, with bitwise identical results. Under torchrun, all processes train one model; after a restart they
    resume by themselves.

    Exit status: 0 trained, saved, and loaded again as a check; 2 the request cannot be served; 130 Ctrl-C; 143 SIGTERM.
    """
    if what.print_config:
        parts = {"Model": what, "Text": data, "A step": step, "Learning": learning, "What is written": files}
        say(format_config(parts.items()))
        return 0
    Alarm.patience = files.timeout
    stdout, job = sys.stdout, tuning.Job()
    if step.host != HOST_IN_MEMORY and (job.size > 1 or step.replicas is not None):
        raise UserError(
            f"--host {step.host} trains in one process, without groups. Start one, and leave --replicas out; or --host "
            "memory"
        )
    if what.json and job.is_first:
        context.with_resource(contextlib.redirect_stdout(sys.stderr))
    if job.was_restarted():  # what is there is this run's own
        files = dataclasses.replace(files, resume=True, overwrite=True)
    job.together(lambda: files.check(what.folder) if job.is_first else None)
    replicas = step.replicas
    if files.resume and replicas is None and job.size == 1:
        replicas = tuning.stored_replicas(files.checkpoints(what.folder))
    settings = settings_of(step, learning, replicas, files.report_to)
    pupil = _prepared(context, job, what, data, step, learning)
    job.together(lambda: _check_disk(pupil, settings, what.folder, files))
    seen: dict[type, tuning.StepRecord | tuning.EvalRecord] = {}
    given = {**flat_options(data, step, learning), "files": [*(data.chat or data.text or []), *what.more_text]}
    with _naming_rank(job), _naming_memory(step), tuning.Training(pupil.model, pupil.rows, settings) as training:
        outcome = _run(training, pupil, what.folder, files, seen, given)
    _say_end(training, outcome, what, files, context.obj)
    if what.json and job.is_first:
        with contextlib.redirect_stdout(stdout):
            say_json(_summary(training, outcome, pupil, what.folder, seen))
    return outcome.status


@dataclasses.dataclass(frozen=True)
class _Pupil:
    """A model that is going to be trained, with what it comes from and learns from."""

    source: tuning.ModelSource
    model: nn.Module
    tokenizer: tuning.Tokenizer
    rows: tuning.Blocks | tuning.ChatRows


def _prepared(
    context: typer.Context,
    job: tuning.Job,
    what: ModelOptions,
    data: TextOptions,
    step: StepOptions,
    learning: LearningOptions,
) -> _Pupil:
    """Read text and model, and say what they are; in all processes together."""

    def read() -> tuple[tuning.ModelSource, tuning.Lora | None, tuning.Tokenizer, tuning.Blocks | tuning.ChatRows]:
        source = dataclasses.replace(source_of(what.name), unmatched_weights=step.unmatched_weights)
        adapters = _adapters(learning.lora, source)
        tokenizer = tuning.load_tokenizer(source, data.tokenizer)
        source = read_by(source, tokenizer)
        return source, adapters, tokenizer, _rows(source, tokenizer, what, data, learning.seed)

    source, adapters, tokenizer, rows = job.together(read)
    say(_described(rows, tokenizer))
    if isinstance(rows, tuning.ChatRows):
        show_rows(rows, tokenizer, data.show_rows)
    context.with_resource(_quiet_transformers())
    model = job.together(lambda: _learner(source, adapters, step, learning))
    say(format_model(model, source))
    return _Pupil(source, model, tokenizer, rows)


def _rows(
    source: tuning.ModelSource, tokenizer: tuning.Tokenizer, what: ModelOptions, data: TextOptions, seed: int
) -> tuning.Blocks | tuning.ChatRows:
    length = _length(data.length, source)
    split: dict[str, Any] = {"eval_share": data.eval_share, "seed": seed, "vocab_size": source.vocab_size}
    names = [*(data.chat or data.text or []), *what.more_text]
    if data.chat:
        split |= {"template": data.chat_template, "ignored": (data.ignore_fields or "").split(",")}
        return tuning.read_chats(names, tokenizer, length=length, packed=data.pack, **split)
    return tuning.read_blocks(names, tokenizer, length=length, field=data.field, **split)


def _check_disk(pupil: _Pupil, settings: tuning.Settings, output: pathlib.Path, files: FileOptions) -> None:
    steps = settings.total_steps(len(pupil.rows.training))
    kept = int(files.writes_last) if files.every is None else min(files.keep + 1, steps // files.every)
    tuning.check_disk(pupil.model, settings, output, files.checkpoints(output), kept=kept)


def _run(
    training: tuning.Training,
    pupil: _Pupil,
    output: pathlib.Path,
    files: FileOptions,
    seen: dict[type, tuning.StepRecord | tuning.EvalRecord],
    given: Mapping[str, Any],
) -> tuning.Outcome:
    """Run all steps, show them, and save the model; the last record of each kind is in ``seen`` then."""
    job, checkpoints = training.job, files.checkpoints(output)
    if files.resume:
        is_there = training.restore(checkpoints)
        say(f"going on after step {training.step}" if is_there else f"no checkpoint in {checkpoints} yet")
    say(format_training(training))
    with Display(training.steps, first=training.step, log_every=files.log_every, is_shown=job.is_first) as display:

        def show(record: tuning.StepRecord | tuning.EvalRecord) -> None:
            seen[type(record)] = record
            display.show(record)

        def write() -> None:
            if job.is_first:
                saving: dict[str, Any] = {"source": pupil.source, "overwrite": files.overwrite}
                tuning.save_model(pupil.model, pupil.tokenizer, output, card=_card(training, pupil, given), **saving)

        def save() -> None:
            training.pipeline.synchronize()
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
            show_evaluation=display.show_evaluation,
            save_model=save,
        )

    def finish() -> None:
        if job.is_first and not outcome.status:
            tuning.replace_card(output, _card(training, pupil, given))  # now with the last evaluation
        if job.is_first and files.plot is not None:
            tuning.save_curve(training.history, files.plot)

    job.together(finish)
    return outcome


def _described(rows: tuning.Blocks | tuning.ChatRows, tokenizer: tuning.Tokenizer) -> str:
    return format_chats(rows, tokenizer) if isinstance(rows, tuning.ChatRows) else format_text(rows, tokenizer)


def _card(training: tuning.Training, pupil: _Pupil, given: Mapping[str, Any]) -> str:
    rows = pupil.rows
    data = _described(rows, pupil.tokenizer)
    # a path of this machine is of no use elsewhere
    data = data.replace(pupil.tokenizer.name, pathlib.Path(pupil.tokenizer.name).name)
    names = ", ".join(pathlib.Path(name).name for name in given["files"])
    options = {name: value for name, value in given.items() if name not in _NOT_ON_CARD}
    return tuning.model_card(
        pupil.source,
        training.history,
        data=f"{names}\n\n{data}\n\nDigest of the rows: `{rows.digest[:16]}`",
        options=options,
        is_adapter=given["lora"] is not None,
    )


def _say_end(
    training: tuning.Training, outcome: tuning.Outcome, what: ModelOptions, files: FileOptions, argv: Any
) -> None:
    if outcome.status:
        say(f"stopped after step {training.step} of {training.steps}, saved in {outcome.checkpoint}. To go on:")
        say(f"    {_to_go_on(argv, training.job)}")
        return
    say(f"saved in {what.folder}, loaded from there and compared")
    losses = [record.loss for record in training.history if isinstance(record, tuning.StepRecord)]
    if files.plot is not None and losses:
        say(f"losses: {tuning.sparkline(losses)} {losses[0]:.4f} to {losses[-1]:.4f}, drawn into {files.plot}")
    if files.timeline is not None:
        names = [str(tuning.timeline_of_rank(files.timeline, rank)) for rank in range(training.job.size)]
        say(f"step {outcome.recorded}:  roundpipe timeline {shlex.join(names)}")


def _summary(
    training: tuning.Training,
    outcome: tuning.Outcome,
    pupil: _Pupil,
    output: pathlib.Path,
    seen: dict[type, tuning.StepRecord | tuning.EvalRecord],
) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "model": pupil.source.name,
        "random_weights": not pupil.source.has_weights,
        "path": None if outcome.status else str(output),
        "status": outcome.status,
        "step": training.step,
        "steps": training.steps,
        "checkpoint": outcome.checkpoint,
        **{key: dataclasses.asdict(seen[kind]) if kind in seen else None for key, kind in _RECORDS.items()},
    }


# Paths, and what is only shown.
_NOT_ON_CARD = ("text", "chat", "files", "tokenizer", "chat_template", "show_rows")
_RECORDS = {"last_step": tuning.StepRecord, "last_evaluation": tuning.EvalRecord}


def _naming_rank(job: tuning.Job) -> contextlib.AbstractContextManager[None]:
    """A block whose errors name the rank, the stage and the layer, where there are several processes."""
    return contextlib.nullcontext() if job.size == 1 else raised_as(partial(_named, job.rank), RoundPipeError)


def _named(rank: int, error: Exception) -> Exception:
    named = tuning.named_error(rank, error)
    for note in getattr(error, "__notes__", ()):
        if note not in str(named):  # where the step failed is in the text
            named.add_note(note)
    return named


@contextlib.contextmanager
def _naming_memory(step: StepOptions) -> Iterator[None]:
    """A block in which a model that devices have no room for is an error that names the option."""
    try:
        yield
    except PlanError as error:
        if step.memory is None:
            raise
        what = str(error).partition(". Cut the layer")[0]
        raise UserError(
            f"--memory {step.memory} is too little: {what}. Give more, or see what a model needs: roundpipe plan MODEL"
        ) from error


def _length(length: int | None, source: tuning.ModelSource) -> int:
    most = source.longest
    if length is not None and most is not None and length > most:
        raise UserError(f"{source.name} takes rows of {most} tokens at most: --length {most}")
    return length or min(512, most or 512)


def _adapters(text: str | None, source: tuning.ModelSource) -> tuning.Lora | None:
    if text is None:
        return None
    if not source.has_weights:
        raise UserError(
            f"{source.name} has random weights, and adapters are of no use without theirs. Name a folder with weights, "
            "or leave --lora out"
        )
    return tuning.Lora.parse(text)


def _learner(
    source: tuning.ModelSource, adapters: tuning.Lora | None, step: StepOptions, learning: LearningOptions
) -> nn.Module:
    quantize = few_bits(learning.quantize)
    learner = source.load(dtype=dtype_named(step.dtype), seed=learning.seed, quantize=quantize, host=step.host)
    return learner if adapters is None else tuning.add_lora(learner, adapters, seed=learning.seed)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """A block without the bars and tables of transformers: what goes wrong is reported in one line."""
    from transformers.utils import logging

    had_bar, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bar:
            logging.enable_progress_bar()


def _to_go_on(argv: Any, job: tuning.Job) -> str:
    """The line that was typed, for another run that goes on with this one."""
    words = [word for word in argv or ["train", "..."] if word != "--resume"]
    if job.size == 1:
        return shlex.join(["roundpipe", *words, "--resume"])
    return shlex.join(["torchrun", f"--nproc-per-node={job.size}", "-m", "roundpipe_runtime", *words, "--resume"])
