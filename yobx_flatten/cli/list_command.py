"""``yobx-flatten list``: list the registered classes."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ..declare.listing import flattening_list
from ..model_folder.source.find import require_transformers
from ..terminal.output import say, say_json, table
from ..terminal.running import UserError
from .targets import import_module

_KINDS = ("layer", "cache", "output", "container")


def list_classes(
    kind: Annotated[str, typer.Option(metavar="KIND", help=f"Only one of {', '.join(_KINDS)}.")] = "",
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Import a module that registers further classes first."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List the registered classes, their leaves, and the libraries that know them.

    The list has the transformers classes that `register_flattening_functions(patch_transformers=True)` registers.
    Classes of a single model are listed after its module is imported (--import).
    """
    if kind and kind not in _KINDS:
        raise UserError(f"unknown kind {kind!r}; choose from {', '.join(_KINDS)}")
    require_transformers("the list")
    for name in imports or []:
        import_module(name)
    rows = [row for row in flattening_list() if kind in ("", row.kind)]
    if json:
        say_json([dataclasses.asdict(row) for row in rows])
        return 0
    cells = [
        (row.kind, _short(row.cls), _short(row.code), row.leaves, row.tables or "-", row.registered_by) for row in rows
    ]
    table(("kind", "class", "code", "leaves", "registered in", "by"), cells)
    say(f"{len(rows)} classes. Counters and static parts: --json.")
    return 0


def _short(name: str) -> str:
    for prefix in ("transformers.cache_utils.", "transformers.", "yobx_flatten.transformers:"):
        name = name.removeprefix(prefix)
    return name
