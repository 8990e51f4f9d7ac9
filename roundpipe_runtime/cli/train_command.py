"""``roundpipe train``."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import typer

from yobx_flatten.terminal.failures import UserError
from yobx_flatten.terminal.output import say, say_json

from .. import fine_tune as tuning
from ..device.virtual import Device, VirtualDevice, parse_devices
from ..distributed.job import own_devices
from ..errors import ConfigError, DeviceError
from . import train_options as given
from .models import source_of
from .quantities import parse_bytes, parse_gigabytes
from .train_display import Display, format_model, format_text, format_training

__all__ = ["train"]


def train(
    context: typer.Context,
    words: given.Words = None,
    model: given.Model = None,
    *,
    output: given.Output,
    text: given.Text = None,
    field: given.Field = "text",
    tokenizer: given.TokenizerName = None,
    length: given.Length = None,
    eval_share: given.EvalShare = 0.02,
    devices: given.Devices = "auto",
    memory: given.Memory = None,
    batch: given.Batch = 8,
    microbatches: given.Microbatches = None,
    replicas: given.Replicas = None,
    accumulate: given.Accumulate = 1,
    steps: given.Steps = None,
    epochs: given.Epochs = None,
    dtype: given.Dtype = "auto",
    unmatched_weights: given.UnmatchedWeights = "refuse",
    optim_dtype: given.OptimDtype = "float32",
    keep_parameters: given.KeepParameters = "0",
    lora: given.LoraText = None,
    lr: given.Rate = 3e-4,
    warmup: given.Warmup = None,
    schedule: given.Schedule = "cosine",
    weight_decay: given.WeightDecay = 0.01,
    clip: given.Clip = 1.0,
    seed: given.Seed = 0,
    eval_every: given.EvalEvery = None,
    check: given.Check = True,
    checkpoint: given.CheckpointFolder = None,
    every: given.Every = None,
    keep: given.Keep = 3,
    resume: given.Resume = False,
    metrics: given.Metrics = None,
    timeline: given.TimelineFile = None,
    log_every: given.LogEvery = None,
    overwrite: given.Overwrite = False,
    json: given.Json = False,
) -> int:
    """Train a language model on text, with no more of it on a device than fits there.

    What it learns is what it learns without a pipeline. Ctrl-C ends the step,
    writes a checkpoint and states how to go on; the result is then the same, to
    the last bit. Several processes of torchrun train one model, in groups of
    rows; those that it starts again go on by themselves. Exit status: 0 trained, saved and loaded again; 2 it cannot be
    done; 130 Ctrl-C; 143 SIGTERM.
    """
    stdout = sys.stdout
    job = tuning.Job()
    if json and job.is_first:
        context.with_resource(contextlib.redirect_stdout(sys.stderr))
    named, *more_text = [model, *(words or [])] if model is not None else (words or [])
    checkpoints = checkpoint or output.with_name(f"{output.name}-checkpoints")
    is_restart = job.was_restarted()
    resume, overwrite = resume or is_restart, overwrite or is_restart  # what is there is this run's own
    others = [metrics, timeline]
    job.together(
        lambda: _check_files(output, checkpoints, others, resume=resume, overwrite=overwrite) if job.is_first else None
    )
    if steps is not None and epochs is not None:
        raise UserError("--steps and --epochs both state how long. Leave one out")
    if resume and replicas is None and job.size == 1:
        replicas = tuning.stored_replicas(checkpoints)
    settings = tuning.Settings(
        batch=batch,
        microbatches=microbatches,
        replicas=replicas,
        accumulate=accumulate,
        steps=steps,
        epochs=epochs or 1,
        lr=lr,
        warmup=warmup,
        schedule=schedule,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        devices=_devices(devices, memory),
        optim_dtype=_dtype(optim_dtype),
        keep_parameters=parse_gigabytes(keep_parameters, "--keep-parameters"),
        eval_every=eval_every,
        check=check,
    )

    def read() -> tuple[tuning.ModelSource, tuning.Lora | None, tuning.Tokenizer, tuning.Blocks]:
        source = dataclasses.replace(source_of(named), unmatched_weights=unmatched_weights)
        adapters = _adapters(lora, source)
        reader = tuning.load_tokenizer(source, tokenizer)
        blocks = tuning.read_blocks(
            [*(text or []), *more_text],
            reader,
            length=_length(length, source),
            field=field,
            eval_share=eval_share,
            seed=seed,
            vocab_size=source.vocab_size,
        )
        return source, adapters, reader, blocks

    source, adapters, reader, blocks = job.together(read)
    say(format_text(blocks, reader))
    context.with_resource(_quiet_transformers())
    learner = job.together(lambda: _learner(source, adapters, dtype=_dtype(dtype), seed=seed))
    say(format_model(learner, source))
    at_end = every is not None or checkpoint is not None or resume
    kept = int(at_end) if every is None else min(keep + 1, settings.total_steps(len(blocks.training)) // every)
    job.together(lambda: tuning.check_disk(learner, settings, output, checkpoints, kept=kept))
    with _naming_rank(job), tuning.Training(learner, blocks, settings) as training:
        if resume:
            is_there = training.restore(checkpoints)
            say(f"going on after step {training.step}" if is_there else f"no checkpoint in {checkpoints} yet")
        say(format_training(training))
        with Display(training.steps, first=training.step, log_every=log_every, is_shown=job.is_first) as display:
            seen: dict[type, tuning.StepRecord | tuning.EvalRecord] = {}

            def show(record: tuning.StepRecord | tuning.EvalRecord) -> None:
                seen[type(record)] = record
                display.show(record)

            def save() -> None:
                training.pipeline.synchronize()
                job.together(
                    lambda: (
                        tuning.save_model(learner, reader, output, source=source, overwrite=overwrite)
                        if job.is_first
                        else None
                    )
                )

            outcome = tuning.run(
                training,
                checkpoints=checkpoints,
                every=every,
                keep=keep,
                at_end=at_end,
                metrics=metrics,
                timeline=timeline,
                show=show,
                save_model=save,
            )
    if outcome.status:
        say(f"stopped after step {training.step} of {training.steps}, saved in {outcome.checkpoint}. To go on:")
        say(f"    {_to_go_on(context.obj, job)}")
    else:
        say(f"saved in {output}, loaded from there and compared")
    if not outcome.status and timeline is not None:
        files = [str(tuning.timeline_of_rank(timeline, rank)) for rank in range(job.size)]
        say(f"step {outcome.recorded}:  roundpipe timeline {shlex.join(files)}")
    if json and job.is_first:
        with contextlib.redirect_stdout(stdout):
            say_json(
                {
                    "model": source.name,
                    "random_weights": not source.has_weights,
                    "path": None if outcome.status else str(output),
                    "status": outcome.status,
                    "step": training.step,
                    "steps": training.steps,
                    "checkpoint": outcome.checkpoint,
                    **{key: dataclasses.asdict(seen[kind]) if kind in seen else None for key, kind in _RECORDS.items()},
                }
            )
    return outcome.status


_RECORDS = {"last_step": tuning.StepRecord, "last_evaluation": tuning.EvalRecord}


@contextlib.contextmanager
def _naming_rank(job: tuning.Job) -> Iterator[None]:
    """A block whose errors name the rank, the stage and the layer, where there are several processes."""
    try:
        yield
    except Exception as error:
        if job.size == 1:
            raise
        named = tuning.named_error(job.rank, error)
        for note in getattr(error, "__notes__", ()):
            if named is not error and note not in str(named):  # where the step failed is in the text
                named.add_note(note)
        raise named from error


def _check_files(
    output: pathlib.Path,
    checkpoints: pathlib.Path,
    others: Sequence[pathlib.Path | None],
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    """Refuse what cannot be written before hours are spent on it."""
    tuning.check_output(output, overwrite=overwrite)
    for path in others:
        if path is None:
            continue
        if path.exists() and not (overwrite or resume):
            raise UserError(f"{path} exists. Name another file, or replace it: --overwrite")
        if not path.absolute().parent.is_dir():
            raise UserError(f"There is no folder {path.parent} for {path.name}")
    if not resume and (there := list(checkpoints.glob("checkpoint-*"))):
        newest = max(there, key=lambda path: path.stat().st_mtime)
        raise UserError(
            f"{newest} is of another run. Go on with that: --resume; or begin anew in another folder: --checkpoint DIR"
        )


def _devices(text: str, memory: str | None) -> list[Device]:
    names = own_devices() if text == "auto" else text if text.startswith("virtual") else text.split(",")
    try:
        found = parse_devices(names)
    except (ConfigError, DeviceError) as error:
        reason = "torch finds no accelerator here" if isinstance(error, DeviceError) else "it names no device"
        raise UserError(f"--devices {text}: {reason}. Write auto, virtual:2, or cuda:0,cuda:1") from error
    limit = None if memory is None else parse_bytes(memory, "--memory")
    for device in found if limit is not None else ():
        if not isinstance(device, VirtualDevice):
            raise UserError(f"--memory limits virtual devices, and {device.name} has its own. Leave it out")
        device.memory_limit = limit
    return found


def _dtype(name: str) -> torch.dtype | None:
    return None if name in ("auto", "same") else getattr(torch, name)


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
    source: tuning.ModelSource, adapters: tuning.Lora | None, *, dtype: torch.dtype | None, seed: int
) -> torch.nn.Module:
    learner = source.load(dtype=dtype, seed=seed)
    return learner if adapters is None else tuning.add_lora(learner, adapters, seed=seed)


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
