"""Write the reference of a command line from the help of its commands."""

from typing import Any

import typer


def reference(app: typer.Typer) -> str:
    """Return the arguments and options of every command as Markdown tables."""
    group: Any = typer.main.get_command(app)
    lines = []
    for name, command in group.commands.items():
        if command.hidden:
            continue
        lines += [f"### {name}", "", " ".join((command.help or "").split()), ""]
        rows = []
        for parameter in (one for one in command.params if one.name != "help"):
            is_option, default = parameter.param_type_name == "option", parameter.default
            title = ", ".join((*parameter.opts, *parameter.secondary_opts)) if is_option else parameter.metavar
            is_shown = is_option and default not in (None, False, "") and not callable(default)
            text = (parameter.help or "").replace("|", r"\|") + (f" Default: `{default}`." if is_shown else "")
            rows.append(f"| `{title}` | {text} |")
        lines += ["| | |", "|---|---|", *rows, ""] if rows else []
    return "\n".join(lines)
