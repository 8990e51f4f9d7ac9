"""Record the work of each device as a timeline; save, load, draw and summarize timelines."""

from __future__ import annotations

import contextvars
import dataclasses
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from yobx_flatten.core.files.document import read_document
from yobx_flatten.core.files.scratch import write_text

from ..errors import RoundPipeError

CURRENT_TIMELINE: contextvars.ContextVar[Timeline | None] = contextvars.ContextVar("roundpipe_timeline", default=None)

# Of each kind of work: its letter in the drawing, the meaning of the letter, and its colour on a terminal.
_WORK = {
    "forward": ("F", "forward", "white on blue"),
    "recompute": ("R", "forward again", "black on cyan"),
    "loss": ("L", "loss", "black on yellow"),
    "backward": ("B", "backward", "white on red"),
    "upload": ("u", "copy in", "black on white"),
    "download": ("d", "copy back", "black on white"),
}
_WAITING = (".", "waiting", "bright_black")
KINDS = tuple(_WORK)
_COPIES = ("upload", "download")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One task in a timeline: its device, kind of work, start and end.

    Attributes:
        stage: index of the pipeline stage, counted within one pipeline call.
        microbatch: index of the microbatch; ``-1`` for work for the whole stage.
        device: name of the device.
        kind: ``"upload"``, ``"forward"``, ``"recompute"``, ``"loss"``, ``"backward"`` or ``"download"``.
        start: time in seconds, on the clock of :func:`time.perf_counter`.
        end: time in seconds, on the clock of :func:`time.perf_counter`.
        layer: index of the layer; ``-1`` for work for several layers.

    >>> record = Record(stage=0, microbatch=1, device="virtual:0", kind="forward", start=0.5, end=0.75)
    >>> record.end - record.start
    0.25
    """

    stage: int
    microbatch: int
    device: str
    kind: str
    start: float
    end: float
    layer: int = -1


class Timeline:
    """Records which work ran on which device and when, for every forward and backward inside its ``with`` block.

    ::

        with Timeline() as timeline:
            model.forward_backward(...)
        print(timeline.draw())
        timeline.save("trace.json")      # for chrome://tracing or ui.perfetto.dev

    Attributes:
        records: the records, in the order in which the recorded work ended.
        uploaded: bytes of parameters that were copied to devices.
        skipped: bytes of parameters that were not copied, because no layer read them, such as unused experts.

    >>> import torch
    >>> from roundpipe_runtime import RoundPipe
    >>> model = RoundPipe(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), devices="virtual:2")
    >>> with Timeline() as timeline, torch.no_grad():
    ...     outputs = model(torch.ones(6, 2))
    >>> sorted({record.kind for record in timeline.records})
    ['download', 'forward', 'upload']
    >>> model.close()
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.uploaded = self.skipped = 0
        self._token: contextvars.Token[Timeline | None] | None = None
        self._zero: float | None = None  # the time of day at which the clock of the records is 0

    def __enter__(self) -> Timeline:
        self._zero = time.time() - time.perf_counter()
        self._token = CURRENT_TIMELINE.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            CURRENT_TIMELINE.reset(self._token)
            self._token = None

    def add(self, kind: str, stage: int, microbatch: int, device: str, start: float, end: float, layer: int) -> None:
        """Add a record to the timeline; several threads may add records at the same time.

        Args:
            kind: kind of work, see :class:`Record`.
            stage: index of the stage.
            microbatch: index of the microbatch, or -1 for work for the whole stage.
            device: name of the device.
            start: time in seconds.
            end: time in seconds.
            layer: index of the layer, or -1 for work for several layers.
        """
        self.records.append(Record(stage, microbatch, device, kind, start, end, layer))

    def add_parameters(self, uploaded: int, skipped: int) -> None:
        """Add to the timeline the bytes of parameters that a forward or backward copied to devices.

        Args:
            uploaded: bytes that were copied to devices.
            skipped: bytes of parameters that were not copied, because no layer read the parameters.
        """
        self.uploaded += uploaded
        self.skipped += skipped

    def draw(self, width: int = 72) -> str:
        """Draw the timeline as text: a row per device, time to the right, a letter per kind of work.

        The letters are ``F`` forward, ``R`` recompute, ``L`` loss, ``B`` backward, ``u`` upload, ``d`` download, and
        ``.`` for no work.

        Args:
            width: number of characters that show the time from the first to the last record.

        Returns:
            The drawing, one line per device.

        >>> timeline = Timeline()
        >>> timeline.records = [Record(0, 0, "a", "forward", 0.0, 0.5), Record(1, 0, "b", "loss", 0.5, 1.0)]
        >>> print(timeline.draw(4))
        a |FF..|
        b |..LL|  1000.0 ms
        """
        if not self.records:
            return "nothing was recorded"
        first, last = min(r.start for r in self.records), max(r.end for r in self.records)
        scale = width / max(last - first, 1e-9)
        devices = sorted({record.device for record in self.records})
        margin = max(map(len, devices))
        rows = {device: ["."] * width for device in devices}
        # Copies first, so that computation is drawn over them.
        for record in sorted(self.records, key=lambda r: (r.kind not in _COPIES, r.start)):
            begin = min(int((record.start - first) * scale), width - 1)
            end = max(begin + 1, min(round((record.end - first) * scale), width))
            rows[record.device][begin:end] = _WORK.get(record.kind, ("?",))[0] * (end - begin)
        lines = [f"{device:<{margin}} |{''.join(row)}|" for device, row in rows.items()]
        return "\n".join(lines) + f"  {1000 * (last - first):.1f} ms"

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the timeline in the format of ``chrome://tracing``: a row per device, times in microseconds.

        The key ``otherData`` contains the bytes of copied parameters and the time of day of the first record. This time
        aligns timelines of several processes. ``otherData`` is missing unless ``with timeline:`` was used.
        """
        devices = sorted({record.device for record in self.records})
        first = min((record.start for record in self.records), default=0.0)
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": device}}
            for number, device in enumerate(devices)
        ]
        events = [
            {
                "ph": "X",
                "name": f"{record.kind} s{record.stage}" + (f" m{record.microbatch}" if record.microbatch >= 0 else ""),
                "cat": record.kind,
                "pid": 0,
                "tid": devices.index(record.device),
                "ts": 1e6 * (record.start - first),
                "dur": 1e6 * (record.end - record.start),
                "args": {"stage": record.stage, "microbatch": record.microbatch, "layer": record.layer},
            }
            for record in self.records
        ]
        parameters = {"uploaded": self.uploaded, "skipped": self.skipped}
        other = {} if self._zero is None else {"otherData": {"started": self._zero + first, **parameters}}
        return {"traceEvents": names + events, "displayTimeUnit": "ms", **other}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as JSON, in the format of :meth:`to_chrome_trace`."""
        write_text(path, json.dumps(self.to_chrome_trace()))


_FIX = "To write one: roundpipe train MODEL --text FILE -o DIR --timeline FILE"
_FOREVER = 1e18  # larger times are refused, also NaN, which is not below this number


class TimelineFileError(RoundPipeError, ValueError):
    """A file is not a timeline file of a pipeline, or it is damaged."""


def merge_timelines(paths: Sequence[str | os.PathLike[str]]) -> Timeline:
    """Load the timelines of several processes, in the order of ranks, into one timeline."""
    # The timelines are aligned by their start times; if a file has no start time, all timelines begin together.
    # if there are several files, the names of devices are `"rank 0 cuda:0"` and so on
    if len(paths) == 1:
        return _read(paths[0])[0]
    read = [_read(path) for path in paths]
    times = [started for _, started in read if started is not None]
    first = min(times) if len(times) == len(read) else None
    digits = len(str(len(read) - 1))
    merged = Timeline()
    for rank, (timeline, started) in enumerate(read):
        shift = 0.0 if first is None or started is None else started - first
        for record in timeline.records:
            name, start, end = f"rank {rank:>{digits}} {record.device}", record.start + shift, record.end + shift
            merged.records.append(dataclasses.replace(record, device=name, start=start, end=end))
        merged.add_parameters(timeline.uploaded, timeline.skipped)
    return merged


def _read(path: str | os.PathLike[str]) -> tuple[Timeline, float | None]:
    """Read a timeline from a file, with the time of day of its first record if the file contains this time."""
    name = os.fspath(path)
    content = read_document(
        pathlib.Path(path), dict[str, Any], failure=TimelineFileError, remedy=_FIX, kind="timeline file"
    )
    events = content.get("traceEvents")
    if not isinstance(events, list):
        raise TimelineFileError(f"The file {name} is not a timeline file: its JSON has no list of events. {_FIX}")
    named = [one for one in events if isinstance(one, dict) and one.get("name") == "thread_name"]
    named = [one for one in named if isinstance(one.get("args"), dict) and isinstance(one.get("tid"), int)]
    devices = {one["tid"]: one["args"]["name"] for one in named if isinstance(one["args"].get("name"), str)}
    timeline = Timeline()
    tasks = [(number, one) for number, one in enumerate(events) if not isinstance(one, dict) or one.get("ph") != "M"]
    timeline.records = [_record(event, devices, f"{name}, event {number}") for number, event in tasks]
    if not timeline.records:
        raise TimelineFileError(f"The file {name} contains no records: no pipeline ran while it was recorded.")
    found = content.get("otherData")
    other: dict[str, Any] = found if isinstance(found, dict) else {}
    sizes: list[Any] = [other.get(key) for key in ("uploaded", "skipped")]  # missing in files of earlier versions
    timeline.add_parameters(*(size if type(size) is int and 0 <= size < _FOREVER else 0 for size in sizes))
    started: Any = other.get("started")
    is_time = isinstance(started, (int, float)) and abs(started) < _FOREVER
    return timeline, float(started) if is_time else None


def _record(event: Any, devices: dict[Any, str], place: str) -> Record:
    event = event if isinstance(event, dict) and isinstance(event.get("args"), dict) else {"args": {}}
    numbers: list[Any] = [event["args"].get(key) for key in ("stage", "microbatch", "layer")]
    times: list[Any] = [event.get(key) for key in ("ts", "dur")]
    kind, row = event.get("cat"), event.get("tid")
    device = devices.get(row) if isinstance(row, int) else None
    is_task = event.get("ph") == "X" and kind in KINDS and all(type(number) is int for number in numbers)
    if device is None or not is_task:
        raise TimelineFileError(f"{place} was not written by a RoundPipe model. Did another program write the trace?")
    if not all(type(time) in (int, float) and abs(time) < _FOREVER for time in times) or times[1] < 0:
        raise TimelineFileError(f"{place} has no valid start and duration: ts is {times[0]!r}, dur is {times[1]!r}.")
    stage, microbatch, layer = numbers
    start = times[0] / 1e6
    return Record(stage, microbatch, device, kind, start, start + times[1] / 1e6, layer)


def draw_on(console: Any, timeline: Timeline, shown: Callable[[str], str] = str) -> None:
    # shown: function that makes device names from a file safe for a terminal. Default: names are printed unchanged.
    from rich.text import Text

    margin = max(len(record.device) for record in timeline.records)
    width = max(8, min(console.width, 120) - margin - 3)
    drawing, _, total = timeline.draw(width).rpartition("  ")
    styles = {letter: style for letter, _, style in (*_WORK.values(), _WAITING)}
    found = set()
    for line in drawing.splitlines():
        name, row = line.rstrip("|").split(" |")
        text = Text(f"{shown(name)} ")
        for letter, same in itertools.groupby(row):
            text.append("".join(same), styles[letter])
            found.add(letter)
        console.print(text)
    console.print(f"{'':{margin}} 0{total:>{width - 1}}", style="dim")
    legend = Text()
    for letter, meaning, style in (*_WORK.values(), _WAITING):
        if letter in found:
            legend.append(f" {letter} ", style).append(f" {meaning} ")
    console.print(legend)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTotals:
    device: str
    busy: float  # seconds of computation
    transfers: float  # seconds of copies while the device did not compute
    idle: float  # other seconds


@dataclasses.dataclass(frozen=True, slots=True)
class StageTotals:
    stage: int  # index of the stage in the run
    device: str
    seconds: float  # seconds of computation
    copies: float  # seconds of copies
    layers: tuple[int, int]  # first and last layer, -1 if they are not known
    kinds: tuple[str, ...]  # kinds of work, in order


def device_totals(records: Sequence[Record]) -> list[DeviceTotals]:
    """Return the busy, copy and idle time of each device between the first and the last record of the timeline.

    >>> records = [Record(0, -1, "a", "upload", 0, 2), Record(0, 0, "a", "forward", 1, 3)]
    >>> device_totals([*records, Record(1, 0, "b", "loss", 3, 4)])[0]
    DeviceTotals(device='a', busy=2.0, transfers=1.0, idle=1.0)
    """
    if not records:
        return []
    whole = max(record.end for record in records) - min(record.start for record in records)
    found = []
    for device in sorted({record.device for record in records}):
        own = [record for record in records if record.device == device]
        busy = _covered(record for record in own if record.kind not in _COPIES)
        either = _covered(own)
        found.append(DeviceTotals(device, busy, either - busy, whole - either))
    return found


def stage_totals(records: Sequence[Record]) -> list[StageTotals]:
    # the same stage of another run may be on another device
    groups: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.stage, record.device), []).append(record)
    found = []
    for (stage, device), own in groups.items():
        layers = [record.layer for record in own if record.layer >= 0]
        found.append(
            StageTotals(
                stage=stage,
                device=device,
                seconds=sum(record.end - record.start for record in own if record.kind not in _COPIES),
                copies=sum(record.end - record.start for record in own if record.kind in _COPIES),
                layers=(min(layers, default=-1), max(layers, default=-1)),
                kinds=tuple(dict.fromkeys(record.kind for record in own if record.kind not in _COPIES)),
            )
        )
    return sorted(found, key=lambda totals: -totals.seconds)


def _covered(records: Iterable[Record]) -> float:
    total, until = 0.0, float("-inf")
    for record in sorted(records, key=lambda record: record.start):
        total += max(0, record.end - max(record.start, until))
        until = max(until, record.end)
    return total
