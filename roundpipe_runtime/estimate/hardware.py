"""Describe the devices and the host of a training by measured or assumed rates, and store them as JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import torch

from yobx_flatten.files.document import read_document
from yobx_flatten.files.scratch import write_text

from ..device.accelerator import accelerators, memory_info, parse_devices
from ..errors import ConfigError

# Assumed values of an absent device: a workstation GPU with PCIe 4.
_ASSUMED_FLOPS = 100e12
_ASSUMED_LINK = 20e9

_COPIED = 128 * 2**20  # bytes, larger than caches
# Rows of a matrix: the first size with a long enough product is used, so that slow devices are measured quickly.
_ROWS = (512, 1024, 2048, 4096, 8192)
_LONG_PRODUCT = 0.01  # seconds
_LONG_ENOUGH = 0.05  # seconds of one measurement


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """The devices and the host for which a training is planned.

    Attributes:
        names: names of the devices, such as ``cuda:0``.
        kind: ``"cpu"`` for virtual devices, else the type of the accelerators.
        flops: operations per second of one device, in matrix products.
        link: bytes per second from the host to one device, and back unless ``down`` is given.
        memory: bytes of memory of one device; ``None`` if not known.
        host: bytes of free memory of the host; ``None`` where the system does not report it.
        host_rate: bytes per second that the host reads and writes.
        origin: source of ``flops``, ``link`` and ``memory``: ``"measured"``, ``"given"``, ``"assumed"`` or
            ``"unknown"``.
        down: bytes per second from one device to the host (default: ``link``).
        call: seconds that the host needs to call a layer once, without the layer's computation (default: 0).
        disk_read: bytes per second that the disk of ``host="disk:DIR"`` reads (default: not known).
        disk_write: bytes per second that the disk of ``host="disk:DIR"`` writes (default: not known).
    """

    names: tuple[str, ...]
    kind: str
    flops: float
    link: float
    memory: int | None
    host: int | None
    host_rate: float
    origin: dict[str, str]
    down: float | None = None
    call: float = 0.0
    disk_read: float | None = None
    disk_write: float | None = None

    @property
    def is_virtual(self) -> bool:
        """Whether devices are simulated on the CPU, where a stage is loaded only after the previous stage has ended."""
        return self.kind == "cpu"


def describe_hardware(
    devices: str | None = None,
    *,
    memory: int | None = None,
    link: float | None = None,
    flops: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Hardware:
    """Describe devices by given values, and measure missing values if the devices are present.

    Args:
        devices: ``"virtual:2"``, or device names separated by commas, such as ``"cuda:0,cuda:1"``; the named devices
            may be absent (default: all accelerators of the machine, else ``"virtual:2"``).
        memory: bytes of memory of one device.
        link: bytes per second between host and device.
        flops: operations per second of one device.
        dtype: dtype of the matrix products that are measured.

    Returns:
        The devices and the host.

    Raises:
        ConfigError: ``devices`` contains a name that is not a device name.
    """
    names = device_names(devices)
    kind = device_kind(names)
    own = {str(device) for device in accelerators()}
    here = kind == "cpu" or all(name in own or f"{name}:0" in own for name in names)
    info = memory_info(torch.device(names[0])) if here and kind != "cpu" else None
    found_memory = None if info is None else info[1]
    origin = {
        "flops": "given" if flops else "measured" if here else "assumed",
        "link": "given" if link else "measured" if here else "assumed",
        "memory": "given" if memory else "measured" if found_memory else "unknown",
    }
    device = torch.device("cpu" if kind == "cpu" else names[0])
    if not flops:
        flops = matmul_rate(device, dtype) if here else _ASSUMED_FLOPS
        if kind == "cpu":  # virtual devices share the cores, and each uses all threads of torch
            flops *= min(1.0, cores() / (len(names) * torch.get_num_threads()))
    if not link:
        link = copy_rate(device) if here else _ASSUMED_LINK
    return Hardware(
        names=names,
        kind=kind,
        flops=flops,
        link=link,
        memory=memory or found_memory,
        host=host_memory_available(),
        host_rate=host_memory_rate(),
        origin=origin,
    )


def device_names(devices: str | None = None) -> tuple[str, ...]:
    """Return the names of the single devices, such as ``cuda:0``, which need not exist on this machine."""
    if devices is None or devices.startswith("virtual"):
        found = parse_devices(devices)
        for device in found:
            device.close()
        return tuple(device.name for device in found)
    names = tuple(name.strip() for name in devices.split(","))
    for name in names:
        try:
            is_device = re.fullmatch(r"[a-z]+(:\d+)?", name) and torch.device(name).type not in ("cpu", "meta")
        except RuntimeError:
            is_device = False
        if not is_device:
            raise ConfigError(f"{name!r} names no device. Use 'virtual:2', or 'cuda:0,cuda:1'.")
    if len(set(names)) < len(names):
        raise ConfigError(f"{devices!r} names a device twice.")
    return names


def device_kind(names: tuple[str, ...]) -> str:
    return "cpu" if names[0].startswith("virtual") else names[0].partition(":")[0]


# -- measuring -------------------------------------------------------------------------------------------------------


def matmul_rate(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    for size in _ROWS[:1] if device.type == "cpu" else _ROWS:
        a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = _seconds(functools.partial(torch.matmul, a, b), device)
        if seconds > _LONG_PRODUCT:
            break
    return 2 * size**3 / seconds


def copy_rate(device: torch.device) -> float:
    """Measure the bytes per second of a copy from the host to a device, for accelerators from pinned memory."""
    source = torch.zeros(_COPIED, dtype=torch.uint8, pin_memory=device.type != "cpu")
    target = torch.empty_like(source, device=device)
    return _COPIED / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def host_memory_rate() -> float:
    """Measure the bytes per second that the host reads and writes in total while it copies memory."""
    return 2 * copy_rate(torch.device("cpu"))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    timed()
    found = [timed()]
    while sum(found) < _LONG_ENOUGH or len(found) < 3:
        found.append(timed())
    return min(found)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_available() -> int:
    """Return the bytes of available host memory, within the limit of a container if there is one."""
    import psutil

    available = int(psutil.virtual_memory().available)
    left = _left_in_container()
    return available if left is None else min(available, left)


def _left_in_container() -> int | None:
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            most = int(file.read())
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            return most - int(file.read())
    except (OSError, ValueError):  # no such file, or "max"
        return None


_REQUIRED = ("names", "flops", "link", "host_rate")
_NUMBERS = ("flops", "link", "memory", "host", "host_rate", "down", "call", "disk_read", "disk_write")


def save_machine(machine: Hardware, path: str | os.PathLike[str]) -> None:
    """Write a machine profile to a JSON file.

    Args:
        machine: description of the devices and the host.
        path: file to write.
    """
    write_text(path, json.dumps(dataclasses.asdict(machine), indent=1) + "\n")


def load_machine(path: str | os.PathLike[str]) -> Hardware:
    """Load a measured or hand-written machine profile: rates per second, sizes in bytes.

    ::

        {"names": ["cuda:0", "cuda:1"], "flops": 150e12, "link": 25e9, "memory": 24e9, "host": 256e9, "host_rate": 60e9}

    ``down`` is the rate from a device to the host if it differs from ``link``; ``call`` is the time of the host per
    layer and microbatch, in seconds; ``disk_read`` and ``disk_write`` are the rates of the disk that stores the
    training state (``host="disk:DIR"``). Without ``memory`` or ``host``, that size counts as unknown.

    Args:
        path: JSON file.

    Returns:
        The machine.

    Raises:
        ConfigError: the file is not a machine profile.
        OSError: the file cannot be read.
    """
    name = os.fspath(path)
    remedy = f"To measure this machine:\n    roundpipe doctor --machine {name}"
    how: Any = {"failure": ConfigError, "remedy": remedy, "kind": "machine profile"}
    content = read_document(pathlib.Path(path), dict[str, Any], **how)
    missing = [key for key in _REQUIRED if key not in content]
    unknown = sorted(set(content) - {field.name for field in dataclasses.fields(Hardware)})
    if missing or unknown:
        what = f"{missing[0]} is missing" if missing else f"{unknown[0]} is an unknown entry"
        raise ConfigError(f"{name} is not a machine profile: {what}. {remedy}")
    names = content["names"]
    if not isinstance(names, list) or not names or not all(isinstance(one, str) and one for one in names):
        raise ConfigError(f'{name}: names must be a list of devices, like ["cuda:0"], found {names!r}.')
    for key in _NUMBERS:
        value = content.get(key)
        if value is None and key not in _REQUIRED:
            continue
        is_rate = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
        if not is_rate and not (key == "call" and value == 0):
            raise ConfigError(f"{name}: {key} must be a number above 0, found {value!r}.")
    kind, stated = content.get("kind") or "", content.get("origin") or {}
    if not isinstance(kind, str):
        raise ConfigError(f'{name}: kind must be the type of the devices, like "cuda", found {kind!r}.')
    if not isinstance(stated, dict) or not all(isinstance(one, str) for one in stated.values()):
        raise ConfigError(f'{name}: origin must be like {{"flops": "measured"}}, found {stated!r}.')
    whole = {key: int(content[key]) if content.get(key) is not None else None for key in ("memory", "host")}
    origin = {key: "given" if content.get(key) else "unknown" for key in ("flops", "link", "memory")}
    content |= {"names": tuple(names), "kind": kind or device_kind(tuple(names)), "origin": stated or origin}
    return Hardware(**{**content, **whole, "call": content.get("call") or 0.0})
