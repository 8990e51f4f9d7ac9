"""The command line application: all commands, and how an error is shown."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Annotated

import typer

from ..terminal.output import say
from ..terminal.running import reflow_help, run_app
from .adapter_command import adapter
from .chat_command import chat
from .check_command import check
from .demo import demo
from .env_command import env
from .explain_command import explain
from .export_command import export
from .generate_command import generate
from .list_command import list_classes
from .repository import bench, is_installed_copy, matrix
from .verify_command import verify


def _version(asked: bool) -> None:
    if asked:
        say(f"yobx_flatten {importlib.metadata.version('yobx-flatten')}")
        raise typer.Exit


def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")] = False,
) -> None:
    """Export models with their KV caches, and check every file against the model.

    Exit status: 0 success; 1 a check failed; 2 the request is invalid or impossible.
    """


def _app() -> typer.Typer:
    made = typer.Typer(name="yobx-flatten", no_args_is_help=True, pretty_exceptions_enable=False)
    made.callback()(_all_commands)
    made.command("demo")(demo)
    made.command("export")(export)
    made.command("verify")(verify)
    made.command("adapter")(adapter)
    made.command("generate")(generate)
    made.command("chat")(chat)
    made.command("check")(check)
    made.command("explain")(explain)
    made.command("list")(list_classes)
    made.command("env")(env)
    # an installed copy has no benchmarks and no matrix: its help does not list these commands
    hidden = is_installed_copy()
    made.command("bench", hidden=hidden)(bench)
    made.command("matrix", hidden=hidden, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        matrix
    )
    reflow_help(made)
    return made


app = _app()


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names, by default the arguments of the process, and return its exit status."""
    return run_app(app, argv, program="yobx-flatten")
