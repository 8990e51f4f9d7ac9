"""Prove programs and folders in every runtime: ``python -m matrix.runtimes --help``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys

from . import runtimes_cases, runtimes_programs
from .command import add_options, check_options, run_list
from .models import type_names
from .runtimes_page import page_of

__all__ = ["causal_types", "main", "page_of", "parse"]

_WAY = "runtimes"


def causal_types() -> list[str]:
    """Return the types of causal language models, first one of every kind of cache and of layers."""
    from .kinds import kind_of, quiet_sample
    from .models import layer_classes

    names = [name for name in type_names() if ":" not in name]
    return quiet_sample(names, lambda name: (layer_classes(name), kind_of(name)), len(names))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser("python -m matrix.runtimes", description=__doc__, allow_abbrev=False)
    columns = {**runtimes_programs.COLUMNS, **runtimes_cases.COLUMNS}
    add_options(parser, columns, timeout=1800.0, stem="runtimes", kinds="the layers of caches and models")
    parser.add_argument(
        "--folders",
        action="store_true",
        help=f"folders that generate, of {', '.join(runtimes_cases.TYPES)}, instead of programs of all causal types",
    )
    options = parser.parse_args(arguments)
    table = runtimes_cases if options.folders else runtimes_programs
    if not options.columns:
        libraries = {column: table.LIBRARIES.get(column, "torch") for column in table.COLUMNS}
        missing = {library for library in libraries.values() if importlib.util.find_spec(library) is None}
        options.left_out = {
            column: f"{library} is not installed" for column, library in libraries.items() if library in missing
        }
        options.columns = [column for column in table.COLUMNS if column not in options.left_out]
    if not options.folders and "program" not in options.columns:
        options.columns = ["program", *options.columns]  # what a file is made of
    check_options(parser, options, table.COLUMNS, f"runtimes-{importlib.metadata.version('transformers')}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = parse(arguments)
    table = runtimes_cases if options.folders else runtimes_programs
    types = runtimes_cases.TYPES if options.folders else causal_types()
    preload = ("matrix.preload_runtimes",)
    return run_list(options, _WAY, table.COLUMNS, types, table.run_type, page_of, preload=preload)


if __name__ == "__main__":
    sys.exit(main())
