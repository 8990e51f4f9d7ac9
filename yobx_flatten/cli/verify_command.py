"""``yobx-flatten verify``: check an exported folder with its stored cases, or any file next to its model."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

import typer

from ..generate.layout import MANIFEST
from ..model_folder.explain import FolderExplanation, explain_folder
from ..model_folder.verify import verify_folder
from ..terminal.output import progress, say, say_json
from ..terminal.running import CHECK_FAILED, REFUSED, UserError
from ..verify.verify_file import verify_file
from .options import Device, Trust


def verify(
    folder: Annotated[
        pathlib.Path,
        typer.Argument(metavar="PATH", help="A folder that export wrote; with --model, any model file or folder."),
    ],
    trust: Trust = False,
    device: Device = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also find the first node whose values differ from this model's."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Compare files that any exporter wrote with this model.")
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="THEIRS=OURS", help="With --model: rename an input or output (repeatable)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check an exported folder: run its stored inputs, generate tokens, and compare all results with the model.

    The model is not needed, because its results are stored in the folder. Exit status: 0 all results are equal; 1 a
    result differs. With --explain, the model is exported again, and its values are compared with those of the files.

    With --model, the files may be from any exporter. The model runs on the same inputs: other sizes, texts longer than
    its window, padding, and in a loop over the file's cache. Exit status: 0 all files are right; 1 a file is wrong; 2 a
    file cannot be compared, or fails on all inputs.
    """
    if model is not None:
        if device is not None or explain is not None:
            raise UserError("--device and --explain are for exported folders. Leave both options out with --model.")
        return _verify_file(folder, model, names or [], trust=trust, json=json)
    if names or (folder.exists() and not (folder / MANIFEST).exists()):
        why = "--map works only with --model" if names else f"{folder}: yobx-flatten export did not write it"
        raise UserError(f"{why}. Name the model:\n    yobx-flatten verify {folder} --model MODEL")
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


def _verify_file(path: pathlib.Path, model: str, pairs: list[str], *, trust: bool, json: bool) -> int:
    strange = next((pair for pair in pairs if "=" not in pair), None)
    if strange is not None:
        raise UserError(f"--map takes NAME_IN_THE_FILE=NAME_IN_THE_MODEL, as in --map ids=input_ids, found {strange}")
    names = dict(pair.split("=", 1) for pair in pairs)
    with progress(f"reading {path}") as show:
        found = verify_file(path, model, names=names, trust=trust, on_file=show)
    say_json(found.as_dict()) if json else say(str(found))
    return {True: 0, False: CHECK_FAILED, None: REFUSED}[found.ok]


def _as_rows(explained: FolderExplanation) -> list[dict[str, object]]:
    return [
        {"file": file, "case": case, **dataclasses.asdict(compared)}
        for (file, case), compared in explained.files.items()
    ]
