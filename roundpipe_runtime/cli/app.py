"""Run the program ``roundpipe``, print its errors, and define its command ``roundpipe timeline``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from yobx_flatten import FlattenError
from yobx_flatten.core.terminal.command_line import console, printable, reflow_help, run_app, say, say_json
from yobx_flatten.errors.failures import format_bytes, table

from ..distributed.ranks.torchrun import is_one_of_many
from ..errors import RoundPipeError
from ..fine_tune.job import Job
from ..schedule.timeline import device_totals, draw_on, merge_timelines, stage_totals
from .demo import demo
from .doctor import doctor
from .option_objects import format_seconds
from .plan import plan
from .train import train


def timeline(
    files: Annotated[
        list[pathlib.Path],
        typer.Argument(metavar="FILE...", help="Timeline files of train --timeline or Timeline.save, one per process."),
    ],
    stages: Annotated[int, typer.Option(min=0, metavar="N", help="How many of the slowest stages to list.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print the totals of devices and stages as JSON.")] = False,
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


app = typer.Typer(name="roundpipe", no_args_is_help=True, pretty_exceptions_enable=False)
for _command in (demo, plan, train, timeline, doctor):  # in the order of --help
    app.command(_command.__name__)(_command)


def _version(asked: bool) -> None:
    if asked:
        say(f"roundpipe_runtime {importlib.metadata.version('yobx-flatten')}")
        raise typer.Exit


def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")] = False,
) -> None:
    """Train models larger than the device. Results match training without a pipeline.

    Exit status: 0 success; 1 a check failed; 2 the request cannot be served; 130 interrupted.
    """


app.callback()(_all_commands)
reflow_help(app)


def run(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    run_once = functools.partial(run_app, app, given, program="roundpipe", expected=(FlattenError, RoundPipeError))
    if "train" not in given or not is_one_of_many():
        return run_once()
    try:
        job = Job()
    except RuntimeError as error:  # torch cannot connect to the other processes
        sys.stderr.write(f"roundpipe: the other processes cannot be reached: {str(error).splitlines()[0]}\n")
        return 2
    with contextlib.ExitStack() as stack:
        stack.callback(job.close)
        if not job.is_first:  # rank 0 prints
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        start = job.exchange(time.time_ns())[0]  # a job may run several commands
        return run_once(is_reporter=lambda: job.claim(f"error of {start}"))  # the first to claim prints its error
