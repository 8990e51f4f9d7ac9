"""``roundpipe plan``: estimate memory and time of a training from a model without allocated weights."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer

from yobx_flatten.model_folder.source.find import MODEL_NAMES
from yobx_flatten.terminal.output import progress, say, say_json
from yobx_flatten.terminal.running import CHECK_FAILED, UserError

from ..device.disk import HOST_IN_MEMORY
from . import train_options
from .option_objects import option, parse_bytes, parse_gigabytes, takes_options
from .plan_output import as_dict, write_plan
from .train_options import dtype_named, few_bits, row_length, source_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..estimate.hardware import Hardware
    from ..estimate.report import PlanReport, Reference
    from ..fine_tune import ModelSource
    from ..huggingface.plan_training import PlannedTraining, SettingsChange


_STEP = "A step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_NAMES + " Weights are not read.")]
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    details: Annotated[
        bool, typer.Option("--details", help="Print a table of layers, of stages, of memory use, and of transfers.")
    ] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Options of ``roundpipe plan`` that describe the machine; the command measures or assumes missing values."""

    devices: Annotated[
        str,
        option(
            "DEVICES",
            "auto, virtual:N, or cuda:0,cuda:1 (even if this machine has none). auto: all GPUs; without a GPU, one "
            "device with --memory, or virtual:2.",
        ),
    ] = "auto"
    memory: Annotated[str | None, option("SIZE", "Memory of one device, like 24GiB (default: measured).")] = None
    bandwidth: Annotated[float | None, option("GB/S", "Copy rate from CPU to device (default: measured).")] = None
    flops: Annotated[float | None, option("TFLOP/S", "Compute rate of a device (default: measured).")] = None
    machine: Annotated[
        pathlib.Path | None, option("FILE", "Machine profile, from doctor --machine or hand-written.")
    ] = None

    def __post_init__(self) -> None:
        self._numbers()

    def _numbers(self) -> dict[str, Any]:
        return {
            "memory": None if self.memory is None else parse_bytes(self.memory, "--memory"),
            "link": _rate("--bandwidth", self.bandwidth, 1e9),
            "flops": _rate("--flops", self.flops, 1e12),
        }

    def hardware(self, dtype: torch.dtype) -> Hardware:
        """Return the hardware of the ``--machine`` file, or of this machine; other options replace single values."""
        from ..estimate.hardware import describe_hardware, device_kind, device_names, load_machine

        if self.machine is None:
            devices = None if self.devices == "auto" else self.devices
            if devices is None and self.memory is not None and not torch.accelerator.is_available():
                devices = "cuda:0"  # virtual devices have no memory, so the plan is for a GPU
            return describe_hardware(devices, dtype=dtype, **self._numbers())
        found = load_machine(self.machine)
        given = {name: value for name, value in self._numbers().items() if value is not None}
        if self.devices != "auto":
            names = device_names(self.devices)
            given.update(names=names, kind=device_kind(names))
        origin = {**found.origin, **{name: "given" for name in given if name in found.origin}}
        return dataclasses.replace(found, **given, origin=origin)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    batch: train_options.Batch = 8
    length: Annotated[int | None, option("N", "Tokens a row (default: model's limit, at most 512).", _STEP, min=2)] = (
        None
    )
    microbatches: train_options.Microbatches = None
    dtype: train_options.Dtype = "auto"
    optim_dtype: train_options.OptimDtype = "float32"
    lora: Annotated[
        str | None, option("R[,ALPHA[,NAMES]]", "Train only LoRA adapters, with the values of train --lora.", _STEP)
    ] = None
    quantize: train_options.Quantize = "none"
    reference: Annotated[
        bool, typer.Option(help="Add a frozen reference model, which DPO and GRPO need.", rich_help_panel=_STEP)
    ] = False
    last_stage_copies: Annotated[
        str, option("N", "Number of devices that run the LM head; auto: as many as speed up the step.", _STEP)
    ] = "1"
    keep_parameters: train_options.KeepParameters = "0"
    large_tables: train_options.LargeTables = "auto"
    host: train_options.Host = HOST_IN_MEMORY
    update: train_options.Update = "masters"

    def __post_init__(self) -> None:
        train_options.check_host_option(self.host)
        train_options.check_update(self.update, self.host)
        parse_gigabytes(self.keep_parameters, "--keep-parameters")
        train_options.check_quantize(self.quantize, self.lora)
        text = self.last_stage_copies
        if text != "auto" and (not text.isdecimal() or int(text) < 1):
            raise UserError(f'--last-stage-copies is a number of devices or "auto", found {text!r}')

    def with_disk(self, machine: Hardware) -> Hardware:
        """Return the machine with the speed of the ``--host`` disk, measured unless the profile states the speed."""
        from ..device.disk import disk_folder
        from ..estimate.device_rates import measure_disk

        folder = disk_folder(self.host)
        if folder is None or (machine.disk_read is not None and machine.disk_write is not None):
            return machine
        if not folder.is_dir():
            raise UserError(
                f"--host {self.host}: there is no folder {folder} to measure. Name an existing folder, or a profile "
                "with the speed of its disk: roundpipe doctor --disk DIR --machine FILE"
            )
        rates = measure_disk(folder)
        return dataclasses.replace(machine, disk_read=rates.read, disk_write=rates.write)

    @property
    def copies(self) -> int | Literal["auto"]:
        return "auto" if self.last_stage_copies == "auto" else int(self.last_stage_copies)


def _rate(option: str, value: float | None, unit: float) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise UserError(f"{option} must be a number above 0, found {value}")
    return None if value is None else value * unit


@takes_options(what=ModelOptions, machine=MachineOptions, step=StepOptions)
def plan(_: typer.Context, *, what: ModelOptions, machine: MachineOptions, step: StepOptions) -> int:
    """Estimate the memory and step time of a training, without allocating anything.

    The report states whether the training fits into memory, or else which settings fit, and the time of a step. With
    --details, the report also lists layers, stages, memory by use, and how many tokens hide the transfers.

    Exit status: 0 the training fits, as far as is known; 1 it does not fit; 2 there is no such model or device.
    """
    source, rows = source_of(what.model, weights=False), step.batch
    is_small = source.folder is None and not pathlib.Path(what.model).exists()
    length = row_length(source, step.length)
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


def _training(source: ModelSource, machine: MachineOptions, step: StepOptions, show: Any) -> PlannedTraining:
    """Create the model on device ``meta``, split it into layers, and measure the hardware."""
    from ..fine_tune import Lora, add_lora
    from ..huggingface.plan_training import PlannedTraining, model_on_meta
    from ..huggingface.quantize import quantize_frozen

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
    place: Literal["memory", "disk"] = "memory" if step.host == HOST_IN_MEMORY else "disk"
    how: Any = {"large_tables": step.large_tables, "host": place, "update": step.update}
    return PlannedTraining(made, hardware, optim_dtype=dtype_named(step.optim_dtype), **how)


def _reference(training: PlannedTraining, report: PlanReport) -> tuple[PlanReport, Reference]:
    """Add a frozen reference model to the report; with LoRA, the reference is the model without adapters."""
    from ..estimate.report import with_reference
    from ..huggingface.adapters import is_adapted

    tensors = [*training.model.parameters(), *training.model.buffers()]
    return with_reference(report, tensors, shares_weights=is_adapted(training.model))


def _remedy(training: PlannedTraining, report: PlanReport, size: Mapping[str, int], show: Any) -> SettingsChange | None:
    """Return smaller microbatches or rows that need less device memory; ``None`` if the model fits or cannot fit."""
    if report.fits_devices is not False or report.too_large:
        return None
    show("looking for what fits")
    return training.remedy(**size)
