"""The page of runtimes: how many types are right where, what fails and why, the types, the folders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import runtimes_cases, runtimes_programs
from .page import cleaned, codes, row, rule, stated
from .results import Results, symbol_of, untried
from .runtimes_causes import cause_of

__all__ = ["page_of"]

_PAGE = """# Runtimes

These tables list which Hugging Face causal language models run in OpenVINO, AOTInductor and ExecuTorch. The models have
small configurations and random weights. `export_program` exports each model once; `to_openvino`, `to_aotinductor` and
`to_executorch(backend="portable")` convert the exported program for each runtime. `make runtimes` repeats these checks
(options: `python -m matrix.runtimes --help`). The results come from `data/{file}`, measured with {versions}.

Each file runs in its runtime on the example inputs and on further inputs (cases), and the outputs are compared with
those of the eager model. The cases differ in batch size (including 1), length and number of new tokens; one case
exceeds the sliding window, and one case has a padded row. A case is three calls of the model; each call gets the cache
that the previous call returned. Then each case runs again with inputs that are slices of larger tensors or transposed
tensors. Files for ExecuTorch accept at most {batch} rows and {length} tokens.

✓ passed. ✗ failed. – does not apply, or an earlier column failed. Empty: not run yet. The number in a table cell is the
largest difference between an output of the file and the same output of the eager model.

{counts}
{failures}
## Causal types

{types}
## Folders that generate

`export_folder(model, folder, target=...)` wrote these folders and checked them in their runtime. Each file ran the
example and cases with different batch sizes and lengths, one of them padded; a case is three calls that pass the
cache on. 40 generated tokens were compared with `model.generate` for three rows, two of them padded. Then the stored
cases ran again with inputs in a different memory layout. `python -m matrix.runtimes --folders` runs this table.

{folders}"""


def page_of(results: Results, file: str) -> str:
    """Return the page.

    Args:
        results: the results of this matrix.
        file: the name of the file they are from.
    """
    found = [result for entry in results.types.values() for result in entry["columns"].values()]
    made_by = dict(result["library"] for result in found if "library" in result)
    made_by.pop("torch", None)
    versions = stated({**results.versions, **made_by})
    return _PAGE.format(
        **runtimes_cases.BOUNDS,
        file=file,
        versions=versions,
        counts=_counts(results),
        failures=_failures(results),
        types=_table(results, runtimes_programs.COLUMNS),
        folders=_table(results, runtimes_cases.COLUMNS),
    )


def _counts(results: Results) -> str:
    lines = [row(["", "tried", "correct", "failed"]), rule(4)]
    for column in runtimes_programs.COLUMNS:
        held = [entry["columns"][column]["ok"] for entry in results.types.values() if column in entry["columns"]]
        right, failed = held.count(True), held.count(False)
        lines.append(row([column, str(right + failed), str(right), str(failed)]))
    return "\n".join(lines) + "\n"


def _failures(results: Results) -> str:
    """A row per reason: the types, where they fail, and why."""
    rows: dict[tuple[str, str], list[str]] = {}
    skipped: dict[str, list[str]] = {}
    for name, entry in sorted(results.types.items()):
        by_reason: dict[str, list[str]] = {}
        for column, result in entry["columns"].items():
            if result["ok"] is False:
                by_reason.setdefault(cause_of(name, column, result["why"]), []).append(column)
            elif result["ok"] is None and not untried(result):
                skipped.setdefault(result["why"].partition(": ")[2] or result["why"], []).append(name)
        for reason, columns in by_reason.items():
            rows.setdefault((", ".join(columns), reason), []).append(name)
    parts = []
    if rows:
        parts += ["## What fails, and why\n", row(["types", "where", "cause, or the error"]), rule(3)]
        parts += [row([codes(names), where, why]) for (where, why), names in sorted(rows.items())]
    if skipped:
        parts += ["\n## What does not apply\n"]
        parts += [f"- {codes(dict.fromkeys(names))}: {cleaned(why)}" for why, names in sorted(skipped.items())]
    return "\n".join(parts) + "\n" if parts else ""


def _table(results: Results, columns: Iterable[str]) -> str:
    columns = list(columns)
    lines = [row(["type", *columns]), rule(1 + len(columns))]
    run = {name: held for name, held in results.types.items() if set(columns) & set(held["columns"])}
    for name, entry in sorted(run.items(), key=lambda one: (not _fails(one[1], columns), one[0])):
        lines.append(row([f"`{name}`", *(_cell(entry["columns"].get(column)) for column in columns)]))
    return "\n".join(lines) + "\n"


def _fails(entry: dict[str, Any], columns: Iterable[str]) -> bool:
    return any(entry["columns"].get(column, {"ok": True})["ok"] is False for column in columns)


def _cell(result: dict[str, Any] | None) -> str:
    most = (result or {}).get("max_difference")
    return symbol_of(result) + ("" if most is None else f" {most:.0e}")
