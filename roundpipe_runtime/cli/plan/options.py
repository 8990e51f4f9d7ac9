"""The options of ``roundpipe plan`` with their help; one dataclass per concern."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer

from yobx_flatten.model_folder.source.find import MODEL_NAMES
from yobx_flatten.terminal.failures import UserError

from ...device.disk import HOST_IN_MEMORY
from ..option_objects import option
from ..quantities import parse_bytes, parse_gigabytes
from ..train import options as train

if TYPE_CHECKING:
    from ...estimate.hardware import Hardware

_STEP = "A step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model is planned, and how the plan is printed."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_NAMES + " Weights are not read.")]
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    details: Annotated[
        bool, typer.Option("--details", help="Print layers, stages, the parts of memory, and transfers.")
    ] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Options that describe one machine; missing values are measured or assumed."""

    devices: Annotated[
        str,
        option(
            "DEVICES",
            "auto, virtual:N, or cuda:0,cuda:1 (which need not exist here). auto: all GPUs; without a GPU, it is "
            "one of the size of --memory, or virtual:2.",
        ),
    ] = "auto"
    memory: Annotated[str | None, option("SIZE", "Memory of one device, like 24GiB (default: measured).")] = None
    bandwidth: Annotated[float | None, option("GB/S", "Copy rate from host to device (default: measured).")] = None
    flops: Annotated[float | None, option("TFLOP/S", "Compute rate of a device (default: measured).")] = None
    machine: Annotated[
        pathlib.Path | None, option("FILE", "Machine profile: written by doctor --machine, or by hand.")
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
        """Return the profile with the given options; without a profile, measured or assumed values."""
        from ...estimate.hardware import describe_hardware, device_kind, device_names, load_machine

        if self.machine is None:
            devices = None if self.devices == "auto" else self.devices
            if devices is None and self.memory is not None and not torch.accelerator.is_available():
                devices = "cuda:0"  # virtual devices have no memory of their own, so a GPU is asked about
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
    """How many rows a step has, and how it is computed."""

    batch: train.Batch = 8
    length: Annotated[int | None, option("N", "Tokens per row (default: 512 or the model's limit).", _STEP, min=2)] = (
        None
    )
    microbatches: train.Microbatches = None
    dtype: train.Dtype = "auto"
    optim_dtype: train.OptimDtype = "float32"
    lora: Annotated[
        str | None, option("R[,ALPHA[,NAMES]]", "Train LoRA adapters only, as train --lora does.", _STEP)
    ] = None
    quantize: train.Quantize = "none"
    reference: Annotated[
        bool, typer.Option(help="Add a frozen reference model, as DPO and GRPO need.", rich_help_panel=_STEP)
    ] = False
    last_stage_copies: Annotated[
        str, option("N", "Number of devices that run the head; auto: as many as make the step faster.", _STEP)
    ] = "1"
    keep_parameters: train.KeepParameters = "0"
    large_tables: train.LargeTables = "auto"
    host: train.Host = HOST_IN_MEMORY
    update: train.Update = "masters"

    def __post_init__(self) -> None:
        train.check_host_option(self.host)
        train.check_update(self.update, self.host)
        parse_gigabytes(self.keep_parameters, "--keep-parameters")
        train.check_quantize(self.quantize, self.lora)
        text = self.last_stage_copies
        if text != "auto" and (not text.isdecimal() or int(text) < 1):
            raise UserError(f'--last-stage-copies is a number of devices or "auto", found {text!r}')

    @property
    def is_on_disk(self) -> bool:
        """Whether weights, gradients and the optimizer's state are on a disk."""
        return self.host != HOST_IN_MEMORY

    def with_disk(self, machine: Hardware) -> Hardware:
        """Return a machine with the rates of the disk, which is measured where the profile does not state them."""
        from ...device.disk import disk_folder
        from ...estimate.device_rates import measure_disk

        folder = disk_folder(self.host)
        if folder is None or (machine.disk_read is not None and machine.disk_write is not None):
            return machine
        if not folder.is_dir():
            raise UserError(
                f"--host {self.host}: there is no folder {folder} here to measure. Name one, or a profile with the "
                "rates of its disk: roundpipe doctor --disk DIR --machine FILE"
            )
        rates = measure_disk(folder)
        return dataclasses.replace(machine, disk_read=rates.read, disk_write=rates.write)

    @property
    def copies(self) -> int | Literal["auto"]:
        """The number of devices that run the head."""
        return "auto" if self.last_stage_copies == "auto" else int(self.last_stage_copies)


def _rate(option: str, value: float | None, unit: float) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise UserError(f"{option} must be a number above 0, found {value}")
    return None if value is None else value * unit
