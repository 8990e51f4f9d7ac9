"""All options of a command in a YAML file: ``--config FILE`` reads one, ``--print-config`` writes one.

::

    # Text
    text: [texts]
    length: 256
    # A step
    batch: 4

A line of the file counts as the option of its name; what is typed on the command line counts more.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from yobx_flatten.errors.dependencies import require
from yobx_flatten.errors.failures import raised_as
from yobx_flatten.files.document import read_text
from yobx_flatten.terminal.failures import UserError

# Options that are about the file itself.
_OWN = ("config", "print_config")
_LARGEST = 2**20  # bytes


def read_config_file(context: typer.Context, path: pathlib.Path | None) -> pathlib.Path | None:
    """Take the lines of a file as defaults of the options: the callback of ``--config``, which is looked at first."""
    if path is None or context.resilient_parsing:
        return path
    parameters = {one.name: one for one in context.command.params if one.name not in (*_OWN, "help")}
    given: dict[str, Any] = {}
    for key, value in _mapping_in(path).items():
        name = str(key).replace("-", "_")
        if name not in parameters:
            close = difflib.get_close_matches(name, [str(one) for one in parameters], 1)
            meant = f" Is it {close[0].replace('_', '-')}?" if close else ""
            raise UserError(f"{path}: there is no option {key}.{meant} All of them: roundpipe train --print-config")
        if value is not None:  # as where it is left out
            takes_many = parameters[name].nargs == -1 or getattr(parameters[name], "multiple", False)
            typed = _as_typed(value, f"{path}: {key}")
            given[name] = [typed] if takes_many and not isinstance(typed, list) else typed
    context.default_map = {**(context.default_map or {}), **given}
    return path


def _mapping_in(path: pathlib.Path) -> Mapping[str, Any]:
    require("yaml", purpose="--config", extra="train")
    import yaml  # type: ignore[import-untyped] # its types are a package of their own

    try:
        text = read_text(path, failure=UserError, most=_LARGEST)
    except OSError as error:
        raise UserError(f"--config {path}: it cannot be read: {error}") from error

    def refused(error: BaseException) -> UserError:
        return UserError(f"--config {path}: it is not YAML: {' '.join(str(error).split())[:200]}")

    with raised_as(refused, UserError):  # what makes a date or a number of a text raises errors of Python
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            # a few of them stand for any number of values, or for a list in itself
            raise UserError(f"--config {path}: it has an alias (*name). Write the value itself.")
        found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise UserError(f"--config {path}: expected lines like `batch: 4`, found a {type(found).__name__}")
    return found


def _as_typed(value: object, place: str) -> Any:
    """The value in the form that an option is typed in; the command line checks it as one that was typed."""
    if isinstance(value, list):
        return [_as_typed(one, place) for one in value]
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float, str)):
        return str(value)
    raise UserError(f"{place} is a {type(value).__name__}. Write text, a number, true, false, or a list")


def format_config(concerns: Iterable[tuple[str, Any]]) -> str:
    """Return the file that has the values of all options."""
    lines: list[str] = []
    for heading, concern in concerns:
        lines.append(f"# {heading}")
        for field in dataclasses.fields(concern):
            value = getattr(concern, field.name)
            if field.name not in _OWN:
                shown = json.dumps(value, default=str, ensure_ascii=False)  # every line of JSON is one of YAML
                lines.append(f"{field.name.replace('_', '-')}: {shown}")
    return "\n".join(lines)
