"""``roundpipe timeline``."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

import typer

from yobx_flatten.terminal.output import console, say, say_json

from ..timeline.drawing import draw_on
from ..timeline.file import load_timeline
from ..timeline.picture import save_picture
from ..timeline.totals import DeviceTotals, StageTotals, device_totals, stage_totals
from .quantities import format_seconds

__all__ = ["timeline"]


def timeline(
    file: Annotated[pathlib.Path, typer.Argument(metavar="FILE", help="What train --timeline or Timeline.save wrote.")],
    stages: Annotated[int, typer.Option(min=0, metavar="N", help="How many of the slowest stages are listed.")] = 5,
    picture: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="Draw it into a .png, .svg or .pdf as well.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print totals as JSON.")] = False,
) -> int:
    """Draw who computed what when, with what each device did and which stages took longest.

    The file is a trace: chrome://tracing and ui.perfetto.dev open it as well.
    Exit status: 0 drawn; 2 there is no such file, or it is not a timeline.
    """
    read = load_timeline(file)
    devices, slowest = device_totals(read.records), stage_totals(read.records)
    if picture is not None:
        save_picture(read.records, picture)
    if json:
        say_json(
            {
                "seconds": _whole(devices),
                "records": len(read.records),
                "devices": [dataclasses.asdict(totals) for totals in devices],
                "stages": [dataclasses.asdict(totals) for totals in slowest],
            }
        )
        return 0
    draw_on(console(), read)
    say("\n" + "\n".join(_devices(devices)))
    if stages:
        say("\n" + "\n".join(_stages(slowest[:stages], len(slowest))))
    if picture is not None:
        say(f"\ndrawn into {picture}")
    return 0


def _whole(devices: list[DeviceTotals]) -> float:
    return max(totals.busy + totals.transfers + totals.idle for totals in devices)


def _devices(devices: list[DeviceTotals]) -> list[str]:
    whole = _whole(devices) or 1.0
    width = max(6, *(len(totals.device) for totals in devices))
    lines = [f"{'device':<{width}}  {'computed':>16}  {'only copied':>16}  {'waited':>16}"]
    for totals in devices:
        cells = (f"{format_seconds(t)} {100 * t / whole:>4.0f} %" for t in (totals.busy, totals.transfers, totals.idle))
        lines.append(f"{totals.device:<{width}}" + "".join(f"  {cell:>16}" for cell in cells))
    return lines


def _stages(slowest: list[StageTotals], count: int) -> list[str]:
    title = "Stages, slowest first" if len(slowest) == count else f"The slowest of {count} stages"
    width = max(6, *(len(totals.device) for totals in slowest))
    lines = [title, f"  {'stage':>5}  {'device':<{width}}  {'layers':<10}  {'computed':>9}  {'copied':>9}  work"]
    for totals in slowest:
        first, last = totals.layers
        layers = "-" if first < 0 else str(first) if first == last else f"{first} to {last}"
        lines.append(
            f"  {totals.stage:>5}  {totals.device:<{width}}  {layers:<10}  {format_seconds(totals.seconds):>9}  "
            f"{format_seconds(totals.copies):>9}  {', '.join(totals.kinds)}"
        )
    return lines
