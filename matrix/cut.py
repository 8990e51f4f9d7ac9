"""Cut every type and train it through a pipeline: ``python -m matrix.cut --help``."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from .command import ROOT, add_options, check_options, open_results, run_work, show_recorded, types_among
from .cut_cases import COLUMNS, run_type
from .kinds import kind_of, quiet_sample
from .models import split_name, type_names
from .results import Results, installed_versions, library_state, passes
from .runner import Limits, Runner, sample

__all__ = ["choose", "main", "parse"]

_WAY = "roundpipe_runtime"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser("python -m matrix.cut", description=__doc__, allow_abbrev=False)
    kinds = "experts, recurrent states, shared keys, phases; with --against: of those that passed there"
    add_options(parser, COLUMNS, timeout=300.0, stem="cut", kinds=kinds)
    parser.add_argument("--all", action="store_true", help="encoder-decoders, also pictures and sounds")
    options = parser.parse_args(arguments)
    if not options.only and not options.all:
        options.only = ["causal:"]
    check_options(parser, options, COLUMNS, f"cut-{installed_versions()['transformers']}")
    return options


def choose(options: argparse.Namespace) -> list[str]:
    """Return the names of the types to run; causal language models, unless the options say otherwise."""
    names = type_names()
    if options.only:
        names = types_among(names, options.only)
    if options.sample is None:
        return names
    recorded = Results.read(options.against) if options.against else None
    if recorded is not None:
        names = [name for name in names if name in recorded.types and passes(recorded.types[name], list(COLUMNS))]
    # families take turns, so that none is left out where there are more kinds than the sample has room for
    names = sample(names, lambda name: split_name(name)[0], len(names))
    return quiet_sample(names, lambda name: kind_of(name, recorded), options.sample)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    import transformers

    transformers.logging.set_verbosity_error()
    console = Console(highlight=False, soft_wrap=True)
    options = parse(arguments)

    def page(held: Results) -> str:
        from .cut_page import page_of

        return page_of(held, options.output.name)

    if show_recorded(options, COLUMNS, page, console):
        return 0
    state = library_state(ROOT / "roundpipe_runtime")
    results = open_results(options, _WAY)
    runner = Runner(_WAY, Limits(options.timeout, options.memory), run=run_type, preload=("matrix.preload_cut",))
    return run_work(runner, choose(options), results, options, state, console)


if __name__ == "__main__":
    sys.exit(main())
