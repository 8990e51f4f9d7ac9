"""Load and check timeline files, which :meth:`Timeline.save` writes."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from yobx_flatten.files.document import read_document

from ..errors import RoundPipeError
from .record import KINDS, Record, Timeline

_FIX = "To write one: roundpipe train MODEL --text FILE -o DIR --timeline FILE"
_FOREVER = 1e18  # microseconds; NaN is not below it, either


class TimelineFileError(RoundPipeError, ValueError):
    """A file is not a timeline file of a pipeline, or it is damaged."""


def load_timeline(path: str | os.PathLike[str]) -> Timeline:
    """Load a timeline from a file."""
    # path: file that `Timeline.save` or `roundpipe train --timeline` wrote
    return _read(path)[0]


def merge_timelines(paths: Sequence[str | os.PathLike[str]]) -> Timeline:
    """Load the timelines of several processes as one: the devices of each are rows of its own.

    They are aligned by the time of day at which each started; where a file does not have it, all begin together.
    """
    # paths: a file of each process, in the order of ranks
    # returns: the timeline; its devices are `"rank 0 cuda:0"` and so on. Of one file, as it is.
    if len(paths) == 1:
        return load_timeline(paths[0])
    read = [_read(path) for path in paths]
    times = [started for _, started in read if started is not None]
    first = min(times) if len(times) == len(read) else None
    digits = len(str(len(read) - 1))
    merged = Timeline()
    for rank, (timeline, started) in enumerate(read):
        shift = 0.0 if first is None or started is None else started - first
        merged.records += [
            dataclasses.replace(
                record,
                device=f"rank {rank:>{digits}} {record.device}",
                start=record.start + shift,
                end=record.end + shift,
            )
            for record in timeline.records
        ]
        merged.add_parameters(timeline.uploaded, timeline.skipped)
    return merged


def _read(path: str | os.PathLike[str]) -> tuple[Timeline, float | None]:
    """The timeline, and the time of day of its first record, if the file has it."""
    name = os.fspath(path)
    content = read_document(
        pathlib.Path(path), dict[str, Any], failure=TimelineFileError, remedy=_FIX, kind="timeline file"
    )
    events = content.get("traceEvents")
    if not isinstance(events, list):
        raise TimelineFileError(f"{name} is not a timeline file: it is JSON, but not a trace. {_FIX}")
    devices = _devices(events)
    timeline = Timeline()
    timeline.records = [
        _record(event, devices, f"{name}, event {number}")
        for number, event in enumerate(events)
        if not isinstance(event, dict) or event.get("ph") != "M"
    ]
    if not timeline.records:
        raise TimelineFileError(f"{name} holds no record: nothing ran while it was written.")
    found = content.get("otherData")
    other: dict[str, Any] = found if isinstance(found, dict) else {}
    timeline.add_parameters(*(_bytes_of(other.get(name)) for name in ("uploaded", "skipped")))
    started: Any = other.get("started")
    is_time = isinstance(started, (int, float)) and abs(started) < _FOREVER
    return timeline, float(started) if is_time else None


def _bytes_of(value: Any) -> int:
    """A number of bytes; 0 where a file has none, as those of earlier versions."""
    return value if type(value) is int and 0 <= value < _FOREVER else 0


def _devices(events: list[Any]) -> dict[Any, str]:
    """The name of each row."""
    named = [event for event in events if isinstance(event, dict) and event.get("name") == "thread_name"]
    found = {}
    for event in named:
        arguments = event.get("args")
        name = arguments.get("name") if isinstance(arguments, dict) else None
        if isinstance(name, str) and isinstance(event.get("tid"), int):
            found[event["tid"]] = name
    return found


def _record(event: Any, devices: dict[Any, str], place: str) -> Record:
    arguments = event.get("args") if isinstance(event, dict) else None
    if not isinstance(arguments, dict) or event.get("ph") != "X":
        raise TimelineFileError(f"{place} is not a record of a pipeline. Is it the trace of another program?")
    numbers: list[Any] = [arguments.get(key) for key in ("stage", "microbatch", "layer")]
    times: list[Any] = [event.get(key) for key in ("ts", "dur")]
    kind, row = event.get("cat"), event.get("tid")
    device = devices.get(row) if isinstance(row, int) else None
    if kind not in KINDS or device is None or not all(type(number) is int for number in numbers):
        raise TimelineFileError(f"{place} is not a record of a pipeline. Is it the trace of another program?")
    if not all(type(time) in (int, float) and abs(time) < _FOREVER for time in times) or times[1] < 0:
        raise TimelineFileError(f"{place} has no time: ts is {times[0]!r}, dur is {times[1]!r}.")
    stage, microbatch, layer = numbers
    start = times[0] / 1e6
    return Record(stage, microbatch, device, kind, start, start + times[1] / 1e6, layer)
