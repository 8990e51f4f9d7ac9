"""``roundpipe doctor``: check libraries, accelerators, speed and correct results, and print the findings."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import shutil
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import torch
import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch import nn

from yobx_flatten.core.terminal.command_line import CHECK_FAILED, console, progress, say, say_json
from yobx_flatten.errors import NEWEST_TRIED, untried_versions
from yobx_flatten.errors.failures import first_line, format_bytes, result_or

from ..device.accelerator import AcceleratorDevice, DeviceSpec, accelerators, memory_info
from ..device.worker import generator_kept
from ..engine.config import RoundPipeRunConfig
from ..engine.planner import FOR_PARAMETERS
from ..errors import ConfigError
from ..estimate.hardware import (
    call_seconds,
    cores,
    describe_hardware,
    host_memory_available,
    host_memory_rate,
    measure_device,
    measure_disk,
    save_machine,
)
from ..optim.step import OptimizerCtx
from ..pipeline import RoundPipe

Status = Literal["ok", "warning", "fail"]


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    name: str  # subject of the check
    status: Status  # `"ok"`; `"warning"`, something is missing or slow; `"fail"`, it does not work
    found: str  # the finding, in words
    remedy: str = ""  # the advice; empty if there is nothing to do

    @classmethod
    def of(cls, name: str, found: str, is_good: bool, remedy: str) -> Check:
        return cls(name, "ok", found) if is_good else cls(name, "warning", found, remedy)


_PACKAGE = "yobx-flatten"

# Optional libraries of a training, with the features that need them.
_LIBRARIES = {
    "torch": "nothing works",
    "transformers": "Hugging Face models cannot be trained",
    "safetensors": "no checkpoint can be saved",
    "accelerate": "RoundPipeTrainer and roundpipe train cannot run",
    "peft": "adapters (LoRA) cannot be trained",
    "datasets": "roundpipe train cannot read Parquet, CSV and folders of datasets",
    "trl": "roundpipe train needs a chat template that marks answers",
}

HERE = pathlib.Path()
_LITTLE_MEMORY, _LITTLE_DISK, _NO_DISK = 4e9, 20e9, 500e6
# Rounding in float32 of sums that two devices add up in different orders.
_ROUNDING = 1e-4


def examine(folder: pathlib.Path = HERE) -> list[Check]:
    """Run all checks of ``roundpipe doctor`` and return their results.

    An error in a check is a failed result. One check trains a small model on every kind of device for two steps.
    """
    # folder: folder whose disk is checked. Default: the current one.
    checks: dict[str, Callable[[], list[Check]]] = {
        "versions": _versions,
        "accelerators": _accelerators,
        "memory": _memory,
        "pinned memory": _pinned,
        "threads": _threads,
        "disk": partial(_disk, folder),
        "speed of the disk": partial(_speed_of_disk, folder),
        "speed of accelerators": lambda: [check for device in accelerators() for check in device_checks(device)],
        "training": _training,
    }

    def broken(name: str, error: Exception) -> list[Check]:
        return [Check(name, "fail", f"{type(error).__name__}: {first_line(error)}", "Report this.")]

    return [found for name, check in checks.items() for found in result_or(check, partial(broken, name))]


def _versions() -> list[Check]:
    try:
        lines = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # the package runs from a clone that is not installed
        lines = []
    ranges = {one.name: one.specifier for one in map(Requirement, lines) if one.specifier}
    found = [Check("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")]
    return found + [_version(name, lost, ranges.get(name, SpecifierSet())) for name, lost in _LIBRARIES.items()]


def _version(name: str, lost: str, wanted: SpecifierSet) -> Check:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        line = f"pip install '{name}{wanted}'"
        return Check(name, "fail" if name == "torch" else "warning", f"not installed, so {lost}", line)
    if not wanted.contains(version, prereleases=True):
        return Check(name, "fail", f"{version}, and {wanted} is needed", f"pip install '{name}{wanted}'")
    for untried in untried_versions():
        if untried.library == name:
            line = f"If something fails, install that version: pip install '{name}<={untried.tried}'"
            return Check(name, "warning", f"{version}, newer than the newest tried ({untried.tried})", line)
    return Check(name, "ok", f"{version} (newest tried: {NEWEST_TRIED[name]})" if name in NEWEST_TRIED else version)


def _accelerators() -> list[Check]:
    found = []
    for device in accelerators():
        library = torch.get_device_module(device)
        name = library.get_device_name(device) if hasattr(library, "get_device_name") else device.type
        memory = memory_info(device)
        free = "" if memory is None else f", {format_bytes(memory[0])} of {format_bytes(memory[1])} free"
        found.append(Check(str(device), "ok", f"{name}{free}"))
    if found:
        return found
    if pathlib.Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None:
        lost = f"an NVIDIA driver is installed, but torch {torch.__version__} finds no device"
        line = "Install a torch with CUDA (pytorch.org/get-started), and look at nvidia-smi and CUDA_VISIBLE_DEVICES."
        return [Check("accelerators", "fail", lost, line)]
    return [Check("accelerators", "warning", "none found: training runs on virtual devices, simulated on the CPU")]


def _memory() -> list[Check]:
    free = host_memory_available()
    found = f"{format_bytes(free)} free; it moves {format_bytes(host_memory_rate())}/s"
    remedy = "The model, its gradients and the optimizer need this memory: see roundpipe plan."
    return [Check.of("host memory", found, free >= _LITTLE_MEMORY, remedy)]


def _pinned() -> list[Check]:
    if not accelerators():
        return [Check("pinned memory", "ok", "not needed without an accelerator")]
    try:
        torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        line = "Raise the limit of locked memory (ulimit -l unlimited), or train with pin_model='off', which is slower."
        return [Check("pinned memory", "fail", first_line(error), line)]
    return [Check("pinned memory", "ok", "64 MB were pinned")]


def _threads() -> list[Check]:
    have, used = cores(), torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS")
    text = f"{have} cores, of which torch uses {used} at a time" + (f", OMP_NUM_THREADS={setting}" if setting else "")
    devices = 0 if accelerators() else 2
    line = ""
    if used > have:
        line = f"Use no more threads than cores: OMP_NUM_THREADS={have}"
    elif devices and used * devices > have and have > 1:
        line = f"{devices} virtual devices compute at the same time: OMP_NUM_THREADS={max(1, have // devices)}"
    elif not devices and 2 * used < have:
        line = "AdamW on the CPU is slow with few threads: unset OMP_NUM_THREADS"
    return [Check.of("threads", text, not line, line)]


def _disk(folder: pathlib.Path = HERE) -> list[Check]:
    free, place = shutil.disk_usage(folder).free, "the current folder" if folder == HERE else str(folder)
    status: Status = "fail" if free < _NO_DISK else "warning" if free < _LITTLE_DISK else "ok"
    remedy = "" if status == "ok" else "Checkpoints take 12 bytes and more per parameter: choose another --checkpoint."
    return [Check("disk", status, f"{format_bytes(free)} free in {place}", remedy)]


def _speed_of_disk(folder: pathlib.Path) -> list[Check]:
    try:
        rates = measure_disk(folder)
    except ConfigError as error:
        line = "A training with --host disk:DIR needs a disk: name a folder on one, roundpipe doctor --disk DIR."
        return [Check("speed of the disk", "warning", first_line(error), line)]
    found = f"it reads {format_bytes(rates.read)}/s and writes {format_bytes(rates.write)}/s"
    return [Check("speed of the disk", "ok", found)]


def _training() -> list[Check]:
    here = [str(device) for device in accelerators()]
    devices: dict[str, DeviceSpec] = {"2 virtual devices": "virtual:2"} | ({", ".join(here): here} if here else {})
    found = []
    for name, those in devices.items():
        title, difference = f"training on {name}", train_difference(those)
        if difference < _ROUNDING:
            found.append(Check(title, "ok", f"two steps match plain PyTorch, except for {difference:.0e}"))
        else:  # also for NaN
            lost = f"differs from plain PyTorch by {difference:.1e}"
            found.append(Check(title, "fail", lost, "Report this, with these lines."))
    return found


def train_difference(devices: DeviceSpec) -> float:
    """Return the relative difference of losses and weights after two steps of a pipeline and of plain PyTorch."""
    with generator_kept():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4))
        batches = [(torch.randn(10, 16), torch.randn(10, 4)) for _ in range(2)]
    loss_fn = nn.functional.mse_loss
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)
    with contextlib.closing(RoundPipe(copy.deepcopy(plain), devices=devices, model_run_config=config)) as pipeline:
        with OptimizerCtx():
            optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        other = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        pairs = []
        for inputs, labels in batches:
            loss = pipeline.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
            pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            expected = loss_fn(plain(inputs), labels)
            expected.backward()
            other.step()
            other.zero_grad()
            pairs.append((loss, expected.detach()))
        both = zip(pipeline.parameters(), plain.parameters(), strict=True)
        pairs += [(one.detach(), two.detach()) for one, two in both]
    scale = max(float(expected.abs().max()) for _, expected in pairs)
    return max(float((one - expected).abs().max()) for one, expected in pairs) / scale


def doctor(
    machine: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Also write the measured rates and sizes to this file, for plan --machine."),
    ] = None,
    disk: Annotated[
        pathlib.Path,
        typer.Option(
            metavar="DIR",
            help="Folder whose disk is checked: space and speed for roundpipe train --host disk:DIR (weights on disk).",
        ),
    ] = HERE,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check this installation: versions, devices, memory, threads, disk, and a short training.

    Each result begins with ok, warning or fail. After a warning or fail, a line beginning with -> states what to do.

    Exit status: 0 no check failed; 1 a check failed.
    """
    with progress("checking this machine, and training for two steps"):
        findings = examine(disk)
        if machine is not None:
            measured = dataclasses.replace(describe_hardware(), call=call_seconds())
            with contextlib.suppress(ConfigError):  # the folder is in memory, which is a separate finding
                rates = measure_disk(disk)
                measured = dataclasses.replace(measured, disk_read=rates.read, disk_write=rates.write)
            save_machine(measured, machine)
    failed = any(finding.status == "fail" for finding in findings)
    if json:
        say_json({"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        lines, width = list[str](), min(console().width, 100)
        for one in findings:
            lines += textwrap.wrap(f"{one.status:<8} {one.name}: {one.found}", width, subsequent_indent=" " * 9)
            if one.remedy:
                lines += textwrap.wrap(f"-> {one.remedy}", width, initial_indent=" " * 9, subsequent_indent=" " * 12)
        counts = {status: sum(one.status == status for one in findings) for status in ("fail", "warning")}
        states = [f"{count} {status}{'s' if count > 1 else ''}" for status, count in counts.items() if count]
        say("\n".join([*lines, "", ", ".join(states) if states else "all is well"]))
        if machine is not None:
            say(f"\nrates and sizes are in {machine}")
    return CHECK_FAILED if failed else 0


_SLOW_LINK = 6e9  # every device waits for a link that is slower than PCIe 3 with 8 lanes
_OVERLAPS = 0.7  # a copy that overlaps a computation uses some of its memory bandwidth
_CLOCKS_AGREE = 0.5, 1.2  # the clock of the host includes launches and other work of the machine


def device_checks(device: torch.device) -> list[Check]:
    rates = measure_device(device)
    up, down, both = (format_bytes(rate) for rate in (rates.up, rates.down, rates.both))
    pageable = f"{format_bytes(rates.pageable_up)}/s and {format_bytes(rates.pageable_down)}/s"
    link = Check.of(
        f"link of {device}",
        f"{up}/s up, {down}/s down, {both}/s both at once; from and to memory that is not pinned {pageable}",
        min(rates.up, rates.down) >= _SLOW_LINK,
        "Transfers are too slow to overlap with computing. Is the card in a slot with all lanes?",
    )
    speed = Check(f"speed of {device}", "ok", f"{rates.flops / 1e12:.0f} TFLOP/s in bfloat16 matrix products")
    streams = Check.of(
        f"streams of {device}",
        f"{rates.overlap:.0%} of a copy overlaps with a computation",
        rates.overlap >= _OVERLAPS,
        "Copies wait for kernels. Unset CUDA_LAUNCH_BLOCKING, and stop other programs that use it.",
    )
    slowest, fastest = _CLOCKS_AGREE
    events = Check.of(
        f"events of {device}",
        f"its clock shows {rates.clock:.2f} s during one second of the host's clock",
        slowest <= rates.clock <= fastest,
        "roundpipe plan would use this wrong clock: measure again.",
    )
    tokens, memory = rates.tokens_to_hide_transfers(), AcceleratorDevice(device).memory
    found = f"from {tokens:,.0f} tokens per step on, a forward takes longer than copying its parameters to the device"
    if memory is not None:  # 16-bit parameters and gradients
        found += f"; models of up to {FOR_PARAMETERS * memory / 4e9:.1f} billion 16-bit parameters fit on it"
    return [link, speed, streams, events, Check(f"plan for {device}", "ok", found)]
