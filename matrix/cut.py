"""Cut every type and train it through a pipeline: ``python -m matrix.cut --help``."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .__main__ import ROOT, failure_list, line_of, names_of, work_left
from .cut_cases import COLUMNS, run_type
from .models import layer_classes, split_name, type_names
from .results import Results, installed_versions, library_state, regressions
from .runner import Limits, Runner, sample

__all__ = ["choose", "main", "parse"]

_WAY = "roundpipe_runtime"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser("python -m matrix.cut", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", metavar="TYPE,...", type=names_of, help="these types: llama, seq2seq:t5, image:, ...")
    parser.add_argument("--all", action="store_true", help="encoder-decoders, pictures and sounds as well")
    parser.add_argument("--sample", metavar="N", type=int, help="N types, spread over the classes of cache layers")
    parser.add_argument("--columns", metavar="COLUMN,...", type=names_of, help=f"of: {', '.join(COLUMNS)}")
    parser.add_argument("--jobs", metavar="N", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="at a time")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=300.0, help="for one type (default 300)")
    parser.add_argument("--memory", metavar="GB", type=float, default=16.0, help="for one type (default 16)")
    parser.add_argument("--output", metavar="FILE", type=pathlib.Path, help="results (default docs/data/cut-*.json)")
    parser.add_argument("--page", metavar="FILE", type=pathlib.Path, help="write this page from the results, and end")
    parser.add_argument(
        "--against", metavar="FILE", type=pathlib.Path, help="end with 1 when a column fails that passed in this file"
    )
    parser.add_argument("--failures", action="store_true", help="list the failures of the results by reason, and end")
    parser.add_argument(
        "--redo",
        nargs="?",
        const="all",
        choices=("all", "failed", "outdated"),
        help="run again what is recorded: all, what failed, what another state of the package made",
    )
    options = parser.parse_args(arguments)
    unknown = set(options.columns or []) - set(COLUMNS)
    if unknown:
        parser.error(f"--columns: {', '.join(sorted(unknown))} is not a column; they are {', '.join(COLUMNS)}")
    options.columns = [column for column in COLUMNS if column in (options.columns or COLUMNS)]
    if options.output is None:
        options.output = ROOT / "docs" / "data" / f"cut-{installed_versions()['transformers']}.json"
    return options


def choose(options: argparse.Namespace) -> list[str]:
    """Return the names of the types to run; causal language models, unless the options say otherwise."""
    names = type_names()
    if options.only:
        strange = [one for one in options.only if not one.endswith(":") and one not in names]
        if strange:
            raise SystemExit(
                f"--only: {', '.join(strange)} is not among the {len(names)} types, as llama or seq2seq:t5"
            )
        names = [name for name in names if name in options.only or f"{split_name(name)[0]}:" in options.only]
    elif not options.all:
        names = [name for name in names if split_name(name)[0] == "causal"]
    return sample(names, layer_classes, options.sample) if options.sample is not None else names


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    import transformers

    transformers.logging.set_verbosity_error()
    console = Console(highlight=False, soft_wrap=True)
    options = parse(arguments)
    if options.page is not None or options.failures:
        held = Results.read(options.output)
        if options.page is not None:
            from .cut_page import page_of

            options.page.write_text(page_of(held, options.output.name), encoding="utf-8")
        if options.failures:
            console.print(failure_list(held, list(COLUMNS)), markup=False)
        return 0
    state = library_state(ROOT / "roundpipe_runtime")
    results = Results.open(options.output, installed_versions(), _WAY)
    names = choose(options)
    work = list(work_left(results, names, options.columns, options.redo, state))
    runner = Runner(_WAY, Limits(options.timeout, options.memory), run=run_type, preload=("matrix.preload_cut",))
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *shown, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("cut", total=len(work))
        for name, found in runner.run_types(work, options.jobs):
            results.record(name, found, state)
            progress.advance(task)
            progress.console.print(line_of(name, found), markup=False)
    worse = regressions(results, Results.read(options.against), names) if options.against else []
    for line in worse:
        console.print(f"passed in {options.against.name}, fails now: {line}", markup=False)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
