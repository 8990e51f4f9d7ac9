"""What the machine is and how fast: driver, link, Adam on the host, products of matrices; and the file for a plan.

``python -m benchmarks.gpu.profile DEVICE MACHINE`` prints lines of JSON, each longer than the one before, and writes
the file: what breaks in the middle leaves what was found.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from roundpipe_runtime.cli.doctor import train_difference
from roundpipe_runtime.estimate.hardware import Hardware, call_seconds, describe_hardware, measure_device, save_machine

__all__ = ["machine", "profile", "versions"]

_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "onnxruntime", "msgspec", "roundpipe", "deepspeed",
              "torchao", "bitsandbytes")  # fmt: skip
# What AdamW in float32 reads of a parameter, weight, gradient and two moments; and writes, all but the gradient.
_ADAM_BYTES = 4 * 4 + 3 * 4
_ADAM_PARAMETERS = 64 * 2**20
_THREADS = (1, 8, 16)


def profile(device: torch.device, path: Path, report: Callable[[dict[str, Any]], None], *, tiny: bool) -> None:
    """Measure the machine, write the profile of ``roundpipe plan`` to ``path``, and report what is found so far."""
    found: dict[str, Any] = {"machine": machine(device), "versions": versions(), "device": device.type}
    found["driver"] = _driver()
    report(found)
    found["Adam bytes per second"] = _adam(2**16 if tiny else _ADAM_PARAMETERS)
    report(found)
    if device.type == "cpu":
        hardware = describe_hardware("virtual:1")
    else:
        small: dict[str, Any] = {"nbytes": 2**20, "rows": 128} if tiny else {}
        rates = measure_device(device, **small)
        found["rates"] = {field.name: getattr(rates, field.name) for field in dataclasses.fields(rates)}
        hardware = describe_hardware(str(device), link=rates.up, flops=rates.flops)
        hardware = dataclasses.replace(
            hardware, down=rates.down, origin={**hardware.origin, "link": "measured", "flops": "measured"}
        )
    save_machine(_with_adam(hardware, found["Adam bytes per second"]), path)
    report(found)
    found["difference"] = train_difference("virtual:1" if device.type == "cpu" else [device])
    report(found)


def _with_adam(hardware: Hardware, adam: dict[str, float]) -> Hardware:
    """The host as the optimizer finds it: the plan takes its rate for the time of AdamW."""
    return dataclasses.replace(hardware, call=call_seconds(), host_rate=adam[f"{torch.get_num_threads()} threads"])


def _adam(parameters: int) -> dict[str, float]:
    """Bytes a second of fused AdamW in float32 on the host, by threads: those named, and as many as torch uses."""
    weight = torch.nn.Parameter(torch.zeros(parameters))
    weight.grad = torch.ones(parameters)
    optimizer = torch.optim.AdamW([weight], fused=True)
    used = torch.get_num_threads()
    found = {}
    try:
        for threads in sorted({*(n for n in _THREADS if n <= (os.cpu_count() or 1)), used}):
            torch.set_num_threads(threads)
            found[f"{threads} threads"] = _ADAM_BYTES * parameters / _fastest(optimizer.step)
    finally:
        torch.set_num_threads(used)
    return found


def _fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(4):  # the first one allocates
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def machine(device: torch.device) -> str:
    """Device, processor and memory in one line."""
    name = platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    memory = psutil.virtual_memory().total / 2**30
    return f"{_device_name(device)}; {name}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


def _device_name(device: torch.device) -> str:
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is None or not hasattr(module, "get_device_name"):
        return {"cpu": "virtual device", "late": "accelerator made of the CPU"}.get(device.type, device.type)
    return str(module.get_device_name(device))


def versions() -> dict[str, str]:
    """Versions of Python, CUDA and the libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    return found


def _driver() -> str | None:
    """What nvidia-smi reports of driver, link and clocks."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    fields = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit"
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout or done.stderr).strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    parser.add_argument("machine", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.device.startswith("late"):  # the reference accelerator, made of the CPU
        importlib.import_module("tests.accelerator.late")
    device = torch.device(options.device)
    profile(device, options.machine, lambda found: print(json.dumps(found), flush=True), tiny=options.tiny)
    sys.stdout.flush()
    os._exit(0)  # a thread of autograd for a device may abort a process that ends after a backward


if __name__ == "__main__":
    main()
