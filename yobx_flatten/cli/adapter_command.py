"""``yobx-flatten adapter``: add an adapter to an exported folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import typer

from ..model_folder.added_adapters import add_adapter
from ..terminal.output import progress, say, say_json
from ..terminal.running import UserError
from .options import Folder


def adapter(
    folder: Folder,
    added: Annotated[list[str], typer.Argument(metavar="NAME=FOLDER", help="One or more PEFT adapters.")],
    model: Annotated[
        str | None, typer.Option(help="Model that DIR was exported from (default: the adapter's base model).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace adapters of these names.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Add LoRA adapters to an exported folder, and check them against PEFT.

    DIR must have been exported with --adapter or --room-for-adapters. The model is loaded for the comparison. Exit
    status: 0 all checks passed; 1 the files differ from PEFT, and nothing was written.
    """
    found = []
    for name, place in named_folders(added).items():
        with progress(f"adding {name}"):
            found.append(add_adapter(folder, name, place, model=model, overwrite=overwrite))
    if json:
        say_json([{"name": one.name, "checks": [dataclasses.asdict(check) for check in one.checks]} for one in found])
    else:
        say("\n".join(map(str, found)))
        say(f'\nNext:  yobx-flatten generate {folder} --adapter {found[0].name} --prompt "..."')
    return 0


def named_folders(given: Sequence[str]) -> dict[str, str]:
    """Return the folder of each adapter by the adapter's name, from texts of the form ``NAME=FOLDER``."""
    found: dict[str, str] = {}
    for one in given:
        name, equals, place = one.partition("=")
        if not equals or not name or not place or name in found:
            raise UserError(f"write each adapter as NAME=FOLDER, each with another name; found {one}")
        found[name] = place
    return found
