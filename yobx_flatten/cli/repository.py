"""``yobx-flatten matrix`` and ``bench``: start programs that only a clone of the repository has."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Annotated

import typer

from ..terminal.output import say, say_json
from ..terminal.running import UserError


def is_installed_copy() -> bool:
    """Return whether the package is installed without its repository."""
    root = _root()
    return not (root / "matrix" / "__main__.py").is_file() or not (root / "benchmarks").is_dir()


def _root() -> pathlib.Path:
    return pathlib.Path(__file__).resolve().parent.parent.parent


def repository(what: str) -> pathlib.Path:
    """Return the root of the repository that this package is run from."""
    if is_installed_copy():
        raise UserError(
            f"{what} is part of the repository, not of the installed package: clone the repository, and run "
            "`pip install -e '.[all]'` and this command in the clone"
        )
    return _root()


def matrix(arguments: typer.Context) -> int:
    """Export every model type in transformers, and check each step.

    This command needs a clone. `python -m matrix` gets the arguments (try -- --help); --sample 8 exports 8 model types.
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

    The benchmarks are part of the repository, so the command needs a clone.
    """
    root = repository("the benchmarks")
    found = {path.stem.removeprefix("bench_"): path for path in sorted((root / "benchmarks").glob("bench_*.py"))}
    if not name:
        say_json(list(found)) if json else say("\n".join(found))
        return 0
    if name not in found:
        raise UserError(f"unknown benchmark {name!r}; choose from {', '.join(found)}")
    return subprocess.run([sys.executable, str(found[name])], check=False).returncode
