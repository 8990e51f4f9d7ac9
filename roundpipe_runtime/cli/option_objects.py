"""Define command-line options as dataclasses; parse and format numbers with units, such as bytes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_type_hints

import typer

from yobx_flatten.core.terminal.command_line import UserError
from yobx_flatten.errors.failures import result_or

T = TypeVar("T")


def option(metavar: str, text: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=panel, **more)


def takes_options(**concerns: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that passes the options of a command as objects of the given dataclasses.

    ::

        @takes_options(rows=RowOptions, files=FileOptions)
        def train(context, *, rows, files): ...     # typer calls train(context, batch=4, ...)
    """

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def command(context: typer.Context, **given: Any) -> int:
            made = {}
            for keyword, concern in concerns.items():
                names = [field.name for field in dataclasses.fields(concern)]
                made[keyword] = concern(**{name: given.pop(name) for name in names if name in given})
            if given:
                raise TypeError(f"{function.__name__} got an unexpected keyword argument {next(iter(given))!r}")
            return function(context, **made)

        parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_ONLY, annotation=typer.Context)]
        for concern in concerns.values():
            hints = get_type_hints(concern, include_extras=True)
            for field in dataclasses.fields(concern):
                default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
                how: Any = {"default": default, "annotation": hints[field.name]}
                parameters.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, **how))
        # typer reads signature and annotations
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # of every function
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


_UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
    **{unit: 1024**power for power, unit in enumerate(("b", "kib", "mib", "gib", "tib"))},
}


def parse_bytes(text: str, option: str) -> int:
    """Parse a size with a unit, such as ``24GiB``, and return the number of bytes.

    >>> parse_bytes("24GiB", "--memory"), parse_bytes("1.5 GB", "--memory")
    (25769803776, 1500000000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    factor = _UNITS.get(found[2].lower()) if found else None
    count = int(float(found[1]) * factor) if found and factor else 0
    if not count:
        raise UserError(f"{option} {text!r} is not a size of memory. Write a number and its unit: {option} 24GiB")
    return count


def parse_gigabytes(text: str, option: str) -> float | Literal["auto"]:
    """Parse the value of ``keep_parameters``: a number of GB, or ``"auto"``.

    >>> parse_gigabytes("1.5", "--keep-parameters"), parse_gigabytes("auto", "--keep-parameters")
    (1.5, 'auto')
    """
    if text == "auto":
        return "auto"
    found = result_or(lambda: float(text), lambda error: math.nan)
    if not 0 <= found < math.inf:
        raise UserError(f"{option} must be a number of GB (0 or more), or auto, found {text!r}. Example: {option} 2.5")
    return found


def format_count(count: float) -> str:
    """Return a large number in a readable form.

    >>> format_count(70_553_706_496), format_count(1_500_000), format_count(320)
    ('70.6 billion', '1.5 million', '320')
    """
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Return a time in a readable unit.

    >>> format_seconds(0.00042), format_seconds(0.25), format_seconds(126.76), format_seconds(4000)
    ('420 µs', '250 ms', '127 s', '67 min')
    """
    if 0 < seconds < 1e-3:
        return f"{1e6 * seconds:.3g} µs"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds / 60:.0f} min"
