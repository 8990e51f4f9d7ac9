"""``yobx-flatten verify``: check an exported folder with its stored cases."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ..model_folder.verify import verify_folder
from ..terminal.failures import CHECK_FAILED
from ..terminal.output import progress, say, say_json
from .options import Device, Folder, Trust

__all__ = ["verify"]


def verify(
    folder: Folder,
    trust: Trust = False,
    device: Device = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check an exported folder: replay its stored cases, and generate with its files.

    The model is not needed: its outputs, and its tokens, are stored next to the files. Exit status: 0 all are as they
    were; 1 one differs.
    """
    with progress(f"reading {folder}") as show:
        report = verify_folder(folder, on_check=show, trust=trust, device=device)
    if json:
        checks = [dataclasses.asdict(check) for check in report.checks]
        say_json({"path": str(folder), "ok": report.ok, "checks": checks})
    else:
        say(str(report))
    return 0 if report.ok else CHECK_FAILED
