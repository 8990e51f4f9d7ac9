"""``roundpipe timeline``: print, draw and convert timelines."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

import typer

from yobx_flatten.core.terminal.command_line import console, printable, say, say_json
from yobx_flatten.errors.failures import format_bytes, table

from ..schedule.timeline import device_totals, draw_on, merge_timelines, stage_totals
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
    whole = max(totals.busy + totals.transfers + totals.idle for totals in devices)
    if json:
        say_json(
            {
                "seconds": whole,
                "records": len(read.records),
                "parameters": {"uploaded": read.uploaded, "skipped": read.skipped},
                "devices": [dataclasses.asdict(totals) for totals in devices],
                "stages": [dataclasses.asdict(totals) for totals in slowest],
            }
        )
        return 0
    draw_on(console(), read, printable)
    rows = [["device", "computed", "only copied", "waited"]]
    for each in devices:
        times = (each.busy, each.transfers, each.idle)
        shares = (f"{format_seconds(time)} {100 * time / (whole or 1.0):>4.0f} %" for time in times)
        rows.append([each.device, *shares])
    say("\n" + "\n".join(table(rows, align="<>>>", indent="")))
    if read.skipped:
        parameters = read.uploaded + read.skipped
        say(
            f"\nparameters uploaded: {format_bytes(read.uploaded)} of {format_bytes(parameters)}, "
            f"{100 * read.uploaded / parameters:.0f} %; the rest belongs to experts that no token was routed to"
        )
    if stages:
        title = "Stages, slowest first" if len(slowest) <= stages else f"The slowest of {len(slowest)} stages"
        rows = [["stage", "device", "layers", "computed", "copied", "work"]]
        for one in slowest[:stages]:
            first, last = one.layers
            layers = "-" if first < 0 else str(first) if first == last else f"{first} to {last}"
            seconds = format_seconds(one.seconds), format_seconds(one.copies)
            rows.append([str(one.stage), one.device, layers, *seconds, ", ".join(one.kinds)])
        say("\n" + "\n".join([title, *table(rows, align="><<>>")]))
    return 0
