"""``yobx-flatten check``: check the inputs of an export before anything is traced."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import typer

from ..declare.scopes import register_flattening_functions
from ..diagnose.checks import Findings, check_inputs
from ..model_folder.pieces.tasks import pieces_for
from ..model_folder.source.find import MODEL_NAMES, find_model
from ..terminal.output import printable, say, say_json
from ..terminal.running import CHECK_FAILED, UserError
from .targets import call_of, is_object_name, object_of


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CALL_OR_MODEL",
            help="MODULE:NAME of a function that returns (module, kwargs) or (module, args, kwargs); or else a model: "
            + MODEL_NAMES,
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check the inputs of an export before anything is traced.

    The report lists what would fail or give wrong results: unregistered classes, arguments that forward does not
    accept, one tensor passed twice, sizes of 0 and 1. Exit status: 0 no errors (warnings do not count); 1 errors.
    """
    calls = [_own(target)] if is_object_name(target) else _of_model(target)
    found: dict[str, Findings] = {}
    for call in calls:
        with register_flattening_functions(patch_transformers="transformers" in sys.modules):
            found[call.name] = check_inputs(call.module, call.args, call.kwargs, call.dynamic_shapes)
    if json:
        say_json({name: [_as_dict(finding) for finding in findings] for name, findings in found.items()})
    else:
        for name, findings in found.items():
            say(f"{name}: {findings}")
    return CHECK_FAILED if any(findings.errors for findings in found.values()) else 0


class _Call(NamedTuple):
    name: str
    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any = "auto"


def _own(target: str) -> _Call:
    call = call_of(object_of(target))
    if call is None:
        raise UserError(f"{target} must return (module, kwargs) or (module, args, kwargs)")
    return _Call(target, *call)


def _of_model(target: str) -> list[_Call]:
    found = find_model(target)
    if not found.has_weights:
        sys.stderr.write(printable(f"{found}\n"))
    _, pieces = pieces_for(found.load(), "auto")
    # the axes that may vary are those that export_folder declares
    return [_Call(piece.stem, piece.module, (), piece.kwargs, piece.dynamic_shapes) for piece in pieces]


def _as_dict(finding: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(finding).items() if name != "kind"}
