"""``yobx-flatten verify``: check an exported folder with its stored cases."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ..model_folder.verify import verify_folder
from ..model_folder.with_model.explain import FolderExplanation, explain_folder
from ..terminal.failures import CHECK_FAILED
from ..terminal.output import progress, say, say_json
from .options import Device, Folder, Trust


def verify(
    folder: Folder,
    trust: Trust = False,
    device: Device = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also find the first node whose values differ from this model's."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check an exported folder: run its stored inputs, generate tokens, and compare both with the model's results.

    The model is not needed, because its results are stored in the folder. Exit status: 0 all results are equal; 1 a
    result differs. With --explain, the model is exported again, and its values are compared with those of the files.
    """
    with progress(f"reading {folder}") as show:
        report = verify_folder(folder, on_check=show, trust=trust, device=device)
        explained = None if explain is None else explain_folder(folder, explain)
    if json:
        checks = [dataclasses.asdict(check) for check in report.checks]
        more = {} if explained is None else {"explained": _as_rows(explained)}
        say_json({"path": str(folder), "ok": report.ok, "checks": checks, **more})
    else:
        say(str(report))
        if explained is not None:
            say(f"\n{explained}")
    return 0 if report.ok and (explained is None or explained.ok) else CHECK_FAILED


def _as_rows(explained: FolderExplanation) -> list[dict[str, object]]:
    return [
        {"file": file, "case": case, **dataclasses.asdict(compared)}
        for (file, case), compared in explained.files.items()
    ]
