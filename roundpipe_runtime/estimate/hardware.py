"""Describe the devices and the host of a training by measured or assumed rates, and store them as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from yobx_flatten.core.files.document import read_document
from yobx_flatten.core.files.scratch import write_text

from ..device.accelerator import accelerators, memory_info, parse_devices
from ..device.disk import DiskMemory
from ..engine.config import RoundPipeRunConfig
from ..errors import ConfigError
from ..pipeline import RoundPipe
from ..schedule.plan import ModelExecutePlan

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
        link: bytes per second of copies from the host to one device, and of copies back if ``down`` is ``None``.
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
        """Whether the devices are simulated on the CPU. A simulated device loads no layers while it computes."""
        return self.kind == "cpu"


def describe_hardware(
    devices: str | None = None,
    *,
    memory: int | None = None,
    link: float | None = None,
    flops: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Hardware:
    """Describe devices and the host. Values that are not passed are measured, if the devices are present.

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
    """Return the name of each device in a text such as ``"cuda:0,cuda:1"``; the machine may lack these devices."""
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
    """Measure how many bytes per second are copied from host memory to a device."""
    source = torch.zeros(_COPIED, dtype=torch.uint8, pin_memory=device.type != "cpu")
    target = torch.empty_like(source, device=device)
    return _COPIED / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def host_memory_rate() -> float:
    """Measure how many bytes per second the host reads and writes, in total, while it copies memory."""
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
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        return int((group / "memory.max").read_text("ascii")) - int((group / "memory.current").read_text("ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


_REQUIRED = ("names", "flops", "link", "host_rate")
_NUMBERS = ("flops", "link", "memory", "host", "host_rate", "down", "call", "disk_read", "disk_write")


def save_machine(machine: Hardware, path: str | os.PathLike[str]) -> None:
    """Write a machine profile (speed and memory of the devices and the host) to a JSON file.

    Args:
        machine: description of the devices and the host.
        path: file to write.
    """
    write_text(path, json.dumps(dataclasses.asdict(machine), indent=1) + "\n")


def load_machine(path: str | os.PathLike[str]) -> Hardware:
    """Load a machine profile: a JSON file with the memory sizes (bytes) and rates (per second) of a machine.

    ::

        {"names": ["cuda:0", "cuda:1"], "flops": 150e12, "link": 25e9, "memory": 24e9, "host": 256e9, "host_rate": 60e9}

    ``down`` is the rate from a device to the host, if it differs from ``link``. ``call`` is the time, in seconds, that
    the host needs per layer and microbatch. ``disk_read`` and ``disk_write`` are the rates of the disk that stores the
    training state (``host="disk:DIR"``). Leave out ``memory`` if the memory of the devices is not known, and ``host``
    if the memory of the host is not known.

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
        raise ConfigError(f'{name}: origin must map keys to sources, like {{"flops": "measured"}}, found {stated!r}.')
    whole = {key: int(content[key]) if content.get(key) is not None else None for key in ("memory", "host")}
    origin = {key: "given" if content.get(key) else "unknown" for key in ("flops", "link", "memory")}
    content |= {"names": tuple(names), "kind": kind or device_kind(tuple(names)), "origin": stated or origin}
    return Hardware(**{**content, **whole, "call": content.get("call") or 0.0})


# -- the speed of an accelerator, of the interpreter and of a disk ---------------------------------------------------

_LINK_COPIED = 256 * 2**20  # bytes of a copy that is measured
_MATRIX_ROWS = 8192  # rows and columns of a matrix
_REPEATS = 3  # number of measurements, of which the fastest counts

Work: TypeAlias = "tuple[torch.Stream, Callable[[], object]]"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRates:
    up: float  # bytes per second from pinned memory to the device
    down: float  # bytes per second from the device to pinned memory
    both: float  # bytes per second in both directions together, when copied at the same time
    pageable_up: float  # bytes per second from memory that is not pinned
    pageable_down: float  # bytes per second to memory that is not pinned
    flops: float  # operations per second in products of matrices
    # share of the shorter of copy and computation that the other hides: 1.0 if they run in parallel, 0.0 if one waits
    overlap: float
    clock: float  # seconds by the events of the device in one second of the host

    def tokens_to_hide_transfers(self) -> float:
        """Return the number of tokens per step above which a forward takes longer than the upload of its parameters.

        >>> rates = DeviceRates(50e9, 50e9, 1e11, 8e9, 8e9, 500e12, 1.0, 1.0)
        >>> rates.tokens_to_hide_transfers()
        10000.0
        """
        # two operations per token and parameter; each parameter has two bytes and is uploaded once per step
        return 2 * self.flops / (2 * self.up)


def measure_device(device: torch.device, *, nbytes: int = _LINK_COPIED, rows: int = _MATRIX_ROWS) -> DeviceRates:
    """Measure the rates of copies and of bfloat16 matrix products of an accelerator, in about a second."""
    # rows: rows and columns of the matrices. Default: 8,192.
    uploads, downloads, compute = (torch.Stream(device) for _ in range(3))
    pinned = [torch.zeros(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    pageable = torch.zeros(nbytes, dtype=torch.uint8)
    there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    matrix = torch.ones(rows, rows, dtype=torch.bfloat16, device=device)

    up = uploads, lambda: there[0].copy_(pinned[0], non_blocking=True)
    down = downloads, lambda: pinned[1].copy_(there[1], non_blocking=True)
    product = compute, lambda: matrix @ matrix
    alone = {name: _device_seconds(device, work) for name, work in (("up", up), ("down", down), ("product", product))}
    together = _device_seconds(device, up, down)
    pageable_up = _device_seconds(device, (uploads, lambda: there[0].copy_(pageable)))
    pageable_down = _device_seconds(device, (downloads, lambda: pageable.copy_(there[1])))

    # enough products to take about as long as an upload
    number = max(1, round(alone["up"] / alone["product"]))
    products = compute, lambda: [matrix @ matrix for _ in range(number)]
    computing = _device_seconds(device, products)
    hidden = alone["up"] + computing - _device_seconds(device, up, products)
    start = time.perf_counter()
    clock = _once(device, (products,)) / (time.perf_counter() - start)
    return DeviceRates(
        up=nbytes / alone["up"],
        down=nbytes / alone["down"],
        both=2 * nbytes / together,
        pageable_up=nbytes / pageable_up,
        pageable_down=nbytes / pageable_down,
        flops=2 * rows**3 / alone["product"],
        overlap=min(1.0, max(0.0, hidden / min(alone["up"], computing))),
        clock=clock,
    )


def _device_seconds(device: torch.device, *works: Work) -> float:
    return min(_once(device, works) for _ in range(_REPEATS))


def _once(device: torch.device, works: tuple[Work, ...]) -> float:
    torch.accelerator.synchronize(device)
    first = works[0][0]
    begin = first.record_event(torch.Event(device, enable_timing=True))
    for stream, work in works:
        stream.wait_event(begin)
        with stream:
            work()
    for stream, _ in works[1:]:
        first.wait_event(stream.record_event())
    end = first.record_event(torch.Event(device, enable_timing=True))
    end.synchronize()
    return max(float(begin.elapsed_time(end)) / 1e3, 1e-9)


# -- the interpreter's cost of calling a layer, and the disk -----------------------------------------------------------

_LAYERS, _MICROBATCHES, _WIDTH = 16, 4, 8
_CALLS = 5


def call_seconds() -> float:
    """Measure the CPU time, in seconds, that a pipeline adds to the time of each layer for each microbatch."""
    layers = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)])
    inputs = torch.ones(_MICROBATCHES, _WIDTH)
    last = _LAYERS - 4
    plan = ModelExecutePlan([range(last)], [range(first, first + 4) for first in range(last, -1, -4)])
    config = RoundPipeRunConfig(num_microbatch=_MICROBATCHES, loss_reduction="mean", execute_plan=plan)

    def alone() -> None:
        for row in inputs.split(1):
            with torch.no_grad():
                layers(row)
            layers(row).square().mean().backward()

    pipe = RoundPipe(layers, devices="virtual:1", model_run_config=config)

    def pipeline() -> None:
        pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
        pipe.zero_grad()

    def least(work: Callable[[], None]) -> float:
        found = []
        for _ in range(_CALLS + 1):
            start = time.process_time()
            work()
            found.append(time.process_time() - start)
        return min(found[1:])

    with contextlib.closing(pipe):
        beyond = least(pipeline) - least(alone)
    return max(0.0, beyond) / (_LAYERS * _MICROBATCHES)


_DISK_PIECE = 32 * 2**20  # bytes that are read or written at a time
_DISK_SECONDS = 0.3  # seconds, after which no further piece is begun
_DISK_PIECES = 32  # pieces


class DiskRates(NamedTuple):
    read: float  # bytes per second
    write: float  # bytes per second


def measure_disk(folder: pathlib.Path) -> DiskRates:
    """Measure the rates of a disk, in about a second, with up to 1 GB of temporary data."""
    memory = DiskMemory(folder.absolute(), together=_DISK_PIECE)
    with contextlib.closing(memory):
        source = torch.randint(0, 256, (_DISK_PIECE,), dtype=torch.uint8)  # a disk may compress zeros
        pieces: list[torch.Tensor] = []
        start = time.perf_counter()
        while len(pieces) < 2 or (time.perf_counter() - start < _DISK_SECONDS and len(pieces) < _DISK_PIECES):
            pieces.append(memory.copy(("piece", len(pieces)), source))
            memory.leave(pieces[-1:])
            memory.settle()
        written = time.perf_counter() - start
        start = time.perf_counter()
        for piece in pieces:
            memory.fetch([piece]).result()
            memory.leave([piece], written=False)
        read = time.perf_counter() - start
    return DiskRates(len(pieces) * _DISK_PIECE / read, len(pieces) * _DISK_PIECE / written)
