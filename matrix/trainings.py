"""Train every head, loss and adapter next to the reference model: ``python -m matrix.trainings --help``."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from .command import ROOT, add_options, check_options, open_results, run_work, show_recorded, types_among
from .heads import head_names
from .models import split_name
from .results import Results, installed_versions, library_state
from .runner import Limits, Runner, sample
from .trainings_cases import COLUMNS, run_type
from .trainings_kinds import kind_names
from .trainings_page import outcome_of, page_of

__all__ = ["choose", "main", "parse"]

_WAY = "roundpipe_runtime"
# rows of which a sample is taken where there are recorded ones: what was not built or has no loss shows nothing
_SAMPLED = ("equal", "equal in one microbatch", "refused")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser("python -m matrix.trainings", description=__doc__, allow_abbrev=False)
    kinds = "tasks and kinds of training; with --against: of those that passed there"
    add_options(parser, COLUMNS, timeout=300.0, stem="trainings", kinds=kinds)
    options = parser.parse_args(arguments)
    check_options(parser, options, COLUMNS, f"trainings-{installed_versions()['transformers']}")
    return options


def choose(options: argparse.Namespace) -> list[str]:
    """Return the names of what is run."""
    names = [*kind_names(), *head_names()]
    if options.only:
        names = types_among(names, options.only)
    if options.sample is None:
        return names
    if options.against:
        recorded = Results.read(options.against).types
        names = [name for name in names if outcome_of(recorded.get(name, {"columns": {}})) in _SAMPLED]
    return sample(names, lambda name: split_name(name)[0], options.sample)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code: also 1 where a number is wrong."""
    import transformers

    transformers.logging.set_verbosity_error()
    console = Console(highlight=False, soft_wrap=True)
    options = parse(arguments)

    if show_recorded(options, COLUMNS, lambda held: page_of(held, options.output.name), console):
        return 0
    state = library_state(ROOT / "roundpipe_runtime")
    results = open_results(options, _WAY)
    limits = Limits(options.timeout, options.memory)
    runner = Runner(_WAY, limits, run=run_type, preload=("matrix.preload_trainings",))
    names = choose(options)
    code = run_work(runner, names, results, options, state, console)
    wrong = wrong_cells(results, names, options.columns)
    for line in wrong:
        console.print(f"wrong: {line}", markup=False)
    return 1 if wrong else code


def wrong_cells(results: Results, names: list[str], columns: list[str]) -> list[str]:
    """Return, in words, every number that is not the reference model's, and every error that is not the package's."""
    return [
        f"{name}, {column}: {result['why']}"
        for name in names
        for column, result in results.types.get(name, {"columns": {}})["columns"].items()
        if column in columns and column != "built" and result["ok"] is False
    ]


if __name__ == "__main__":
    sys.exit(main())
