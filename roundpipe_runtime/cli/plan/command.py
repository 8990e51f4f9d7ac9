"""``roundpipe plan``: cut the model without allocating it, and print the estimate."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from yobx_flatten.model_folder.source.find import MODEL_NAMES
from yobx_flatten.terminal.failures import CHECK_FAILED, UserError
from yobx_flatten.terminal.output import progress, say, say_json

from ...estimate.network import nodes_of_report, of_node
from ..models import source_of
from ..quantities import parse_bits, parse_bytes, parse_gigabytes
from ..train import options as given
from .nodes import as_dict as nodes_as_dict
from .nodes import write_nodes
from .output import as_dict, write_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from ...estimate.hardware import Hardware
    from ...estimate.network import NodesEstimate
    from ...estimate.report import PlanReport
    from ...fine_tune import ModelSource
    from ...huggingface.plan_training import PlannedTraining, SettingsChange

__all__ = ["plan"]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=MODEL_NAMES + " Weights are not read.",
    ),
]
Devices = Annotated[
    str,
    typer.Option(metavar="DEVICES", help="auto, virtual:N, or cuda:0,cuda:1 (which need not exist here)."),
]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of one device, like 24GiB (default: measured).")
]
MachineFile = Annotated[
    pathlib.Path | None,
    typer.Option(metavar="FILE", help="Machine profile: written by doctor --machine, or by hand."),
]
Length = Annotated[
    int | None,
    typer.Option(
        min=2, metavar="N", help="Tokens per row (default: 512 or the model's limit).", rich_help_panel="A step"
    ),
]
Lora = Annotated[
    str | None,
    typer.Option(
        metavar="R[,ALPHA[,NAMES]]", help="Train LoRA adapters only, as train --lora does.", rich_help_panel="A step"
    ),
]
Bandwidth = Annotated[
    float | None, typer.Option(metavar="GB/S", help="Copy rate from host to device (default: measured).")
]
Flops = Annotated[float | None, typer.Option(metavar="TFLOP/S", help="Compute rate of a device (default: measured).")]
Copies = Annotated[
    str,
    typer.Option(
        metavar="N",
        help="Number of devices that run the head; auto: as many as make the step faster.",
        rich_help_panel="A step",
    ),
]
_NODES = "Several machines"
Nodes = Annotated[
    int,
    typer.Option(
        min=1, metavar="N", help="Number of machines like this one that share the batch.", rich_help_panel=_NODES
    ),
]
Network = Annotated[
    str, typer.Option(metavar="RATE", help="Network rate of each machine, in bits per second.", rich_help_panel=_NODES)
]
ReduceDtype = Annotated[
    Literal["same", "float32", "bfloat16"],
    typer.Option(
        metavar="DTYPE", help="Data type of gradients on the network: same, float32, bfloat16.", rich_help_panel=_NODES
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan(
    model: Model,
    devices: Devices = "auto",
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    flops: Flops = None,
    machine: MachineFile = None,
    batch: given.Batch = 8,
    length: Length = None,
    microbatches: given.Microbatches = None,
    dtype: given.Dtype = "auto",
    optim_dtype: given.OptimDtype = "float32",
    lora: Lora = None,
    last_stage_copies: Copies = "1",
    keep_parameters: given.KeepParameters = "0",
    nodes: Nodes = 1,
    network: Network = "100G",
    reduce_dtype: ReduceDtype = "same",
    json: Json = False,
) -> int:
    """Estimate the memory and step time of a training, without allocating anything.

    The report lists layers, stages, memory of devices and host, how many tokens hide the transfers, the time of a step,
    and whether the training fits.

    Exit status: 0 it fits, as far as is known; 1 it does not fit; 2 there is no such model or device.
    """
    numbers = {
        "memory": None if memory is None else parse_bytes(memory, "--memory"),
        "link": _rate("--bandwidth", bandwidth, 1e9),
        "flops": _rate("--flops", flops, 1e12),
    }
    line = parse_bits(network, "--network")
    copies = _copies(last_stage_copies)
    keep = parse_gigabytes(keep_parameters, "--keep-parameters")
    rows = _rows_of_machine(batch, nodes)
    source = source_of(model, weights=False)
    if source.folder is None and not pathlib.Path(model).exists() and not json:
        say(f"{model}: a small model with random weights\n")
    length = _length(source, length)
    with progress("building the model without memory") as show:
        where = _Where(machine, devices, numbers)
        training = _training(source, where, dtype, optim_dtype, lora, show)
        count = microbatches or min(len(training.hardware.names) + 1, rows)
        _check_microbatches(count, rows, nodes)
        size = {"batch": rows, "length": length, "num_microbatch": count}
        show("measuring the layers")
        report = training.report(**size, last_stage_copies=copies, keep_parameters=keep)
        change = _remedy(training, report, size, show)
    several = _nodes(training, report, _dtype(reduce_dtype))
    found = several(nodes, line)
    report = of_node(report, nodes) if nodes > 1 else report
    if json:
        described = as_dict(training, report, change, rows=rows, length=length)
        say_json(described if nodes == 1 else {**described, "several": nodes_as_dict(found, several)})
    else:
        say(write_plan(training, report, change, rows=rows, length=length))
        if nodes > 1:
            say("\n" + write_nodes(found, several, rows=batch, tokens=report.tokens))
    return CHECK_FAILED if False in (report.fits_devices, report.fits_host) else 0


def _rows_of_machine(batch: int, nodes: int) -> int:
    """The rows of a batch on one of several machines."""
    if batch < nodes:
        raise UserError(f"{batch} rows cannot be cut among {nodes} machines: --batch {nodes}, or --nodes {batch}")
    return -(-batch // nodes)


def _length(source: ModelSource, length: int | None) -> int:
    """The tokens of a row: as given, or as many as the model takes, up to 512."""
    longest = source.longest
    if length is not None and longest is not None and length > longest:
        raise UserError(f"{source.name} takes rows of {longest} tokens at most: --length {longest}")
    return length or min(512, longest or 512)


def _check_microbatches(count: int, rows: int, nodes: int) -> None:
    if count > rows:
        raise UserError(
            f"{rows} rows cannot be cut into {count} microbatches: --batch {count * nodes}, or --microbatches {rows}"
        )


def _copies(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f'--last-stage-copies is a number of devices or "auto", found {text!r}')
    return int(text)


class _Where(NamedTuple):
    """What the options state of the machine."""

    machine: pathlib.Path | None
    devices: str
    numbers: dict[str, Any]

    def hardware(self, dtype: torch.dtype) -> Hardware:
        """The profile, with what is given in addition; without one, what is measured or assumed."""
        from ...estimate.hardware import describe_hardware, device_kind, device_names
        from ...estimate.machine_file import load_machine

        if self.machine is None:
            return describe_hardware(None if self.devices == "auto" else self.devices, dtype=dtype, **self.numbers)
        found = load_machine(self.machine)
        given = {name: value for name, value in self.numbers.items() if value is not None}
        if self.devices != "auto":
            names = device_names(self.devices)
            given.update(names=names, kind=device_kind(names))
        origin = {**found.origin, **{name: "given" for name in given if name in found.origin}}
        return dataclasses.replace(found, **given, origin=origin)


def _training(
    source: ModelSource,
    where: _Where,
    dtype: str,
    optim_dtype: str,
    lora: str | None,
    show: Any,
) -> PlannedTraining:
    """The model on meta, cut, and the hardware."""
    import torch

    from ...fine_tune import Lora, add_lora
    from ...huggingface.plan_training import PlannedTraining, model_on_meta

    adapters = None if lora is None else Lora.parse(lora)
    made = model_on_meta(source.config, dtype=_dtype(dtype))
    kept = next((p.dtype for p in made.parameters() if p.is_floating_point()), torch.float32)
    if adapters is not None:
        with torch.device("meta"):
            made = add_lora(made, adapters)
    show("measuring this machine")
    hardware = where.hardware(kept)
    show("cutting the model")
    return PlannedTraining(made, hardware, optim_dtype=_dtype(optim_dtype))


def _remedy(training: PlannedTraining, report: PlanReport, size: Mapping[str, int], show: Any) -> SettingsChange | None:
    """What to change so that the devices have room; ``None`` where they have, or where nothing helps."""
    if report.fits_devices is not False or report.too_large:
        return None
    show("looking for what fits")
    return training.remedy(**size)


def _nodes(
    training: PlannedTraining, report: PlanReport, reduce_dtype: torch.dtype | None
) -> Callable[[int, float], NodesEstimate]:
    """The estimate for a number of machines and a line between them."""
    parameters = list(training.model.parameters())

    def several(nodes: int, network: float) -> NodesEstimate:
        return nodes_of_report(
            report, parameters, nodes, network, optim_dtype=training.optim_dtype, reduce_dtype=reduce_dtype
        )

    return several


def _dtype(name: str) -> torch.dtype | None:
    import torch

    found: torch.dtype | None = None if name in ("auto", "same") else getattr(torch, name)
    return found


def _rate(option: str, value: float | None, unit: float) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise UserError(f"{option} must be a number above 0, found {value}")
    return None if value is None else value * unit
