"""Draw a timeline on the terminal, and summarize the timeline: how long each device computed, copied and waited."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .record import Record, Timeline

_COPIES = ("upload", "download")

# Meaning of each letter of the drawing, and its colour on a terminal.
_WORK = {
    "F": ("forward", "white on blue"),
    "R": ("forward again", "black on cyan"),
    "L": ("loss", "black on yellow"),
    "B": ("backward", "white on red"),
    "u": ("copy in", "black on white"),
    "d": ("copy back", "black on white"),
    ".": ("waiting", "bright_black"),
}


def draw_on(console: Any, timeline: Timeline, shown: Callable[[str], str] = str) -> None:
    """Print the drawing of a timeline and its legend."""
    # shown: function that makes device names from a file safe for a terminal. Default: names are printed unchanged.
    from rich.text import Text

    margin = max(len(record.device) for record in timeline.records)
    width = max(8, min(console.width, 120) - margin - 3)
    drawing, _, total = timeline.draw(width).rpartition("  ")
    found = set()
    for line in drawing.splitlines():
        name, row = line.rstrip("|").split(" |")
        text = Text(f"{shown(name)} ")
        for letter, same in itertools.groupby(row):
            text.append("".join(same), _WORK[letter][1])
            found.add(letter)
        console.print(text)
    console.print(f"{'':{margin}} 0{total:>{width - 1}}", style="dim")
    legend = Text()
    for letter, (meaning, style) in _WORK.items():
        if letter in found:
            legend.append(f" {letter} ", style).append(f" {meaning} ")
    console.print(legend)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTotals:
    """Seconds that a device computed, copied and waited."""

    device: str
    busy: float  # seconds of computation
    transfers: float  # seconds of copies while the device did not compute
    idle: float  # other seconds


@dataclasses.dataclass(frozen=True, slots=True)
class StageTotals:
    """Time of a stage, summed over all microbatches."""

    stage: int  # index of the stage in the run
    device: str
    seconds: float  # seconds of computation
    copies: float  # seconds of copies
    layers: tuple[int, int]  # first and last layer, -1 if they are not known
    kinds: tuple[str, ...]  # kinds of work, in order


def device_totals(records: Sequence[Record]) -> list[DeviceTotals]:
    """Return the totals of each device by name, over the time from the first to the last of all records.

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
    """Return the totals of each stage, the slowest first."""
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
