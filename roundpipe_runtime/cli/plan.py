"""``roundpipe plan``: estimate memory and time of a training from a model without allocated weights."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import Annotated, Any, Literal

import torch
import typer

from yobx_flatten.core.terminal.command_line import CHECK_FAILED, UserError, progress, say, say_json
from yobx_flatten.errors.failures import format_bytes, table
from yobx_flatten.model_folder.source.find import MODEL_NAMES

from ..device.disk import HOST_IN_MEMORY, disk_folder
from ..estimate.hardware import Hardware, describe_hardware, device_kind, device_names, load_machine, measure_disk
from ..estimate.report import PlanReport, with_reference
from ..fine_tune import Lora, ModelSource, add_lora
from ..huggingface.adapters import is_adapted
from ..huggingface.plan_training import PlannedTraining, SettingsChange, model_on_meta
from ..huggingface.quantize import count_weights, quantize_frozen
from . import train_options
from .option_objects import format_count, format_seconds, option, parse_bytes, parse_gigabytes, takes_options
from .train_options import dtype_named, row_length, source_of

_COLUMNS = 78  # of the tables
_STEP = "A step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_NAMES + " A plan reads only the configuration.")]
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    details: Annotated[
        bool, typer.Option("--details", help="Also print tables of layers, stages, memory use and transfers.")
    ] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Options of ``roundpipe plan`` that describe the machine; the command measures or assumes missing values."""

    devices: Annotated[
        str,
        option(
            "DEVICES",
            "auto, virtual:N, or cuda:0,cuda:1 (this machine need not have them). auto: all GPUs. Without a GPU, auto "
            "is one GPU if --memory is given, otherwise virtual:2.",
        ),
    ] = "auto"
    memory: Annotated[str | None, option("SIZE", "Memory of one device, like 24GiB (default: measured).")] = None
    bandwidth: Annotated[float | None, option("GB/S", "Copy rate from CPU to device (default: measured).")] = None
    flops: Annotated[float | None, option("TFLOP/S", "Compute rate of a device (default: measured).")] = None
    machine: Annotated[
        pathlib.Path | None, option("FILE", "Speeds and memory of a machine, as written by roundpipe doctor --machine.")
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
        """Return speeds and memory sizes in the ``--machine`` file or of this machine; other options override them."""
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
    length: Annotated[int | None, option("N", "Tokens per row (default: model limit, at most 512).", _STEP, min=2)] = (
        None
    )
    microbatches: train_options.Microbatches = None
    dtype: train_options.Dtype = "auto"
    optim_dtype: train_options.OptimDtype = "float32"
    lora: Annotated[
        str | None,
        option("R[,ALPHA[,NAMES]]", "Train LoRA adapters only: rank[,alpha[,modules]], like 8 or 8,16,q_proj.", _STEP),
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
        train_options.check_host_option(self.host, self.update)
        parse_gigabytes(self.keep_parameters, "--keep-parameters")
        train_options.check_quantize(self.quantize, self.lora)
        text = self.last_stage_copies
        if text != "auto" and (not text.isdecimal() or int(text) < 1):
            raise UserError(f"--last-stage-copies must be a number of devices, or auto, found {text!r}")


def _rate(option: str, value: float | None, unit: float) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise UserError(f"{option} must be a number above 0, found {value}")
    return None if value is None else value * unit


@takes_options(what=ModelOptions, machine=MachineOptions, step=StepOptions)
def plan(_: typer.Context, *, what: ModelOptions, machine: MachineOptions, step: StepOptions) -> int:
    """Estimate the memory and step time of a training, without allocating anything.

    The report states the step time and whether the training fits into memory. If it does not fit, the report lists
    other settings, and whether they fit. --details adds layers, stages and memory by use. It also adds the number of
    tokens per step above which computing takes longer than transfers.

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
                f"{rows} rows cannot be split into {count} microbatches. Use: --batch {count}, or --microbatches {rows}"
            )
        size = {"batch": rows, "length": length, "num_microbatch": count}
        show("measuring the layers")
        keep = parse_gigabytes(step.keep_parameters, "--keep-parameters")
        copies: int | Literal["auto"] = "auto" if step.last_stage_copies == "auto" else int(step.last_stage_copies)
        report = training.report(**size, last_stage_copies=copies, keep_parameters=keep)
        if step.reference:  # with LoRA, the reference is the model without adapters
            tensors = [*training.model.parameters(), *training.model.buffers()]
            report = with_reference(report, tensors, shares_weights=is_adapted(training.model))
        change = None
        if report.fits_devices is False and not report.too_large:
            show("looking for what fits")
            change = training.remedy(**size)
    if what.json:
        say_json(as_dict(training, report, change, rows=rows, length=length))
    else:
        how: dict[str, Any] = {"details": what.details, "is_small": is_small}
        say(write_plan(training, report, change, rows=rows, length=length, **how))
    return CHECK_FAILED if False in (report.fits_devices, report.fits_host) else 0


def _training(source: ModelSource, machine: MachineOptions, step: StepOptions, show: Any) -> PlannedTraining:
    adapters = None if step.lora is None else Lora.parse(step.lora)
    made = model_on_meta(source.config, dtype=dtype_named(step.dtype))
    kept = next((p.dtype for p in made.parameters() if p.is_floating_point()), torch.float32)
    if step.quantize != "none":
        made = quantize_frozen(made, step.quantize)
    if adapters is not None:
        with torch.device("meta"):
            made = add_lora(made, adapters)
    show("measuring this machine")
    hardware, folder = machine.hardware(kept), disk_folder(step.host)
    if folder is not None and None in (hardware.disk_read, hardware.disk_write):
        if not folder.is_dir():
            raise UserError(
                f"--host {step.host}: the folder {folder} does not exist, so the speed of its disk cannot be measured. "
                "Create the folder, or pass --machine FILE, written by: roundpipe doctor --disk DIR --machine FILE"
            )
        rates = measure_disk(folder)
        hardware = dataclasses.replace(hardware, disk_read=rates.read, disk_write=rates.write)
    show("cutting the model")
    place: Literal["memory", "disk"] = "memory" if step.host == HOST_IN_MEMORY else "disk"
    how: Any = {"large_tables": step.large_tables, "host": place, "update": step.update}
    return PlannedTraining(made, hardware, optim_dtype=dtype_named(step.optim_dtype), **how)


def as_dict(
    training: PlannedTraining, report: PlanReport, change: SettingsChange | None, *, rows: int, length: int
) -> dict[str, Any]:
    """Return the report as a dict for JSON: sizes in bytes, times in seconds, rates per second."""
    devices = len(report.hardware.names)
    reference = None
    if report.reference_seconds is not None:
        reference = {"host_bytes": report.host_memory.reference, "seconds": report.reference_seconds}
    return {
        "model": training.cut.report.model,
        "parameters": count_weights(training.model),
        "learning": sum(p.numel() for p in training.model.parameters() if p.requires_grad),
        "refused": [": ".join(refusal) for refusal in training.cut.report.refused],
        "hardware": dataclasses.asdict(report.hardware),
        "microbatches": report.step.num_microbatch,
        "tokens": report.step.tokens,
        "layers": [dataclasses.asdict(layer) for layer in report.layers],
        "plan": {
            "fwd_plan": [[stage[0], stage[-1] + 1] for stage in report.step.plan.fwd_plan],
            "bwd_plan": [[stage[0], stage[-1] + 1] for stage in report.step.plan.bwd_plan],
            "last_stage_copies": report.step.plan.last_stage_copies,
        },
        "stages": [
            {"kind": one.kind, "layers": list(one.layers), "device": one.index % devices, "seconds": load.compute}
            for one, load in zip(report.step.stages, report.simulated.loads, strict=True)
        ],
        "experts": dict(zip(("bytes", "expected_upload"), report.step.expert_bytes, strict=True)),
        "keep_parameters": report.simulated.keep_parameters,
        "tables": {one.name: "slices" if one.slice_bytes else "rows" for one in report.layers if one.parts_forward},
        "device_memory": [{**dataclasses.asdict(m), "total": m.total} for m in report.device_memory],
        "host_memory": {**dataclasses.asdict(report.host_memory), "total": report.host_memory.total},
        "disk": None if report.disk is None else dataclasses.asdict(report.disk),
        "joined_loss": training.joined_loss(batch=rows, length=length)._asdict(),
        "reference": reference,
        "tokens_to_hide_transfers": {"forward": report.tokens_forward, "backward": report.tokens_backward},
        "step": {
            "seconds": report.simulation.time,
            "seconds_without_transfers": report.simulated.unhindered.time,
            "bubble": report.simulation.bubble,
            "optimizer_seconds": report.simulated.optimizer_seconds,
            "seconds_exact": report.simulate(is_async="exact").seconds,
            "bubbles": report.simulated.bubbles,
            "links": [{"up": up, "down": down} for up, down in report.simulation.links],
            "busy": dict(report.simulated.busy),
            "bottleneck": report.simulated.bottleneck,
        },
        "fits": {"devices": report.fits_devices, "host": report.fits_host},
        "too_large": report.too_large or None,
        "remedy": None if change is None else dataclasses.asdict(change),
    }


def write_plan(
    training: PlannedTraining,
    report: PlanReport,
    change: SettingsChange | None,
    *,
    rows: int,
    length: int,
    details: bool = False,
    is_small: bool = False,
) -> str:
    parts = [*_verdict(report, change), "", *_model(training, report, is_small=is_small)]
    parts += _summary(report, rows, length)
    if report.reference_seconds is not None:
        size = report.host_memory.reference
        what = f"{format_bytes(size)} of the host" if size else "no memory: it is the model without adapters"
        parts += [
            f"The reference model takes {what}.",
            f"  It adds a forward of {format_seconds(report.reference_seconds)} to a step, and needs no device memory.",
        ]
    if not details:
        return "\n".join([*parts, "", "--details adds layers, stages, the parts of memory, and transfers."])
    joined = training.joined_loss(batch=rows, length=length)
    device, host = format_bytes(joined.device), format_bytes(joined.host)
    parts += [
        "",
        f"Layers, on a microbatch of {-(-rows // report.step.num_microbatch)} x {length} tokens",
        *_layers(report),
        *_tables(report),
        "",
        f"{len(report.step.stages)} stages",
        *_stages(report),
        "",
        *_memory(report),
        f"A loss of the whole batch takes {device} on a device and {host} more on the host.",
        "  The first step checks whether the loss needs the whole batch.",
        "",
        *_time(report),
    ]
    return "\n".join(parts)


def _model(training: PlannedTraining, report: PlanReport, *, is_small: bool) -> list[str]:
    parameters = list(training.model.parameters())
    count, trainable = count_weights(training.model), sum(p.numel() for p in parameters if p.requires_grad)
    dtype = str(next(p.dtype for p in parameters if p.is_floating_point())).removeprefix("torch.")
    optim = str(training.optim_dtype or dtype).removeprefix("torch.")
    some = "" if trainable == count else f", of which {format_count(trainable)} are trainable"
    kind = ": a small model with random weights" if is_small else ""
    update = "" if report.step.update == "masters" else f", update {report.step.update}"
    lines = [
        f"{training.cut.report.model}, {format_count(count)} parameters{some}{kind}",
        f"{dtype}, gradients and AdamW in {optim}{update}",
    ]
    if "assumed" in report.hardware.origin.values():
        lines.append("The devices are not on this machine. For better times: --bandwidth, --flops")
    return [*lines, *(f"Not split as requested, {reason}: {text}" for reason, text in training.cut.report.refused)]


def _summary(report: PlanReport, rows: int, length: int) -> list[str]:
    machine, run = report.hardware, report.simulation
    origin = {**dict.fromkeys(("flops", "link", "memory"), "unknown"), **machine.origin}  # a profile may be incomplete
    names = ", ".join(machine.names[:4]) + (f" ... {machine.names[-1]}" if len(machine.names) > 4 else "")
    seconds = format_seconds(report.simulated.optimizer_seconds)
    if report.step.update == "in_backward":
        adam = [["AdamW", seconds, "on the host, during the backward"]]
    else:
        together = format_seconds(report.simulate(is_async="exact").seconds)
        adam = [["then AdamW", seconds, "on the host"], ["together", together, 'with is_async="exact"']]
    memory = ["unknown: give it with --memory"]
    if machine.memory is not None:
        memory = [format_bytes(machine.memory), origin["memory"]]
    return table(
        [
            ["devices", names],
            ["memory", *memory],
            ["copies", f"{format_bytes(machine.link)}/s", origin["link"]],
            ["compute", f"{_operations(machine.flops)}/s", origin["flops"]],
            ["a step", f"{rows} rows of {length} tokens", f"{report.step.num_microbatch} microbatches"],
            ["its time", format_seconds(run.time), f"devices compute {100 * run.utilisation:.0f} % of it"],
            *adam,
            ["bottleneck", report.simulated.bottleneck],
        ]
    )


def _tables(report: PlanReport) -> list[str]:
    lines = []
    for layer in report.layers:
        if not layer.parts_forward:
            continue
        part = "slices of" if layer.slice_bytes else "rows of up to"  # a token may occur twice
        back = f", {format_bytes(layer.parts_down)} back" if layer.parts_down else ""
        copied = format_bytes(layer.parts_forward + layer.parts_backward)
        lines.append(f"    {layer.name}: {part} {copied} in{back}")
    return ["  Tables that stay on the host; each microbatch copies parts of them", *lines] if lines else []


def _layers(report: PlanReport) -> list[str]:
    rows = [("", "parameters", "passed on", "kept", "forward", "backward")]
    for _, group in itertools.groupby(report.layers, lambda layer: dataclasses.replace(layer, name="")):
        one, *others = group
        last = f" to {others[-1].name.rpartition('.')[2]}" if others else ""
        passed_on = "-" if one is report.layers[-1] else format_bytes(one.outputs)
        flops = _operations(one.forward_flops), _operations(one.backward_flops)
        kept = _size(one.held - one.outputs)
        rows.append((f"{one.name}{last}", format_bytes(one.param_bytes), passed_on, kept, *flops))
    lines = table(rows, align="<>>>>>", width=_COLUMNS)
    if any(layer.name.startswith("phase ") for layer in report.layers):
        lines.append("  A phase is code outside of the layers, such as embeddings or the head.")
    return lines


def _size(count: int) -> str:
    return format_bytes(count) if count > 0 else "-"


def _operations(flops: float) -> str:
    if not flops:
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= size:
            return f"{flops / size:.3g} {unit}FLOP"
    return f"{flops / 1e3:.3g} kFLOP"


def _stages(report: PlanReport) -> list[str]:
    stages, sizes = report.step.stages, []
    for stage, load in zip(stages, report.simulated.loads, strict=True):
        mine = [report.layers[index] for index in stage.layers]
        part = len(stage.microbatches(report.step.num_microbatch))  # a copy of a stage runs only some
        down = 0
        if stage.kind != "forward":
            sent = part * report.step.share_bytes(stage)
            down = sum(layer.grad_bytes for layer in mine) if stage.is_last_copy else sent
        sizes.append((stage.kind, len(mine), sum(layer.param_bytes for layer in mine), down, part * load.compute))
    total = sum(size[-1] for size in sizes) or 1.0
    rows = [("", "layers", "copied in", "copied back", "time", "share")]
    for (kind, layers, up, down, seconds), group in itertools.groupby(sizes):
        number = len(list(group))
        count, share = f"{number} {kind}" if number > 1 else kind, f"{100 * number * seconds / total:.1f} %"
        took = format_seconds(seconds) if seconds else "-"
        rows.append((count, str(layers), format_bytes(up), _size(down), took, share))
    lines = table(rows, align="<>>>>>", width=_COLUMNS)
    if any(stage.kind == "fused" for stage in stages):
        lines.append("  A fused stage computes forward and backward at once.")
    whole, expected = report.step.expert_bytes
    if whole and expected == whole:
        copied = f"All {format_bytes(whole)} of experts are copied in each pass"
        lines.append(f"{copied}: the tokens are routed to most experts.")
    elif whole:
        copied = f"At most {format_bytes(expected)} of {format_bytes(whole)} of experts"
        lines += [f"{copied} are expected to be copied in each pass.", "  Devices have room for all experts."]
    return lines


def _memory(report: PlanReport) -> list[str]:
    worst, host = max(report.device_memory, key=lambda memory: memory.total), report.host_memory
    device = report.hardware.names[report.device_memory.index(worst)]
    stage = report.step.stages[worst.stage]
    of_device = {
        "parameters of the stage": worst.parameters,
        "their gradients": worst.gradients,
        "activations of a microbatch": worst.activations,
        "parameters that stay": worst.kept,
        "layers kept for backward": worst.staying,
        "parameters of the next stage": worst.arriving,
        "microbatches in transfer": worst.copies,
    }
    of_host = {
        "weights": host.parameters,
        "gradients": host.gradients,
        "master weights": host.masters,
        "AdamW": host.optimizer,
        "saved activations": host.activations,
        "reference model": host.reference,
    }
    return [
        f"Memory of a device: {format_bytes(worst.total)} at most, in a {stage.kind} stage on {device}",
        *table([(name, format_bytes(size)) for name, size in of_device.items() if size], align="<>"),
        f"Memory of the host: {format_bytes(report.host_bytes)}",
        *([] if report.disk is None else [f"  The disk holds the rest: {format_bytes(report.disk.nbytes)}"]),
        *table([(name, format_bytes(size)) for name, size in of_host.items() if size], align="<>"),
    ]


def _time(report: PlanReport) -> list[str]:
    run, step, disk, machine = report.simulation, report.simulated, report.disk, report.hardware
    adds = run.time - step.unhindered.time
    up, down = (max(link) for link in zip(*run.links, strict=True))
    busy = [[name, format_seconds(seconds)] for name, seconds in step.busy.items() if seconds]
    hidden = max(report.tokens_forward, report.tokens_backward)
    of_disk = []
    if disk is not None:
        of_disk = [
            f"  The disk reads {format_bytes(disk.read)} at {format_bytes(machine.disk_read or 0)}/s.",
            f"  The disk writes {format_bytes(disk.written)} at {format_bytes(machine.disk_write or 0)}/s.",
        ]
    return [
        f"A step takes {format_seconds(run.time)}. Devices are idle for {100 * run.bubble:.0f} % of the step.",
        f"  Transfers add {format_seconds(adds) if adds > 1e-3 * run.time else 'nothing'}.",
        f"  AdamW reads and writes {format_bytes(machine.host_rate)}/s on the host.",
        *of_disk,
        f"A link copies {format_bytes(up)} in and {format_bytes(down)} back in a step.",
        *_kept_instead(report, up),
        "Each part is busy for",
        *table(busy, align="<>"),
        f"Computing hides transfers in steps of {hidden:,.0f} tokens; this step has {report.step.tokens:,}.",
        f"  Forward stages need {report.tokens_forward:,.0f}, backward stages {report.tokens_backward:,.0f}.",
    ]


def _kept_instead(report: PlanReport, up: int) -> list[str]:
    """Suggest ``--keep-parameters auto`` if that reduces the copied bytes by more than 5 % and fits into memory."""
    if report.simulated.keep_parameters or report.too_large:
        return []
    keeping = report.simulate(keep_parameters="auto")
    then = max(link[0] for link in keeping.run.links)
    peak, memory = max(one.total for one in keeping.device_memory), report.hardware.memory
    if then > 0.95 * up or (memory is not None and peak > memory):
        return []
    seconds = format_seconds(keeping.run.time)
    return [f"  With --keep-parameters auto it copies {format_bytes(then)} in, and a step takes {seconds}."]


def _verdict(report: PlanReport, change: SettingsChange | None) -> list[str]:
    needed = format_bytes(max(memory.total for memory in report.device_memory))
    hardware, host = report.hardware, format_bytes(report.host_bytes)
    have = format_bytes(hardware.memory or 0)
    if report.too_large:
        lines = [
            f"Devices: DOES NOT FIT. {report.too_large.partition('. ')[0]}.",
            f"  A device needs {format_bytes(report.least_memory)} for this model.",
        ]
    elif report.fits_devices is None:
        lines = [f"Devices: unknown; they need {needed} each"]
    elif report.fits_devices:
        lines = [f"Devices: fits, {needed} of {have}"]
    else:
        lines = [f"Devices: DOES NOT FIT, {needed} needed of {have}"]
    if change is not None:
        then = f"{change.what}, which takes {format_bytes(change.device_bytes)} of a device."
        lines.append(f"  It fits with {then}" if change.fits else f"  It does not even fit with {then}")
    if hardware.host is None:
        return [*lines, f"Host: unknown; it needs {host}"]
    if report.fits_host:
        return [*lines, f"Host: fits, {host} of {format_bytes(hardware.host)} that are free"]
    lines.append(f"Host: DOES NOT FIT, {host} needed, {format_bytes(hardware.host)} are free")
    remedies, memory = {}, report.host_memory
    if report.step.least_host < 0.9 * memory.total and report.disk is None:
        remedies["--update in_backward"] = report.step.least_host + memory.reference
    if report.step.update == "masters" and memory.gradients > 0.1 * memory.parameters:
        # a reference needs no memory, since it is the model without adapters
        remedies["adapters (--lora 8)"] = memory.parameters + memory.activations
    if memory.masters:
        narrow = memory.total - memory.masters - (memory.gradients + memory.optimizer) // 2
        remedies["--optim-dtype same, less exact,"] = narrow
    for remedy, count in remedies.items():
        verdict = "fits" if count <= hardware.host else "does not fit"
        lines.append(f"  With {remedy} it needs about {format_bytes(count)}, which {verdict}.")
    if report.disk is None:
        lines.append("  With --host disk:DIR the host holds a few layers, and the disk the rest.")
    return lines
