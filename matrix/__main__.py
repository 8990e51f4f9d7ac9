"""Run the matrix: ``python -m matrix --help``."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .results import Results, failures, installed_versions, library_state, regressions, symbol_of
from .runner import Limits, Runner, Work, sample

ROOT = pathlib.Path(__file__).parent.parent


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    from .cases import COLUMNS
    from .ways import WAYS

    parser = argparse.ArgumentParser("python -m matrix", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", metavar="TYPE,...", type=names_of, help="these types: llama, seq2seq:t5, image:, ...")
    parser.add_argument("--sample", metavar="N", type=int, help="N types, spread over the classes of cache layers")
    parser.add_argument("--columns", metavar="COLUMN,...", type=names_of, help=f"of: {', '.join(COLUMNS)}")
    parser.add_argument("--jobs", metavar="N", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="at a time")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=900.0, help="for one type (default 900)")
    parser.add_argument("--memory", metavar="GB", type=float, default=16.0, help="for one type (default 16)")
    parser.add_argument("--output", metavar="FILE", type=pathlib.Path, help="results (default docs/data/matrix-*.json)")
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
    parser.add_argument(
        "--peer",
        choices=("none", *(name for name in WAYS if name != "yobx_flatten")),
        default="none",
        help="run the same columns through what transformers brings along (onnx-diagnostic does not import with "
        "transformers 5.23)",
    )
    options = parser.parse_args(arguments)
    unknown = set(options.columns or []) - set(COLUMNS)
    if unknown:
        parser.error(f"--columns: {', '.join(sorted(unknown))} is not a column; they are {', '.join(COLUMNS)}")
    options.columns = [column for column in COLUMNS if column in (options.columns or COLUMNS)]
    options.way = "yobx_flatten" if options.peer == "none" else options.peer
    if options.output is None:
        suffix = "" if options.peer == "none" else f"-{options.peer}"
        options.output = ROOT / "docs" / "data" / f"matrix-{installed_versions()['transformers']}{suffix}.json"
    return options


def names_of(text: str) -> list[str]:
    """Return the names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def choose(options: argparse.Namespace, known: list[str] | None = None) -> list[str]:
    """Return the names of the types to run."""
    import transformers

    from .models import layer_classes, split_name, type_names

    transformers.logging.set_verbosity_error()
    names = known if known is not None else type_names()
    if options.only:
        chosen = [name for name in names if name in options.only or f"{split_name(name)[0]}:" in options.only]
        strange = [one for one in options.only if not one.endswith(":") and one not in names]
        if strange:
            raise SystemExit(
                f"--only: {', '.join(strange)} is not among the {len(names)} types, as llama or seq2seq:t5"
            )
        names = chosen
    if options.sample is not None:
        names = sample(names, layer_classes, options.sample)
    return names


def work_left(results: Results, names: list[str], columns: list[str], redo: str | None, state: str) -> Iterator[Work]:
    """Yield what is to be run: type, columns, and what is known of its columns."""
    for name in names:
        entry = results.types.get(name)
        passed = results.passed(name)
        outdated = entry is not None and entry.get("state") != state
        again = redo == "all" or (redo == "outdated" and outdated)
        if redo == "failed":
            again = any(passed.get(column) is False for column in columns)
        todo = columns if again else results.missing(name, columns)
        if todo:
            yield name, todo, {column: ok for column, ok in passed.items() if column not in todo}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    from .cases import COLUMNS

    console = Console(highlight=False, soft_wrap=True)
    options = parse(arguments)
    if options.page is not None or options.failures:
        results = Results.read(options.output)
        if options.page is not None:
            from .page import page_of

            peers = sorted(options.output.parent.glob(f"{options.output.stem}-*.json"))
            text = page_of(results, list(COLUMNS), [Results.read(path) for path in peers], options.output.name)
            options.page.write_text(text, encoding="utf-8")
        if options.failures:
            console.print(failure_list(results, list(COLUMNS)), markup=False)
        return 0
    state = library_state(ROOT / "yobx_flatten")
    results = Results.open(options.output, installed_versions(), options.way)
    if options.output.exists() and not results.types and Results.read(options.output).types and not options.redo:
        held = ", ".join(f"{library} {version}" for library, version in Results.read(options.output).versions.items())
        raise SystemExit(f"{options.output} was made with {held}: name another --output, or --redo to replace it")
    names = choose(options)
    work = list(work_left(results, names, options.columns, options.redo, state))
    runner = Runner(options.way, Limits(options.timeout, options.memory))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("matrix", total=len(work))
        for name, found in runner.run_types(work, options.jobs):
            results.record(name, found, state)
            progress.advance(task)
            progress.console.print(line_of(name, found), markup=False)
    worse = regressions(results, Results.read(options.against), names) if options.against else []
    for line in worse:
        console.print(f"passed in {options.against.name}, fails now: {line}", markup=False)
    return 1 if worse else 0


def line_of(name: str, found: dict[str, dict[str, object]]) -> str:
    """Return what is printed of a type: a sign per column, the first failure."""
    seconds = sum(float(str(result.get("seconds", 0.0))) for result in found.values())
    signs = " ".join(symbol_of(result) for result in found.values())
    first = next((f"  {column}: {result['why']}" for column, result in found.items() if result["ok"] is False), "")
    return f"{name:28} {signs}  {seconds:6.1f} s{first}"


def failure_list(results: Results, columns: list[str]) -> str:
    """Return the failures by column and reason, most frequent first, as Markdown."""
    lines = []
    for column in columns:
        held = [entry["columns"][column] for entry in results.types.values() if column in entry["columns"]]
        if held:
            counts = [sum(result["ok"] is ok for result in held) for ok in (True, False, None)]
            lines.append(f"\n## {column}: {counts[0]} passed, {counts[1]} failed, {counts[2]} not tried")
        grouped = failures(results, [column]).get(column, {})
        for reason, names in sorted(grouped.items(), key=lambda item: -len(item[1])):
            lines.append(f"- {len(names)}: {reason}\n  {', '.join(names)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
