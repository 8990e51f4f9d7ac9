"""Format the report of ``roundpipe plan`` as text of 80 columns, or as a dict for JSON."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from yobx_flatten.errors.failures import format_bytes, table

from ..estimate.report import PlanReport
from ..huggingface.quantize import count_weights
from .option_objects import format_count, format_seconds

if TYPE_CHECKING:
    from ..estimate.report import Reference
    from ..huggingface.plan_training import PlannedTraining, SettingsChange
    from ..schedule.round_robin import Stage


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
    """Return the report as a dict for JSON: sizes in bytes, times in seconds, rates per second."""
    return {
        "model": training.cut.report.model,
        "parameters": _parameters(training),
        "learning": _parameters(training, trainable=True),
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
            {"kind": stage.kind, "layers": list(stage.layers), "device": device, "seconds": seconds}
            for stage, device, seconds in zip(report.step.stages, report.devices, report.seconds, strict=True)
        ],
        "experts": dict(zip(("bytes", "expected_upload"), report.step.expert_bytes, strict=True)),
        "keep_parameters": report.simulated.keep_parameters,
        "tables": {one.name: "slices" if one.slice_bytes else "rows" for one in report.layers if one.parts_forward},
        "device_memory": [{**dataclasses.asdict(m), "total": m.total} for m in report.device_memory],
        "host_memory": {**dataclasses.asdict(report.host_memory), "total": report.host_memory.total},
        "disk": None if report.disk is None else dataclasses.asdict(report.disk),
        "joined_loss": dataclasses.asdict(training.joined_loss(batch=rows, length=length)),
        "reference": None if reference is None else dataclasses.asdict(reference),
        "tokens_to_hide_transfers": {"forward": report.tokens_forward, "backward": report.tokens_backward},
        "step": {
            "seconds": report.simulation.time,
            "seconds_without_transfers": report.simulated.unhindered.time,
            "bubble": report.simulation.bubble,
            "optimizer_seconds": report.simulated.optimizer_seconds,
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


def write_plan(
    training: PlannedTraining,
    report: PlanReport,
    change: SettingsChange | None,
    *,
    rows: int,
    length: int,
    reference: Reference | None = None,
    details: bool = False,
    is_small: bool = False,
) -> str:
    above = [*_verdict(report, change), "", *_model(training, report, is_small=is_small)]
    parts = [*above, *_summary(report, rows, length)]
    if reference is not None:
        parts += _reference(reference)
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
        *_experts(report),
        "",
        *_memory(report),
        f"A loss of the whole batch takes {device} on a device and {host} more on the host.",
        "  The first step checks whether the loss needs the whole batch.",
        "",
        *_time(report),
    ]
    return "\n".join(parts)


# -- what is planned -------------------------------------------------------------------------------------------------


def _parameters(training: PlannedTraining, *, trainable: bool = False) -> int:
    if not trainable:
        return count_weights(training.model)
    return sum(p.numel() for p in training.model.parameters() if p.requires_grad)


def _model(training: PlannedTraining, report: PlanReport, *, is_small: bool) -> list[str]:
    count, trainable = _parameters(training), _parameters(training, trainable=True)
    dtype = str(next(p.dtype for p in training.model.parameters() if p.is_floating_point())).removeprefix("torch.")
    optim = str(training.optim_dtype or dtype).removeprefix("torch.")
    update = report.step.update
    some = "" if trainable == count else f", of which {format_count(trainable)} are trainable"
    kind = ": a small model with random weights" if is_small else ""
    lines = [
        f"{training.cut.report.model}, {format_count(count)} parameters{some}{kind}",
        f"{dtype}, gradients and AdamW in {optim}" + ("" if update == "masters" else f", update {update}"),
    ]
    if "assumed" in report.hardware.origin.values():
        lines.append("The devices are not on this machine. For better times: --bandwidth, --flops")
    return [*lines, *(f"Not split as requested, {reason}: {text}" for reason, text in training.cut.report.refused)]


def _summary(report: PlanReport, rows: int, length: int) -> list[str]:
    machine, run = report.hardware, report.simulation
    origin = {**dict.fromkeys(("flops", "link", "memory"), "unknown"), **machine.origin}  # a profile may be incomplete
    names = ", ".join(machine.names[:4]) + (f" ... {machine.names[-1]}" if len(machine.names) > 4 else "")
    seconds, together = format_seconds(report.simulated.optimizer_seconds), format_seconds(_exact(report))
    adam = [["then AdamW", seconds, "on the host"], ["together", together, 'with is_async="exact"']]
    if report.step.update == "in_backward":
        adam = [["AdamW", seconds, "on the host, during the backward"]]
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


# -- tables ----------------------------------------------------------------------------------------------------------


def _tables(report: PlanReport) -> list[str]:
    """Return lines about embedding and head matrices that stay on the host, with the bytes copied per microbatch."""
    found = [layer for layer in report.layers if layer.parts_forward]
    lines = []
    for layer in found:
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
        rows.append(
            (
                f"{one.name}{last}",
                format_bytes(one.param_bytes),
                "-" if one is report.layers[-1] else format_bytes(one.outputs),
                _size(one.held - one.outputs),
                _operations(one.forward_flops),
                _operations(one.backward_flops),
            )
        )
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
    # a copy of a stage runs only some of the microbatches
    parts = [len(stage.microbatches(report.step.num_microbatch)) for stage in report.step.stages]
    total = sum(part * seconds for part, seconds in zip(parts, report.seconds, strict=True)) or 1.0
    sizes = [
        (
            stage.kind,
            len(stage.layers),
            sum(report.layers[i].param_bytes for i in stage.layers),
            _copied_back(report, stage),
            part * seconds,
        )
        for stage, part, seconds in zip(report.step.stages, parts, report.seconds, strict=True)
    ]
    rows = [("", "layers", "copied in", "copied back", "time", "share")]
    for (kind, layers, up, down, seconds), group in itertools.groupby(sizes):
        number = len(list(group))
        count = f"{number} {kind}" if number > 1 else kind
        share = f"{100 * number * seconds / total:.1f} %"
        rows.append(
            (count, str(layers), format_bytes(up), _size(down), format_seconds(seconds) if seconds else "-", share)
        )
    lines = table(rows, align="<>>>>>", width=_COLUMNS)
    if any(stage.kind == "fused" for stage in report.step.stages):
        lines.append("  A fused stage computes forward and backward at once.")
    return lines


def _experts(report: PlanReport) -> list[str]:
    """Return lines about the expected bytes of mixture-of-experts weights that each pass copies to devices."""
    whole, expected = report.step.expert_bytes
    if not whole:
        return []
    if expected == whole:
        return [f"All {format_bytes(whole)} of experts are copied in each pass: the tokens are routed to most experts."]
    return [
        f"At most {format_bytes(expected)} of {format_bytes(whole)} of experts are expected to be copied in each pass.",
        "  Devices have room for all experts.",
    ]


def _copied_back(report: PlanReport, stage: Stage) -> int:
    """Return the bytes of gradients that a stage copies to the host in a step."""
    if stage.kind == "forward":
        return 0
    if stage.is_last_copy:
        return sum(report.layers[i].grad_bytes for i in stage.layers)
    return len(stage.microbatches(report.step.num_microbatch)) * report.step.share_bytes(stage)


def _memory(report: PlanReport) -> list[str]:
    worst = max(report.device_memory, key=lambda memory: memory.total)
    device = report.hardware.names[report.device_memory.index(worst)]
    rows = [
        ("parameters of the stage", worst.parameters),
        ("their gradients", worst.gradients),
        ("activations of a microbatch", worst.activations),
        ("parameters that stay", worst.kept),
        ("layers kept for backward", worst.staying),
        ("parameters of the next stage", worst.arriving),
        ("microbatches in transfer", worst.copies),
    ]
    stage = report.step.stages[worst.stage]
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


def _reference(found: Reference) -> list[str]:
    what = (
        f"{format_bytes(found.host_bytes)} of the host"
        if found.host_bytes
        else "no memory: it is the model without adapters"
    )
    return [
        f"The reference model takes {what}.",
        f"  It adds a forward of {format_seconds(found.seconds)} to a step, and needs no device memory.",
    ]


def _sizes(named: Sequence[tuple[str, float]]) -> list[str]:
    return table([(name, format_bytes(size)) for name, size in named if size], align="<>")


# -- times and verdict -----------------------------------------------------------------------------------------------


def _time(report: PlanReport) -> list[str]:
    run, step = report.simulation, report.simulated
    adds = run.time - report.simulated.unhindered.time
    up, down = (max(link) for link in zip(*run.links, strict=True))
    busy = [[name, format_seconds(seconds)] for name, seconds in step.busy.items() if seconds]
    hidden = max(report.tokens_forward, report.tokens_backward)
    return [
        f"A step takes {format_seconds(run.time)}. Devices are idle for {100 * run.bubble:.0f} % of the step.",
        f"  Transfers add {format_seconds(adds) if adds > 1e-3 * run.time else 'nothing'}.",
        f"  AdamW reads and writes {format_bytes(report.hardware.host_rate)}/s on the host.",
        *_disk(report),
        f"A link copies {format_bytes(up)} in and {format_bytes(down)} back in a step.",
        *_kept_instead(report, up),
        "Each part is busy for",
        *table(busy, align="<>"),
        f"Computing hides transfers in steps of {hidden:,.0f} tokens; this step has {report.step.tokens:,}.",
        f"  Forward stages need {report.tokens_forward:,.0f}, backward stages {report.tokens_backward:,.0f}.",
    ]


def _disk(report: PlanReport) -> list[str]:
    disk, machine = report.disk, report.hardware
    if disk is None:
        return []
    return [
        f"  The disk reads {format_bytes(disk.read)} at {format_bytes(machine.disk_read or 0)}/s.",
        f"  The disk writes {format_bytes(disk.written)} at {format_bytes(machine.disk_write or 0)}/s.",
    ]


def _kept_instead(report: PlanReport, up: int) -> list[str]:
    """Suggest ``--keep-parameters auto`` if the option reduces the copied bytes by over 5 % and memory is enough."""
    if report.simulated.keep_parameters or report.too_large:
        return []
    keeping = report.simulate(keep_parameters="auto")
    then = max(link[0] for link in keeping.run.links)
    peak, memory = max(one.total for one in keeping.device_memory), report.hardware.memory
    if then > 0.95 * up or (memory is not None and peak > memory):
        return []
    return [
        f"  With --keep-parameters auto it copies {format_bytes(then)} in, and a step takes "
        f"{format_seconds(keeping.run.time)}."
    ]


def _exact(report: PlanReport) -> float:
    """Return the seconds of a step with ``is_async="exact"``: the optimizer runs in parallel with the next run."""
    return report.simulate(is_async="exact").seconds


def _verdict(report: PlanReport, change: SettingsChange | None) -> list[str]:
    needed = format_bytes(max(memory.total for memory in report.device_memory))
    hardware, host = report.hardware, format_bytes(report.host_bytes)
    have = format_bytes(hardware.memory or 0)
    lines = []
    if report.too_large:
        lines.append(f"Devices: DOES NOT FIT. {report.too_large.partition('. ')[0]}.")
        lines.append(f"  A device needs {format_bytes(report.least_memory)} for this model.")
    elif report.fits_devices is None:
        lines.append(f"Devices: unknown; they need {needed} each")
    elif report.fits_devices:
        lines.append(f"Devices: fits, {needed} of {have}")
    else:
        lines.append(f"Devices: DOES NOT FIT, {needed} needed of {have}")
    if change is not None:
        then = f"{change.what}, which takes {format_bytes(change.device_bytes)} of a device."
        lines.append(f"  It fits with {then}" if change.fits else f"  It does not even fit with {then}")
    if hardware.host is None:
        return [*lines, f"Host: unknown; it needs {host}"]
    if report.fits_host:
        return [*lines, f"Host: fits, {host} of {format_bytes(hardware.host)} that are free"]
    return [
        *lines,
        f"Host: DOES NOT FIT, {host} needed, {format_bytes(hardware.host)} are free",
        *_host_remedies(report),
    ]


def _host_remedies(report: PlanReport) -> list[str]:
    host, free = report.host_memory, report.hardware.host or 0

    def line(option: str, count: int) -> str:
        verdict = "fits" if count <= free else "does not fit"
        return f"  With {option} it needs about {format_bytes(count)}, which {verdict}."

    lines = []
    if report.step.least_host < 0.9 * host.total and report.disk is None:
        least = report.step.least_host + host.reference
        lines.append(line("--update in_backward", least))
    if report.step.update == "masters" and host.gradients > 0.1 * host.parameters:
        # a reference needs no memory, since it is the model without adapters
        lines.append(line("adapters (--lora 8)", host.parameters + host.activations))
    if host.masters:
        narrow = host.total - host.masters - (host.gradients + host.optimizer) // 2
        lines.append(line("--optim-dtype same, less exact,", narrow))
    if report.disk is None:
        lines.append("  With --host disk:DIR the host holds a few layers, and the disk the rest.")
    return lines
