"""Write the help of every command as Markdown, for the guide."""

from __future__ import annotations

from typing import Any

import typer


def reference(app: typer.Typer) -> str:
    """Return the reference of the command line: one section per command, with its purpose, arguments and options."""
    group: Any = typer.main.get_command(app)
    return "\n".join(_section(name, command) for name, command in group.commands.items() if not command.hidden)


def _section(name: str, command: Any) -> str:
    rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
    lines = [f"### {name}", "", " ".join((command.help or "").split()), ""]
    if rows:
        lines += ["| | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    name = ", ".join((*parameter.opts, *parameter.secondary_opts)) if is_option else parameter.metavar
    default = parameter.default
    shown = (
        f" Default: `{default}`." if is_option and default not in (None, False, "") and not callable(default) else ""
    )
    return f"| `{name}` | {(parameter.help or '').replace('|', chr(92) + '|')}{shown} |"
