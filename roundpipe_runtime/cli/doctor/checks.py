"""Check an installation: libraries, speed, and correct results."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import pathlib
import platform
import shutil
from collections.abc import Callable
from functools import partial

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch import nn

from yobx_flatten.errors.failures import result_or
from yobx_flatten.errors.messages import first_line, format_bytes
from yobx_flatten.errors.tried_versions import NEWEST_TRIED, untried_versions

from ...device.accelerator import DeviceSpec, memory_info
from ...device.generator import generator_kept
from ...engine.config import RoundPipeRunConfig
from ...errors import ConfigError
from ...estimate.device_rates import measure_disk
from ...estimate.hardware import cores, host_memory_available, host_memory_rate
from ...optim.step import OptimizerCtx
from ...pipeline import RoundPipe
from .devices import Check, Status, device_checks

_PACKAGE = "yobx-flatten"

# Libraries that a training can use, with what is left out without them.
_LIBRARIES = {
    "torch": "nothing works",
    "transformers": "Hugging Face models cannot be trained",
    "safetensors": "no checkpoint can be saved",
    "accelerate": "RoundPipeTrainer and roundpipe train cannot run",
    "peft": "adapters (LoRA) cannot be trained",
}

HERE = pathlib.Path()
_LITTLE_MEMORY, _LITTLE_DISK, _NO_DISK = 4e9, 20e9, 500e6
# Sums in another order: float32, of one device and of another.
_ROUNDING = 1e-4


def examine(folder: pathlib.Path = HERE) -> list[Check]:
    """Return the findings in the order of the checks; a check that raises is also a finding.

    Two steps of a small training run on every kind of device that is here; it takes seconds.
    """
    # folder: folder whose disk is looked at. Default: the current one.
    checks: list[tuple[str, Callable[[], list[Check]]]] = [
        ("versions", _versions),
        ("accelerators", _accelerators),
        ("memory", _memory),
        ("pinned memory", _pinned),
        ("threads", _threads),
        ("disk", partial(_disk, folder)),
        ("speed of the disk", partial(_speed_of_disk, folder)),
        ("speed of accelerators", _speed),
        ("training", _training),
    ]
    return [found for name, check in checks for found in result_or(check, partial(_broken, name))]


def _broken(name: str, error: Exception) -> list[Check]:
    """The result of a check that raised an error, which the user wants to know."""
    return [Check(name, "fail", f"{type(error).__name__}: {first_line(error)}", "Report this.")]


# -- what is installed -----------------------------------------------------------------------------------------------


def _versions() -> list[Check]:
    ranges = _declared()
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


def _declared() -> dict[str, SpecifierSet]:
    """The versions that this package asks for, of every library that some extra installs."""
    try:
        lines = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # a clone that is on the path and not installed
        return {}
    return {found.name: found.specifier for found in map(Requirement, lines) if found.specifier}


# -- the machine -----------------------------------------------------------------------------------------------------


def accelerators() -> list[torch.device]:
    """Return the accelerators that torch finds here."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [] if kind is None else [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]


def _accelerators() -> list[Check]:
    found = accelerators()
    if found:
        return [Check(str(device), "ok", _described(device)) for device in found]
    driver = pathlib.Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if driver:
        return [
            Check(
                "accelerators",
                "fail",
                f"an NVIDIA driver is installed, but torch {torch.__version__} finds no device",
                "Install a torch with CUDA (pytorch.org/get-started), and look at nvidia-smi and CUDA_VISIBLE_DEVICES.",
            )
        ]
    return [Check("accelerators", "warning", "none found: training runs on virtual devices, simulated on the CPU")]


def _described(device: torch.device) -> str:
    library = torch.get_device_module(device)
    name = library.get_device_name(device) if hasattr(library, "get_device_name") else device.type
    try:
        free, total = memory_info(device)
    except (AttributeError, NotImplementedError, RuntimeError):  # a backend that does not state it
        return str(name)
    return f"{name}, {format_bytes(free)} of {format_bytes(total)} free"


def _memory() -> list[Check]:
    free = host_memory_available()
    rate = f"moves {format_bytes(host_memory_rate())}/s"
    remedy = "The host holds the model, its gradients and the optimizer: see roundpipe plan." if free < 4e9 else ""
    status: Status = "warning" if free < _LITTLE_MEMORY else "ok"
    return [Check("host memory", status, f"{format_bytes(free)} free; it {rate}", remedy)]


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
    if used > have:
        return [
            Check("threads", "warning", text, f"More threads than cores wait for each other: OMP_NUM_THREADS={have}")
        ]
    if devices and used * devices > have and have > 1:
        line = f"{devices} virtual devices compute at the same time: OMP_NUM_THREADS={max(1, have // devices)}"
        return [Check("threads", "warning", text, line)]
    if not devices and 2 * used < have:
        return [Check("threads", "warning", text, "AdamW runs on the host, slowly so: unset OMP_NUM_THREADS")]
    return [Check("threads", "ok", text)]


def _disk(folder: pathlib.Path = HERE) -> list[Check]:
    free = shutil.disk_usage(folder).free
    status: Status = "fail" if free < _NO_DISK else "warning" if free < _LITTLE_DISK else "ok"
    remedy = "" if status == "ok" else "Checkpoints take 12 bytes and more per parameter: choose another --checkpoint."
    place = "the current folder" if folder == HERE else str(folder)
    return [Check("disk", status, f"{format_bytes(free)} free in {place}", remedy)]


def _speed_of_disk(folder: pathlib.Path) -> list[Check]:
    """How fast a training goes whose state is on the disk."""
    name = "speed of the disk"
    try:
        rates = measure_disk(folder)
    except ConfigError as error:
        line = "A training with --host disk:DIR needs a disk: name a folder on one, roundpipe doctor --disk DIR."
        return [Check(name, "warning", first_line(error), line)]
    return [Check(name, "ok", f"it reads {format_bytes(rates.read)}/s and writes {format_bytes(rates.write)}/s")]


def _speed() -> list[Check]:
    return [check for device in accelerators() for check in device_checks(device)]


# -- does it compute the right thing ---------------------------------------------------------------------------------


def _training() -> list[Check]:
    found = [_trained("virtual:2", "2 virtual devices")]
    here = accelerators()
    return found + ([_trained([str(device) for device in here], ", ".join(map(str, here)))] if here else [])


def _trained(devices: DeviceSpec, name: str) -> Check:
    title = f"training on {name}"
    difference = train_difference(devices)
    if not difference < _ROUNDING:  # NaN is also a difference
        return Check(title, "fail", f"differs from plain PyTorch by {difference:.1e}", "Report this, with these lines.")
    return Check(title, "ok", f"two steps match plain PyTorch, except for {difference:.0e}")


def train_difference(devices: DeviceSpec) -> float:
    """Train a small model for two steps, through a pipeline and plainly, and return how far they are apart."""
    with generator_kept():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4))
        batches = [(torch.randn(10, 16), torch.randn(10, 4)) for _ in range(2)]
    loss_fn = nn.functional.mse_loss
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)
    pipeline = RoundPipe(copy.deepcopy(plain), devices=devices, model_run_config=config)
    try:
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
        pairs += [
            (one.detach(), two.detach()) for one, two in zip(pipeline.parameters(), plain.parameters(), strict=True)
        ]
    finally:
        pipeline.close()
    scale = max(float(expected.abs().max()) for _, expected in pairs)
    return max(float((one - expected).abs().max()) for one, expected in pairs) / scale
