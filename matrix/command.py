"""What the command lines of all matrices share: options, the choice of types, a run with its bar, the lists."""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .gate import judge
from .page import write_page
from .results import Results, failures, installed_versions, library_state, recorded_file, symbol_of
from .runner import Limits, Runner, Work

__all__ = [
    "ROOT",
    "add_options",
    "check_options",
    "failure_list",
    "line_of",
    "open_results",
    "run_list",
    "run_work",
    "show_recorded",
    "types_among",
    "work_left",
]

ROOT = pathlib.Path(__file__).parent.parent


def add_options(
    parser: argparse.ArgumentParser, columns: Iterable[str], *, timeout: float, stem: str, kinds: str
) -> None:
    """Add the options that say what is run, how, and where results go.

    Args:
        parser: gets them.
        columns: what may be asked of a type.
        timeout: seconds for one type, unless ``--timeout`` states otherwise.
        stem: how the names of the files of results begin.
        kinds: over what ``--sample`` spreads.
    """
    results = f"results (default docs/data/{stem}-*.json)"
    parser.set_defaults(left_out={}, apart=False)  # columns that cannot run here, and why; a process per column?
    parser.add_argument("--only", metavar="TYPE,...", type=_names, help="these types: llama, seq2seq:t5, image:, ...")
    parser.add_argument("--sample", metavar="N", type=int, help=f"N types, spread over: {kinds}")
    parser.add_argument("--columns", metavar="COLUMN,...", type=_names, help=f"of: {', '.join(columns)}")
    parser.add_argument("--jobs", metavar="N", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="at a time")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=timeout, help=f"for one type (default {timeout:.0f})"
    )
    parser.add_argument("--memory", metavar="GB", type=float, default=16.0, help="for one type (default 16)")
    parser.add_argument("--output", metavar="FILE", type=pathlib.Path, help=results)
    parser.add_argument("--page", metavar="FILE", type=pathlib.Path, help="write this page from the results, and end")
    parser.add_argument(
        "--against",
        metavar="FILE",
        type=pathlib.Path,
        help="end with 1 when what passed in this file fails or is not tried, or a model is cut into fewer pieces",
    )
    parser.add_argument("--failures", action="store_true", help="list the failures of the results by reason, and end")
    parser.add_argument(
        "--redo",
        nargs="?",
        const="all",
        choices=("all", "failed", "outdated"),
        help="run again what is recorded: all, what failed, what another state of the package made",
    )


def check_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, columns: Iterable[str], name: str
) -> None:
    """Refuse unknown columns, put the others in order, and choose the file of results.

    Args:
        parser: reports what is wrong.
        options: what it has parsed.
        columns: those that there are, in order.
        name: the name of the file of results without its suffix, unless ``--output`` states otherwise.
    """
    columns = list(columns)
    unknown = set(options.columns or []) - set(columns)
    if unknown:
        parser.error(f"--columns: {', '.join(sorted(unknown))} is not a column; they are {', '.join(columns)}")
    options.columns = [column for column in columns if column in (options.columns or columns)]
    own = ROOT / "docs" / "data" / f"{name}.json"
    # pages show what was recorded last, until all types have run with what is installed
    shown = (options.page is not None or options.failures) and not own.exists()
    options.output = options.output or (recorded_file(name.partition("-")[0]) if shown else own)


def types_among(names: list[str], only: list[str]) -> list[str]:
    """Return the types that ``--only`` means: by name, or by family, as ``image:``."""
    strange = [one for one in only if not one.endswith(":") and one not in names]
    if strange:
        raise SystemExit(f"--only: {', '.join(strange)} is not among the {len(names)} types, as llama or seq2seq:t5")
    from .models import split_name

    return [name for name in names if name in only or f"{split_name(name)[0]}:" in only]


def show_recorded(
    options: argparse.Namespace, columns: Iterable[str], page_of: Callable[[Results], str], console: Console
) -> bool:
    """Write the page and list the failures, as far as they are asked for; return whether one of them was."""
    if options.page is None and not options.failures:
        return False
    held = Results.read(options.output)
    if options.page is not None:
        write_page(options.page, page_of(held))
    if options.failures:
        console.print(failure_list(held, list(columns)), markup=False)
    return True


def open_results(options: argparse.Namespace, way: str) -> Results:
    """Open the file of results; what other versions have recorded is not replaced unless that is asked for."""
    results = Results.open(options.output, installed_versions(), way)
    if options.output.exists() and not results.types and Results.read(options.output).types and not options.redo:
        held = ", ".join(f"{library} {version}" for library, version in Results.read(options.output).versions.items())
        raise SystemExit(f"{options.output} was made with {held}: name another --output, or --redo to replace it")
    return results


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


def run_work(
    runner: Runner, names: list[str], results: Results, options: argparse.Namespace, state: str, console: Console
) -> int:
    """Run what is left of these types, a line for each.

    Returns:
        1 if what passed in ``--against`` does not pass now, or if nothing was tried.
    """
    work = list(work_left(results, names, options.columns, options.redo, state))
    if options.apart:
        work = [(name, [column], held) for name, todo, held in work for column in todo]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("cells" if options.apart else "types", total=len(work))
        for name, found in runner.run_types(work, options.jobs):
            results.record(name, found, state)
            progress.advance(task)
            progress.console.print(line_of(name, found), markup=False)
    expected = Results.read(options.against) if options.against else None
    verdict = judge(results, expected, names, options)
    for line in verdict.notes:
        console.print(f"no longer there: {line}", markup=False)
    for line in verdict.worse:
        console.print(f"worse than in {options.against.name}: {line}" if expected else line, markup=False)
    return 1 if verdict.worse else 0


def run_list(
    options: argparse.Namespace,
    way: str,
    columns: Iterable[str],
    types: Iterable[str],
    run_type: Callable[..., Any],
    page_of: Callable[[Results, str], str],
    *,
    preload: tuple[str, ...] = ("matrix.preload",),
) -> int:
    """Do what the options of a matrix state whose types are a list; return the exit code.

    Args:
        options: the command line, checked.
        way: the name under which results are recorded.
        columns: what is asked of a type, in order.
        types: those that there are.
        run_type: runs it in a separate process.
        page_of: makes the page of the results and the name of their file.
        preload: modules to import once for all processes.
    """
    console = Console(highlight=False, soft_wrap=True)
    if show_recorded(options, columns, lambda held: page_of(held, options.output.name), console):
        return 0
    names = types_among(list(types), options.only) if options.only else list(types)
    runner = Runner(way, Limits(options.timeout, options.memory), run=run_type, preload=preload)
    state = library_state(ROOT / "yobx_flatten")
    return run_work(runner, names[: options.sample], open_results(options, way), options, state, console)


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


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
