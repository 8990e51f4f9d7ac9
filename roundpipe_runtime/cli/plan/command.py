"""``roundpipe plan``: cut the model without allocating it, and print the estimate."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any, Literal

import torch
import typer

from yobx_flatten.terminal.failures import CHECK_FAILED, UserError
from yobx_flatten.terminal.output import progress, say, say_json

from ..models import source_of
from ..option_objects import takes_options
from ..quantities import parse_gigabytes
from ..train.options import dtype_named, few_bits
from .options import MachineOptions, ModelOptions, StepOptions
from .output import as_dict, write_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...estimate.report import PlanReport, Reference
    from ...fine_tune import ModelSource
    from ...huggingface.plan_training import PlannedTraining, SettingsChange


@takes_options(what=ModelOptions, machine=MachineOptions, step=StepOptions)
def plan(_: typer.Context, *, what: ModelOptions, machine: MachineOptions, step: StepOptions) -> int:
    """Estimate the memory and step time of a training, without allocating anything.

    The report states whether the training fits, which settings would fit if it does not, and the time of a step. With
    --details it also lists layers, stages, the parts of memory, and how many tokens per step hide the transfers.

    Exit status: 0 it fits, as far as is known; 1 it does not fit; 2 there is no such model or device.
    """
    source, rows = source_of(what.model, weights=False), step.batch
    is_small = source.folder is None and not pathlib.Path(what.model).exists()
    length = _length(source, step.length)
    with progress("building the model without allocating memory") as show:
        training = _training(source, machine, step, show)
        count = step.microbatches or min(len(training.hardware.names) + 1, rows)
        if count > rows:
            raise UserError(
                f"{rows} rows cannot be split into {count} microbatches: --batch {count}, or --microbatches {rows}"
            )
        size = {"batch": rows, "length": length, "num_microbatch": count}
        show("measuring the layers")
        keep = parse_gigabytes(step.keep_parameters, "--keep-parameters")
        report = training.report(**size, last_stage_copies=step.copies, keep_parameters=keep)
        report, compared = _reference(training, report) if step.reference else (report, None)
        change = _remedy(training, report, size, show)
    if what.json:
        say_json(as_dict(training, report, change, rows=rows, length=length, reference=compared))
    else:
        shown: dict[str, Any] = {"reference": compared, "details": what.details, "is_small": is_small}
        say(write_plan(training, report, change, rows=rows, length=length, **shown))
    return CHECK_FAILED if False in (report.fits_devices, report.fits_host) else 0


def _length(source: ModelSource, length: int | None) -> int:
    """The tokens of a row: as given, or as many as the model takes, up to 512."""
    longest = source.longest
    if length is not None and longest is not None and length > longest:
        raise UserError(f"{source.name} accepts rows of at most {longest} tokens: --length {longest}")
    return length or min(512, longest or 512)


def _training(source: ModelSource, machine: MachineOptions, step: StepOptions, show: Any) -> PlannedTraining:
    """The model on meta, cut, and the hardware."""
    from ...fine_tune import Lora, add_lora
    from ...huggingface.plan_training import PlannedTraining, model_on_meta
    from ...huggingface.quantize import quantize_frozen

    adapters = None if step.lora is None else Lora.parse(step.lora)
    made = model_on_meta(source.config, dtype=dtype_named(step.dtype))
    kept = next((p.dtype for p in made.parameters() if p.is_floating_point()), torch.float32)
    quantize = few_bits(step.quantize)
    if quantize is not None:
        made = quantize_frozen(made, quantize)
    if adapters is not None:
        with torch.device("meta"):
            made = add_lora(made, adapters)
    show("measuring this machine")
    hardware = step.with_disk(machine.hardware(kept))
    show("cutting the model")
    place: Literal["memory", "disk"] = "disk" if step.is_on_disk else "memory"
    how: Any = {"large_tables": step.large_tables, "host": place, "update": step.update}
    return PlannedTraining(made, hardware, optim_dtype=dtype_named(step.optim_dtype), **how)


def _reference(training: PlannedTraining, report: PlanReport) -> tuple[PlanReport, Reference]:
    """The plan with a reference of the same size; under adapters, the model without them is one."""
    from ...estimate.report import with_reference
    from ...huggingface.adapters import is_adapted

    tensors = [*training.model.parameters(), *training.model.buffers()]
    return with_reference(report, tensors, shares_weights=is_adapted(training.model))


def _remedy(training: PlannedTraining, report: PlanReport, size: Mapping[str, int], show: Any) -> SettingsChange | None:
    """Return a change with which the model fits on the devices; ``None`` if it fits, or if nothing helps."""
    if report.fits_devices is not False or report.too_large:
        return None
    show("looking for what fits")
    return training.remedy(**size)
