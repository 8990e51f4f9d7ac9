"""``roundpipe timeline``: print, draw and convert timelines."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

import typer

from yobx_flatten.errors.failures import format_bytes, table
from yobx_flatten.terminal.output import console, printable, say, say_json

from ..timeline.record import DeviceTotals, StageTotals, device_totals, draw_on, merge_timelines, stage_totals
from .option_objects import format_seconds


def timeline(
    files: Annotated[
        list[pathlib.Path],
        typer.Argument(metavar="FILE...", help="Timelines from train --timeline or Timeline.save, one per process."),
    ],
    stages: Annotated[int, typer.Option(min=0, metavar="N", help="How many of the slowest stages to list.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print totals as JSON.")] = False,
) -> int:
    """Draw a timeline of a run: what each device did, and which stages took longest.

    chrome://tracing and ui.perfetto.dev also open timeline files. Several files are drawn together, with one row per
    rank and device.

    Exit status: 0 drawn; 2 a file does not exist, or is not a timeline.
    """
    read = merge_timelines(files)
    devices, slowest = device_totals(read.records), stage_totals(read.records)
    if json:
        say_json(
            {
                "seconds": _whole(devices),
                "records": len(read.records),
                "parameters": {"uploaded": read.uploaded, "skipped": read.skipped},
                "devices": [dataclasses.asdict(totals) for totals in devices],
                "stages": [dataclasses.asdict(totals) for totals in slowest],
            }
        )
        return 0
    draw_on(console(), read, printable)
    say("\n" + "\n".join(_devices(devices)))
    if read.skipped:
        say("\n" + _parameters(read.uploaded, read.skipped))
    if stages:
        say("\n" + "\n".join(_stages(slowest[:stages], len(slowest))))
    return 0


def _whole(devices: list[DeviceTotals]) -> float:
    return max(totals.busy + totals.transfers + totals.idle for totals in devices)


def _devices(devices: list[DeviceTotals]) -> list[str]:
    whole = _whole(devices) or 1.0
    rows = [["device", "computed", "only copied", "waited"]]
    for totals in devices:
        times = (totals.busy, totals.transfers, totals.idle)
        rows.append([totals.device, *(f"{format_seconds(time)} {100 * time / whole:>4.0f} %" for time in times)])
    return table(rows, align="<>>>", indent="")


def _parameters(uploaded: int, skipped: int) -> str:
    whole = uploaded + skipped
    return (
        f"parameters uploaded: {format_bytes(uploaded)} of {format_bytes(whole)}, {100 * uploaded / whole:.0f} %; the "
        "rest belongs to experts that no token was routed to"
    )


def _stages(slowest: list[StageTotals], count: int) -> list[str]:
    title = "Stages, slowest first" if len(slowest) == count else f"The slowest of {count} stages"
    rows = [["stage", "device", "layers", "computed", "copied", "work"]]
    for totals in slowest:
        first, last = totals.layers
        layers = "-" if first < 0 else str(first) if first == last else f"{first} to {last}"
        times = format_seconds(totals.seconds), format_seconds(totals.copies)
        rows.append([str(totals.stage), totals.device, layers, *times, ", ".join(totals.kinds)])
    return [title, *table(rows, align="><<>>")]
