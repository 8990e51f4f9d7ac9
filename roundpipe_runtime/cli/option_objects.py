"""Options of a command as dataclasses, one per concern; on the command line, and as keywords, they stay flat."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import typer

T = TypeVar("T")


def option(metavar: str, text: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option with its help, in a panel of the help."""
    return typer.Option(metavar=metavar, help=text, rich_help_panel=panel, **more)


def takes_options(**concerns: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator of a command that is called with an object for each concern.

    ::

        @takes_options(rows=RowOptions, files=FileOptions)
        def train(context, *, rows, files): ...

        train(context, batch=4, output=pathlib.Path("out"))     # how typer calls it
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
        parameters += [parameter for concern in concerns.values() for parameter in _parameters(concern)]
        # typer reads these two
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # of every function
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameters(concern: type) -> list[inspect.Parameter]:
    hints = get_type_hints(concern, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(concern)
    ]


def flat_options(*concerns: Any) -> dict[str, Any]:
    """Return the values of all options by name."""
    return {field.name: getattr(concern, field.name) for concern in concerns for field in dataclasses.fields(concern)}
