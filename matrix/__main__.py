"""Run the matrix: ``python -m matrix --help``."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from .command import ROOT, add_options, check_options, open_results, run_work, show_recorded, types_among
from .results import Results, installed_versions, library_state
from .runner import Limits, Runner


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    from .cases import COLUMNS
    from .ways import WAYS

    parser = argparse.ArgumentParser("python -m matrix", description=__doc__, allow_abbrev=False)
    add_options(parser, COLUMNS, timeout=900.0, stem="matrix", kinds="the classes of cache layers")
    parser.add_argument(
        "--peer",
        choices=("none", *(name for name in WAYS if not name.startswith("yobx_flatten"))),
        default="none",
        help="run the same columns through transformers' own code (onnx-diagnostic does not import with "
        "transformers 5.23)",
    )
    parser.add_argument(
        "--deferred",
        action="store_true",
        help="export with prefer_deferred_runtime_asserts_over_guards=True, as export_program does",
    )
    options = parser.parse_args(arguments)
    if options.deferred and options.peer != "none":
        parser.error("--deferred is for this package, not for a --peer")
    own = "yobx_flatten-deferred" if options.deferred else "yobx_flatten"
    options.way = own if options.peer == "none" else options.peer
    suffix = "" if options.peer == "none" else f"-{options.peer}"
    stem = "matrix-deferred" if options.deferred else "matrix"
    check_options(parser, options, COLUMNS, f"{stem}-{installed_versions()['transformers']}{suffix}")
    return options


def choose(options: argparse.Namespace, known: list[str] | None = None) -> list[str]:
    """Return the names of the types to run."""
    import transformers

    from .kinds import quiet_sample
    from .models import layer_classes, type_names

    transformers.logging.set_verbosity_error()
    names = known if known is not None else type_names()
    if options.only:
        names = types_among(names, options.only)
    if options.sample is not None:
        names = quiet_sample(names, layer_classes, options.sample)
    return names


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    from .cases import COLUMNS

    console = Console(highlight=False, soft_wrap=True)
    options = parse(arguments)

    def page(held: Results) -> str:
        from .page import page_of

        peers = sorted(options.output.parent.glob(f"{options.output.stem}-*.json"))
        return page_of(held, list(COLUMNS), [Results.read(path) for path in peers], options.output.name)

    if show_recorded(options, COLUMNS, page, console):
        return 0
    state = library_state(ROOT / "yobx_flatten")
    results = open_results(options, options.way)
    runner = Runner(options.way, Limits(options.timeout, options.memory))
    return run_work(runner, choose(options), results, options, state, console)


if __name__ == "__main__":
    sys.exit(main())
