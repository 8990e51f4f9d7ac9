"""Export models with our exporter and with others, and verify all files: ``python -m matrix.oracle --help``."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys

from .command import add_options, check_options, run_list
from .oracle_cases import COLUMNS, PLACES, TYPES, run_type
from .oracle_page import page_of

__all__ = ["main", "parse"]

_WAY = "oracle"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser("python -m matrix.oracle", description=__doc__, allow_abbrev=False)
    add_options(parser, COLUMNS, timeout=1800.0, stem="oracle", kinds="the list")
    options = parser.parse_args(arguments)
    options.apart = True
    if not options.columns:
        options.left_out = {name: f"{held} is not set" for name, held in PLACES.items() if not os.environ.get(held)}
        options.columns = [name for name in COLUMNS if name not in options.left_out]
    check_options(parser, options, COLUMNS, f"oracle-{importlib.metadata.version('transformers')}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_list(parse(arguments), _WAY, COLUMNS, TYPES, run_type, page_of, preload=("matrix.preload_oracle",))


if __name__ == "__main__":
    sys.exit(main())
