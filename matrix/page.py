"""The page of the matrix, written from the JSON file alone."""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .causes import CAUSES
from .results import Results, passes, symbol_of, untried

__all__ = ["cleaned", "codes", "in_two", "page_of", "row", "rule", "stated", "write_page"]

_INTRODUCTION = """# Supported models: export

These tables list every model type in transformers, and show which steps of an export work for each model type. Each
model is built from a small configuration with random weights. `make matrix` repeats these checks (options: `python -m
matrix --help`). The results come from `{file}`, measured with {versions}.
"""

_ASKED = """## What each column checks

| column | what is checked |
|---|---|
| built | the model can be built from the small configuration |
| prefill | a first call with a prompt returns a cache |
| round trip | the cache is flattened and unflattened; 8 greedy steps with it are bitwise equal, also past the window |
| export | `torch.export.export` succeeds in the [block](guide/words.md#trees); example: 3 tokens, cache of 5, batch 2 |
| same shape | the program runs 3 decode steps, each with its last cache; logits are within 1e-4 of the model's |
| other batch and length | 3 decode steps with batch 3, and 3 tokens after a cache of 6 |
| two tokens, one token | 3 decode steps with batch 3, and two new tokens or one new token per call |
| past the window | decode steps at twice the sliding window and beyond; at 40 tokens for a model without a window |
| left padding | 3 decode steps with batch 3, where the first row begins with 3 padding tokens |
| save and load | the program is saved, loaded in a new process, and gives the same logits there |
| onnx | `export_onnx` writes a file |
| onnxruntime | onnxruntime runs the file for 3 decode steps, at different sizes and beyond the window |
| picture | the image encoder is exported with two pictures and run on two different ones (vision-language models) |

✓ passed. ✓* passed with a second program that was exported from a call with one new token, because the program for
three tokens contains an unrolled loop over these tokens. ✗ failed. – does not apply, or an earlier column failed.
Empty: not run. Model types that failed a check come first.
"""

_FAMILIES = {
    "causal": "Causal language models",
    "seq2seq": "Encoder-decoder models",
    "image": "Vision-language models",
    "speech": "Speech models",
}
# the page begins with how many types pass all of the columns up to one
_UP_TO = {"round trip": "round trip", "save and load": "torch.export", "onnx": "ONNX", "onnxruntime": "onnxruntime"}

# What people come for stands where a narrow window shows it.
_SHOWN_FIRST = ("onnxruntime", "past the window", "left padding", "other batch and length", "export")

_NOT_STATED = ("python", "onnx", "onnxscript")

# Logits that hardly depend on the cache say little about it.
_SENSITIVE = 1e-3


# Sections that stay on a page; all others are rows, which have a page of data each (docs/rows).
_SUMMARIES = {
    "matrix": ("At a glance", "What each column checks", "Column by column", "Compared with transformers' exporter"),
    "cut_matrix": (),
    "trainings": (),
    "runtimes": ("What does not apply",),
}


def in_two(name: str, page: str) -> tuple[str, str]:
    r"""Return a page with the sections that sum it up, and the page of its rows.

    >>> summary, rows = in_two("cut_matrix", "# Title\n\nIn short.\n\n## Causal\n\n| a |\n")
    >>> print(summary.splitlines()[2], rows.splitlines()[-1])
    In short. | a |
    """
    introduction, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    kept = [text for text in sections if text.splitlines()[0].removeprefix("## ") in _SUMMARIES[name]]
    rows = [text for text in sections if text not in kept]
    title = introduction.splitlines()[0]
    link = f"## All rows\n\nA separate page lists [every row of the tables, and why rows failed](rows/{name}.md).\n"
    summary = "\n".join(part.rstrip("\n") + "\n" for part in [introduction, *kept, link])
    return summary, "\n".join(
        part.rstrip("\n") + "\n" for part in [f"{title}: all rows\n\n[The summary](../{name}.md).", *rows]
    )


def write_page(path: pathlib.Path, page: str) -> None:
    """Write a page; of one that sums up rows also the page of these, in the folder `rows` next to it."""
    if path.stem in _SUMMARIES:
        page, rows = in_two(path.stem, page)
        of_rows = path.parent / "rows" / path.name
        of_rows.parent.mkdir(exist_ok=True)
        of_rows.write_text(rows, encoding="utf-8")
    path.write_text(page, encoding="utf-8")


def page_of(results: Results, columns: list[str], peers: Iterable[Results], file: str) -> str:
    """Return the page.

    Args:
        results: what this package does.
        columns: the columns, in order.
        peers: what others do, for the comparison.
        file: the name of the file the results are from.
    """
    versions = stated(results.versions)
    parts = [
        _INTRODUCTION.format(file=f"data/{file}", versions=versions),
        _at_a_glance(results, columns),
        _failures(results, columns),
        _ASKED,
    ]
    for family, title in _FAMILIES.items():
        names = [name for name in sorted(results.types) if _family(name) == family]
        if names:
            parts.append(f"## {title}\n\n{_table(results, names, columns)}")
    parts += [_not_applying(results), _summary(results, columns)]
    others = list(peers)
    if others:
        parts.append(_comparison([results, *others], columns))
    parts.append(_operators(results))
    weak = [name for name, entry in sorted(results.types.items()) if _sensitivity(entry) < _SENSITIVE]
    if weak:
        parts.append(
            "## Weak evidence\n\nThe logits of these models change by less than 0.001 if the cache contains other "
            f"tokens, so their checks show little about the cache: {codes(weak)}.\n"
        )
    return "\n".join(part for part in parts if part)


def _at_a_glance(results: Results, columns: list[str]) -> str:
    ends = [end for end in _UP_TO if end in columns]
    lines = [
        "## At a glance\n\nEach number counts the model types that pass all checks that apply to them, up to the named "
        "column:\n",
        row(["", "types", "built", "with a cache", *(_UP_TO[end] for end in ends)]),
        rule(4 + len(ends)),
    ]
    for family, title in _FAMILIES.items():
        entries = [entry for name, entry in results.types.items() if _family(name) == family]
        if entries:
            cached = [entry for entry in entries if passes(entry, ["prefill"]) and _cache(entry["columns"]["prefill"])]
            built = sum(passes(entry, ["built"]) for entry in entries)
            through = [_through(cached, columns[: columns.index(end) + 1]) for end in ends]
            lines.append(row([title, *map(str, (len(entries), built, len(cached), *through))]))
    return "\n".join(lines) + "\n"


def _through(entries: list[dict[str, Any]], columns: list[str]) -> str:
    """How many types pass these columns, of how many that were run up to the last of them."""
    run = [entry for entry in entries if columns[-1] in entry["columns"]]
    passed = str(sum(passes(entry, columns) for entry in run))
    return "" if not run else passed if len(run) == len(entries) else f"{passed} of {len(run)}"


def _summary(results: Results, columns: list[str]) -> str:
    lines = ["## Column by column\n", row(["column", "passed", "failed", "does not apply", "not tried"]), rule(5)]
    for column in columns:
        counts = _counts(results, results.types, column)
        if sum(counts.values()):
            late = sum(
                untried(entry["columns"][column]) for entry in results.types.values() if column in entry["columns"]
            )
            lines.append(row([column, *map(str, (counts[True], counts[False], counts[None] - late, late))]))
    layers = Counter(
        layer for entry in results.types.values() for layer in entry["columns"].get("prefill", {}).get("layers", ())
    )
    caches = Counter(
        entry["columns"]["prefill"]["cache"]
        for entry in results.types.values()
        if entry["columns"].get("prefill", {}).get("ok")
    )
    for title, counter in (("cache", caches), ("cache layer", layers)):
        if counter:
            lines.append(
                f"\nNumber of model types that use each class of {title}: "
                + ", ".join(f"`{key}` {count}" for key, count in counter.most_common())
                + "."
            )
    return "\n".join(lines) + "\n"


def _comparison(all_results: list[Results], columns: list[str]) -> str:
    shared = set.intersection(*(set(one.types) for one in all_results))
    lines = [
        f"## Compared with transformers' exporter\n\nThis table covers the {len(shared)} model types that were tried "
        "with every exporter. A cell shows how many of the tried model types passed. onnx-diagnostic is missing, "
        "because onnx-diagnostic cannot be imported with transformers 5.23.\n",
        row(["column", *(one.way for one in all_results)]),
        rule(1 + len(all_results)),
    ]
    for column in columns:
        cells = []
        for one in all_results:
            counts = _counts(one, shared, column)
            cells.append(f"{counts[True]} of {counts[True] + counts[False]}" if counts[True] + counts[False] else "")
        if any(cells):
            lines.append(row([column, *cells]))
    return "\n".join(lines) + "\n"


def _table(results: Results, names: list[str], columns: list[str]) -> str:
    # without those that were not run, or apply to none of these types
    run = [column for column in columns if any(_tried(results.types[name], column) for name in names)]
    run.sort(key=lambda column: _SHOWN_FIRST.index(column) if column in _SHOWN_FIRST else len(_SHOWN_FIRST))
    lines = [row(["type", *run, "cache"]), rule(2 + len(run))]
    for name in sorted(names, key=lambda name: not _failed(results.types[name], columns)):
        held = results.types[name]["columns"]
        signs = [symbol_of(held.get(column)) for column in run]
        lines.append(row([f"`{name}`", *signs, _cache(held.get("prefill", {}))]))
    return "\n".join(lines) + "\n"


def _operators(results: Results) -> str:
    """Which operators of attention and normalisation the files have: a row per choice. Older results state none."""
    types: dict[str, list[str]] = {}
    for name, entry in sorted(results.types.items()):
        found = entry["columns"].get("onnx", {}).get("operators")
        if found is not None:
            types.setdefault(", ".join(f"`{one}`" for one in found) or "none of them", []).append(name)
    if not types:
        return ""
    rows = sorted(types.items(), key=lambda row: (-len(row[1]), row[0]))
    lines = ["## Operators of the files\n", row(["attention and normalisation", "files", "types"]), rule(3)]
    lines += [row([operators, str(len(names)), codes(names)]) for operators, names in rows]
    return "\n".join(lines) + "\n"


def _tried(entry: dict[str, Any], column: str) -> bool:
    result = entry["columns"].get(column)
    return result is not None and (result["ok"] is not None or untried(result))


def _cache(prefill: dict[str, Any]) -> str:
    if not prefill.get("ok"):
        return ""
    short = [layer.replace("Dynamic", "").removesuffix("Layer") or "Dynamic" for layer in prefill["layers"]]
    return f"{prefill['cache']}" + (f" ({', '.join(layer or 'full' for layer in short)})" if short else "")


def _failed(entry: dict[str, Any], columns: list[str]) -> list[str]:
    return [column for column in columns if entry["columns"].get(column, {"ok": None})["ok"] is False]


def _failures(results: Results, columns: list[str]) -> str:
    """A row per reason: the types, and their columns together."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, entry in sorted(results.types.items()):
        if failed := _failed(entry, columns):
            why = CAUSES.get(name) or f"`{cleaned(entry['columns'][failed[0]]['why'])}`"
            rows.setdefault((", ".join(failed), why), []).append(name)
    if not rows:
        return ""
    head = row(["types", "columns", "known cause, or the error of the first column"])
    lines = ["## What fails, and why\n", head, rule(3)]
    return "\n".join(lines + [row([codes(names), failed, why]) for (failed, why), names in rows.items()]) + "\n"


def _not_applying(results: Results) -> str:
    skipped: dict[str, list[str]] = {}
    for name, entry in sorted(results.types.items()):
        for column, result in entry["columns"].items():
            if result["ok"] is None and not untried(result) and (column != "picture" or _family(name) == "image"):
                why = result["why"].partition(": ")[2] or result["why"]
                skipped.setdefault(f"{column}: {cleaned(why)}", []).append(name)
    if not skipped:
        return ""
    lines = [f"- {codes(names)}: {reason}" for reason, names in sorted(skipped.items())]
    return "\n".join(["## What does not apply\n", *lines]) + "\n"


def cleaned(said: str) -> str:
    """Return one line of what an error states, without what would end a cell or its code.

    Args:
        said: what it states.
    """
    return re.sub(r"[`\s|]+|\x1b\[\d*m", " ", said).strip()


def _counts(results: Results, names: Iterable[str], column: str) -> Counter[Any]:
    held = (results.types[name]["columns"].get(column) for name in names)
    return Counter(result["ok"] for result in held if result is not None)


def _family(name: str) -> str:
    return name.partition(":")[0] if ":" in name else "causal"


def _sensitivity(entry: dict[str, Any]) -> float:
    return float(entry["columns"].get("prefill", {}).get("sensitivity", 1.0))


def codes(names: Iterable[str]) -> str:
    """Return names as code, in one line."""
    return ", ".join(f"`{name}`" for name in names)


def row(cells: Iterable[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def rule(count: int) -> str:
    """Return the line under the head of a table of ``count`` columns."""
    return f"|{'---|' * count}"


def stated(versions: dict[str, str]) -> str:
    """Return the versions of the libraries that compute; the file of the results has those of all."""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if name not in _NOT_STATED)
