"""Define the command line ``yobx-flatten``, and its commands ``env``, ``bench`` and ``matrix``."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ..core.terminal.command_line import UserError, reflow_help, run_app, say, say_json
from ..errors import NEWEST_TRIED, untried_versions
from .demo import demo
from .folder_commands import adapter, chat, export, generate, verify
from .inspect_commands import check, explain, list_classes

_LIBRARIES = (
    "yobx-flatten torch transformers onnx onnxscript onnxruntime onnxruntime-genai openvino executorch torchao optree "
    "jax diffusers accelerate peft safetensors typer rich"
)


def env(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """Print the versions of Python and all libraries for a bug report, and the newest tested versions."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for name in _LIBRARIES.split():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    untried = untried_versions()
    if json:
        newer = [one.library for one in untried]
        say_json({**found, "executable": sys.executable, "newest_tried": NEWEST_TRIED, "newer_than_tried": newer})
        return 0
    width, shown = max(map(len, found)), {name: version or "not installed" for name, version in found.items()}
    wide = max(len(shown.get(name, "")) for name in NEWEST_TRIED)
    for name, tried in NEWEST_TRIED.items():
        if name in shown:
            shown[name] = f"{shown[name]:{wide}}  (newest tried: {tried})"
    say("\n".join(f"{name:{width}}  {version}" for name, version in shown.items()))
    if untried:
        lines = [f"{one}. If something fails: pip install '{one.library}<={one.tried}'" for one in untried]
        say("\n".join(["", *lines]))
    return 0


def clone() -> pathlib.Path | None:
    """Return the folder of the git clone; ``None`` for an installed package, which has no folder ``benchmarks``."""
    root = pathlib.Path(__file__).resolve().parent.parent.parent
    return root if (root / "matrix" / "__main__.py").is_file() and (root / "benchmarks").is_dir() else None


def repository(what: str) -> pathlib.Path:
    root = clone()
    if root is None:
        raise UserError(
            f"{what} is part of the repository, not of the installed package: clone the repository, and run "
            "`pip install -e '.[all]'` and this command in the clone"
        )
    return root


def matrix(arguments: typer.Context) -> int:
    """Export a small model of every model type in transformers, and check each step of the export.

    The command needs a clone of the repository. All arguments, such as --sample 8, are passed to the program
    `python -m matrix` in the cloned repository.
    """
    root = repository("the matrix")
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "matrix", *arguments.args]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode


def bench(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Benchmark to run (default: list all).")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the names as JSON.")] = False,
) -> int:
    """Run a benchmark, and print a table that compares this package with its alternatives.

    The command needs a clone of the repository, which contains the benchmarks.
    """
    root = repository("the benchmarks")
    found = {path.stem.removeprefix("bench_"): path for path in sorted((root / "benchmarks").glob("bench_*.py"))}
    if not name:
        say_json(list(found)) if json else say("\n".join(found))
        return 0
    if name not in found:
        raise UserError(f"unknown benchmark {name!r}; choose from {', '.join(found)}")
    return subprocess.run([sys.executable, str(found[name])], check=False).returncode


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
    for command in (demo, export, verify, adapter, generate, chat, check, explain):
        made.command(command.__name__)(command)
    made.command("list")(list_classes)
    made.command("env")(env)
    # the help of an installed copy does not list the commands that need a clone
    hidden = clone() is None
    made.command("bench", hidden=hidden)(bench)
    made.command("matrix", hidden=hidden, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        matrix
    )
    reflow_help(made)
    return made


app = _app()


def run(argv: Sequence[str] | None = None) -> int:
    return run_app(app, argv, program="yobx-flatten")
