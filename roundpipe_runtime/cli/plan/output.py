"""Show a plan in words and tables for 80 columns, and as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from yobx_flatten.errors.messages import format_bytes, table

from ...estimate.joined_loss import JoinedLoss
from ...estimate.report import PlanReport
from ...huggingface.quantize import count_weights
from ..quantities import format_count, format_seconds

if TYPE_CHECKING:
    from ...estimate.layer_footprint import LayerFootprint
    from ...estimate.reference import Reference
    from ...huggingface.plan_training import PlannedTraining, SettingsChange
    from ...schedule.round_robin import Stage

_COLUMNS = 78


def as_dict(
    training: PlannedTraining,
    report: PlanReport,
    change: SettingsChange | None,
    *,
    rows: int,
    length: int,
    reference: Reference | None = None,
) -> dict[str, Any]:
    """Return everything for JSON: sizes in bytes, times in seconds, rates per second."""
    return {
        "model": training.cut.report.model,
        "parameters": _parameters(training),
        "learning": _parameters(training, trainable=True),
        "refused": [": ".join(refusal) for refusal in training.cut.report.refused],
        "hardware": dataclasses.asdict(report.hardware),
        "microbatches": report.num_microbatch,
        "tokens": report.tokens,
        "layers": [dataclasses.asdict(layer) for layer in report.layers],
        "plan": {
            "fwd_plan": [[stage[0], stage[-1] + 1] for stage in report.plan.fwd_plan],
            "bwd_plan": [[stage[0], stage[-1] + 1] for stage in report.plan.bwd_plan],
            "last_stage_copies": report.plan.last_stage_copies,
        },
        "stages": [
            {"kind": stage.kind, "layers": list(stage.layers), "device": device, "seconds": seconds}
            for stage, device, seconds in zip(report.stages, report.devices, report.seconds, strict=True)
        ],
        "experts": dict(zip(("bytes", "expected_upload"), report.step.expert_bytes, strict=True)),
        "keep_parameters": report.simulated.keep_parameters,
        "tables": {layer.name: _way_of_tables(layer) for layer in report.layers if layer.parts_forward},
        "device_memory": [{**dataclasses.asdict(m), "total": m.total} for m in report.device_memory],
        "host_memory": {**dataclasses.asdict(report.host_memory), "total": report.host_memory.total},
        "disk": None if report.disk is None else dataclasses.asdict(report.disk),
        "joined_loss": dataclasses.asdict(training.joined_loss(batch=rows, length=length)),
        "reference": None if reference is None else dataclasses.asdict(reference),
        "tokens_to_hide_transfers": {"forward": report.tokens_forward, "backward": report.tokens_backward},
        "step": {
            "seconds": report.simulation.time,
            "seconds_without_transfers": report.unhindered.time,
            "bubble": report.simulation.bubble,
            "optimizer_seconds": report.optimizer_seconds,
            "seconds_exact": _exact(report),
            "bubbles": report.simulated.bubbles,
            "links": [{"up": up, "down": down} for up, down in report.simulation.links],
            "busy": dict(report.simulated.busy),
            "bottleneck": report.simulated.bottleneck,
        },
        "fits": {"devices": report.fits_devices, "host": report.fits_host},
        "too_large": report.too_large or None,
        "remedy": None if change is None else dataclasses.asdict(change),
    }


def _way_of_tables(layer: LayerFootprint) -> str:
    return "slices" if layer.slice_bytes else "rows"


def write_plan(
    training: PlannedTraining,
    report: PlanReport,
    change: SettingsChange | None,
    *,
    rows: int,
    length: int,
    reference: Reference | None = None,
) -> str:
    """Return the plan as text."""
    largest = -(-rows // report.num_microbatch)
    parts = [
        *_model(training, report),
        f"A step: {rows} rows of {length} tokens, {report.tokens:,} in all, in {report.num_microbatch} microbatches",
        "",
        f"Layers, on a microbatch of {largest} x {length} tokens",
        *_layers(report),
        *_tables(report),
        "",
        f"{len(report.stages)} stages",
        *_stages(report),
        *_experts(report),
        "",
        *_memory(report),
        *_joined_loss(training.joined_loss(batch=rows, length=length)),
        *([] if reference is None else _reference(reference)),
        "",
        *_time(report),
        "",
        *_verdict(report, change),
    ]
    return "\n".join(parts)


# -- what is planned -------------------------------------------------------------------------------------------------


def _parameters(training: PlannedTraining, *, trainable: bool = False) -> int:
    if not trainable:
        return count_weights(training.model)
    return sum(p.numel() for p in training.model.parameters() if p.requires_grad)


def _model(training: PlannedTraining, report: PlanReport) -> list[str]:
    count, trainable = _parameters(training), _parameters(training, trainable=True)
    dtype = str(next(p.dtype for p in training.model.parameters() if p.is_floating_point())).removeprefix("torch.")
    optim = str(training.optim_dtype or dtype).removeprefix("torch.")
    some = "" if trainable == count else f", of which {format_count(trainable)} are trainable"
    hardware = report.hardware
    devices = ", ".join(hardware.names[:4]) + (f" ... {hardware.names[-1]}" if len(hardware.names) > 4 else "")
    memory = "unknown, give it with --memory" if hardware.memory is None else format_bytes(hardware.memory)
    origin = {**dict.fromkeys(("flops", "link", "memory"), "unknown"), **hardware.origin}  # a file may state fewer
    lines = [
        f"{training.cut.report.model}, {format_count(count)} parameters{some}",
        f"{dtype}, gradients and AdamW in {optim}",
        "",
        f"Devices: {devices}",
        *table(
            [
                ["memory", memory, origin["memory"]] if hardware.memory else ["memory", memory],
                ["link", f"{format_bytes(hardware.link)}/s", origin["link"]],
                ["compute", f"{_operations(hardware.flops)}/s", origin["flops"]],
            ]
        ),
    ]
    if "assumed" in origin.values():
        lines.append("  They are not here. What is assumed you can give: --bandwidth, --flops")
    refused = [f"Not cut as wished, {reason}: {text}" for reason, text in training.cut.report.refused]
    return [*lines, "", *refused]


# -- tables ----------------------------------------------------------------------------------------------------------


def _tables(report: PlanReport) -> list[str]:
    """Which large tables stay on the host, and the bytes of their parts that a microbatch copies."""
    found = [layer for layer in report.layers if layer.parts_forward]
    lines = []
    for layer in found:
        part = "slices of" if layer.slice_bytes else "rows of up to"  # tokens may come twice
        back = f", {format_bytes(layer.parts_down)} back" if layer.parts_down else ""
        copied = format_bytes(layer.parts_forward + layer.parts_backward)
        lines.append(f"    {layer.name}: {part} {copied} in{back}")
    return ["  Tables that stay on the host, of which a microbatch copies parts", *lines] if lines else []


def _layers(report: PlanReport) -> list[str]:
    rows = [("", "parameters", "passed on", "kept", "forward", "backward")]
    for name, same in _runs(report.layers, lambda layer: dataclasses.replace(layer, name="")):
        one = same[0]
        rows.append(
            (
                name(lambda layer: str(layer.name)),
                format_bytes(one.param_bytes),
                "-" if one is report.layers[-1] else format_bytes(one.outputs),
                _size(one.held - one.outputs),
                _operations(one.forward_flops),
                _operations(one.backward_flops),
            )
        )
    return table(rows, align="<>>>>>", width=_COLUMNS)


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
    parts = [len(stage.microbatches(report.num_microbatch)) for stage in report.stages]  # of a copy, a share
    total = sum(part * seconds for part, seconds in zip(parts, report.seconds, strict=True)) or 1.0
    sizes = [
        (
            stage.kind,
            len(stage.layers),
            sum(report.layers[i].param_bytes for i in stage.layers),
            _copied_back(report, stage),
            part * seconds,
        )
        for stage, part, seconds in zip(report.stages, parts, report.seconds, strict=True)
    ]
    rows = [("", "layers", "copied in", "copied back", "time", "share")]
    for _, same in _runs(sizes, lambda size: size):
        kind, layers, up, down, seconds = same[0]
        count = f"{len(same)} {kind}" if len(same) > 1 else kind
        share = f"{100 * len(same) * seconds / total:.1f} %"
        rows.append(
            (count, str(layers), format_bytes(up), _size(down), format_seconds(seconds) if seconds else "-", share)
        )
    return table(rows, align="<>>>>>", width=_COLUMNS)


def _experts(report: PlanReport) -> list[str]:
    """The line on the expected upload of experts; no line for a model without experts."""
    whole, expected = report.step.expert_bytes
    if not whole:
        return []
    if expected == whole:
        return [f"Experts: all {format_bytes(whole)} go up in each pass, as these tokens are routed to most of them"]
    return textwrap.wrap(
        f"Experts: of {format_bytes(whole)}, {format_bytes(expected)} are expected to go up in each pass, with tokens "
        "routed evenly, and fewer otherwise; devices have room for all of them",
        _COLUMNS,
        subsequent_indent="  ",
    )


def _copied_back(report: PlanReport, stage: Stage) -> int:
    """Gradients of the stage; of a copy, those of each microbatch, unless it is the one that adds them up."""
    if stage.kind == "forward":
        return 0
    if stage.is_last_copy:
        return sum(report.layers[i].grad_bytes for i in stage.layers)
    return len(stage.microbatches(report.num_microbatch)) * report.step.share_bytes(stage)


def _memory(report: PlanReport) -> list[str]:
    worst = max(report.device_memory, key=lambda memory: memory.total)
    device = report.hardware.names[report.device_memory.index(worst)]
    rows = [
        ("parameters of the stage", worst.parameters),
        ("their gradients", worst.gradients),
        ("a microbatch on its way", worst.activations),
        ("parameters that stay there", worst.kept),
        ("layers that go back there", worst.staying),
        ("parameters that arrive", worst.arriving),
        ("copies under way", worst.copies),
    ]
    stage = report.stages[worst.stage]
    host = report.host_memory
    return [
        f"Memory of a device: {format_bytes(worst.total)} at most, in a {stage.kind} stage on {device}",
        *_sizes(rows),
        f"Memory of the host: {format_bytes(report.host_bytes)}",
        *([] if report.disk is None else [f"  The disk holds the rest: {format_bytes(report.disk.nbytes)}"]),
        *_sizes(
            [
                ("weights", host.parameters),
                ("gradients", host.gradients),
                ("master weights", host.masters),
                ("AdamW", host.optimizer),
                ("saved activations", host.activations),
                ("reference model", host.reference),
            ]
        ),
    ]


def _joined_loss(found: JoinedLoss) -> list[str]:
    device, host = format_bytes(found.device), format_bytes(found.host)
    return [
        f"A loss of the whole batch: {device} on a device, {host} more on the host",
        "  The first step proves whether the loss adds up over microbatches, or needs it",
    ]


def _reference(found: Reference) -> list[str]:
    what = f"{format_bytes(found.host_bytes)} of the host" if found.host_bytes else "the model without its adapters"
    return [
        f"A reference model: {what}, and a forward of {format_seconds(found.seconds)} before a step",
        "  Its stages run before those of the step: devices need no more memory",
    ]


def _sizes(named: Sequence[tuple[str, float]]) -> list[str]:
    return table([(name, format_bytes(size)) for name, size in named if size], align="<>")


def _runs(items: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    """Neighbours that are the same, and a function that names them: the first one, and the last."""
    found = []
    for _, group in itertools.groupby(items, key):
        same = list(group)
        found.append((_namer(same), same))
    return found


def _namer(same: list[Any]) -> Callable[[Callable[[Any], str]], str]:
    def name(of: Callable[[Any], str]) -> str:
        first, last = of(same[0]), of(same[-1])
        return first if len(same) == 1 else f"{first} to {last.rpartition('.')[2]}"

    return name


# -- times and verdict -----------------------------------------------------------------------------------------------


def _time(report: PlanReport) -> list[str]:
    run, step = report.simulation, report.simulated
    adds = run.time - report.unhindered.time
    needed = max(report.tokens_forward, report.tokens_backward)
    up, down = (max(link) for link in zip(*run.links, strict=True))
    busy = [f"{name} {format_seconds(seconds)}" for name, seconds in step.busy.items() if seconds]
    return [
        f"A step takes {format_seconds(run.time)} at these rates; devices compute {100 * run.utilisation:.0f} % of it, "
        f"bubble {100 * run.bubble:.0f} %",
        f"  of that, transfers add {format_seconds(adds) if adds > 1e-3 * run.time else 'nothing'}",
        f"  AdamW then takes about {format_seconds(report.optimizer_seconds)} on this host, "
        f"which moves {format_bytes(report.hardware.host_rate)}/s",
        *_disk(report),
        f'  next to it, is_async="exact", both take {format_seconds(_exact(report))} instead of '
        f"{format_seconds(run.time + report.optimizer_seconds)}",
        f"A link copies {format_bytes(up)} in and {format_bytes(down)} back in a step",
        *_kept_instead(report, up),
        *textwrap.wrap("Busy: " + ", ".join(busy), _COLUMNS, subsequent_indent="  "),
        f"  {step.bottleneck} is busy longest",
        f"Transfers overlap with computing from {needed:,.0f} tokens a step on; there are {report.tokens:,}",
        f"  ({report.tokens_forward:,.0f} in forward stages, {report.tokens_backward:,.0f} in backward stages)",
    ]


def _disk(report: PlanReport) -> list[str]:
    """What a step moves on the disk, if the state is on one."""
    disk, machine = report.disk, report.hardware
    if disk is None:
        return []
    read = disk.read_in_run + disk.read_for_norm + disk.read_in_step
    written = disk.written_in_run + disk.written_in_step
    return [
        f"  The disk reads {format_bytes(read)} in it, at {format_bytes(machine.disk_read or 0)}/s, and writes "
        f"{format_bytes(written)}, at {format_bytes(machine.disk_write or 0)}/s"
    ]


def _kept_instead(report: PlanReport, up: int) -> list[str]:
    """What a link copies if parameters stay on devices, where that is clearly less and fits."""
    if report.simulated.keep_parameters or report.too_large:
        return []
    keeping = report.simulate(keep_parameters="auto")
    then = max(link[0] for link in keeping.run.links)
    peak, memory = max(one.total for one in keeping.device_memory), report.hardware.memory
    if then > 0.95 * up or (memory is not None and peak > memory):
        return []
    return [
        f"  With --keep-parameters auto it copies {format_bytes(then)} in, and a step takes "
        f"{format_seconds(keeping.run.time)}"
    ]


def _exact(report: PlanReport) -> float:
    """Seconds of a step whose optimizer runs next to the run that follows."""
    return report.simulate(is_async="exact").seconds


def _verdict(report: PlanReport, change: SettingsChange | None) -> list[str]:
    needed = max(memory.total for memory in report.device_memory)
    host, hardware = report.host_memory, report.hardware
    lines = []
    if report.too_large:
        lines.append(f"Devices: DOES NOT FIT. {report.too_large.partition('. ')[0]}.")
        lines.append(f"  A device needs {format_bytes(report.least_memory)} for this model")
    elif report.fits_devices is None:
        lines.append(f"Devices: unknown; they need {format_bytes(needed)} each")
    elif report.fits_devices:
        lines.append(f"Devices: fits, {format_bytes(needed)} of {format_bytes(hardware.memory or 0)}")
    else:
        lines.append(f"Devices: DOES NOT FIT, {format_bytes(needed)} needed of {format_bytes(hardware.memory or 0)}")
    if change is not None:
        then = f"{change.what}: {format_bytes(change.device_bytes)} of a device"
        lines.append(f"  It fits with {then}" if change.fits else f"  Not even with {then}")
    if hardware.host is None:
        lines.append(f"Host: unknown; it needs {format_bytes(report.host_bytes)}")
    elif report.fits_host:
        lines.append(f"Host: fits, {format_bytes(report.host_bytes)} of {format_bytes(hardware.host)} that are free")
    else:
        needed = report.host_bytes
        lines.append(f"Host: DOES NOT FIT, {format_bytes(needed)} needed, {format_bytes(hardware.host)} are free")
        frozen = host.parameters + host.activations  # with adapters, a reference is the model without them
        if host.gradients > 0.1 * host.parameters:
            lines.append(f"  With adapters, --lora 8, it needs little more than {format_bytes(frozen)}")
        if host.masters:
            narrow = host.total - host.masters - (host.gradients + host.optimizer) // 2
            lines.append(f"  With --optim-dtype same it needs {format_bytes(narrow)}, and rounds more")
        if report.disk is None:
            lines.append("  With --host disk:DIR a few layers of it are in memory, and the rest on a disk")
    return lines
