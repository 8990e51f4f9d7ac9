"""``roundpipe doctor``: run all checks, and print their results."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import textwrap
from typing import Annotated

import typer

from yobx_flatten.terminal.failures import CHECK_FAILED
from yobx_flatten.terminal.output import console, progress, say, say_json

from ...errors import ConfigError
from ...estimate.device_rates import call_seconds, measure_disk
from ...estimate.hardware import describe_hardware, save_machine
from .checks import HERE, examine
from .devices import Check


def doctor(
    machine: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Also write the measured rates and sizes to this file, for plan --machine."),
    ] = None,
    disk: Annotated[
        pathlib.Path,
        typer.Option(metavar="DIR", help="Folder whose disk is measured, for --host disk:DIR (default: current)."),
    ] = HERE,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check this installation: versions, devices, memory, threads, disk, and a short training.

    Each line is ok, a warning or a failure; a warning or failure states what to do.

    Exit status: 0 nothing fails; 1 something fails.
    """
    with progress("checking this machine, and training for two steps"):
        findings = examine(disk)
        if machine is not None:
            measured = dataclasses.replace(describe_hardware(), call=call_seconds())
            with contextlib.suppress(ConfigError):  # a folder that is in memory: one of the findings
                rates = measure_disk(disk)
                measured = dataclasses.replace(measured, disk_read=rates.read, disk_write=rates.write)
            save_machine(measured, machine)
    failed = any(finding.status == "fail" for finding in findings)
    if json:
        say_json({"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        say("\n".join(_lines(findings, min(console().width, 100))))
        if machine is not None:
            say(f"\nrates and sizes are in {machine}")
    return CHECK_FAILED if failed else 0


def _lines(findings: list[Check], width: int) -> list[str]:
    lines = []
    for finding in findings:
        text = f"{finding.status:<8} {finding.name}: {finding.found}"
        lines += textwrap.wrap(text, width, subsequent_indent=" " * 9)
        if finding.remedy:
            lines += textwrap.wrap(f"-> {finding.remedy}", width, initial_indent=" " * 9, subsequent_indent=" " * 12)
    counts = {status: sum(f.status == status for f in findings) for status in ("fail", "warning")}
    states = [f"{count} {status}{'s' if count > 1 else ''}" for status, count in counts.items() if count]
    return [*lines, "", ", ".join(states) if states else "all is well"]
