"""The page of the matrix, written from the JSON file alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .results import Results, failures, symbol_of

__all__ = ["page_of"]

_INTRODUCTION = """# The matrix

Every model type of the installed transformers, with random weights from a small configuration, against everything the
package promises. `make matrix` runs it (`python -m matrix --help` says how to run less); this page is written from
`{file}`, with {versions}.

| column | what is asked |
|---|---|
| built | the small configuration makes a model |
| prefill | a prefill returns a cache |
| round trip | the cache is taken apart and put together; 8 greedy steps go on bit by bit alike, also past the window |
| export | `torch.export.export` inside the block, from a decode call of 3 tokens after 5, batch 2 |
| same shape, ... | 3 decode steps of the program over its own caches, against the model: logits within 1e-4 |
| other batch and length | batch 3, 3 tokens after 6 |
| two tokens, one token | batch 3, and another number of tokens in the call |
| past the window | twice the window and more, or 40 tokens where there is no window |
| left padding | batch 3, the first row begins with 3 tokens of padding |
| save and load | the program is stored, and loaded in a process that has seen no model |
| onnx | `export_onnx` writes a file |
| onnxruntime | that file runs for 3 steps over its own outputs, in other sizes and past the window |

✓ passed, ✓* passed by a program of its own that was exported from a call of one token (the one of three tokens has
unrolled a loop over them), ✗ failed, – does not apply or was not tried because an earlier column did not pass, empty:
not run.
"""

_FAMILIES = {
    "causal": "Causal language models",
    "seq2seq": "Encoder-decoder models",
    "image": "Vision-language models (text only: the prompt has no image)",
    "speech": "Speech models",
}
# Logits that hardly depend on the cache say little about it.
_SENSITIVE = 1e-3


def page_of(results: Results, columns: list[str], peers: Iterable[Results], file: str) -> str:
    """Return the page.

    Args:
        results: what this package does.
        columns: in order.
        peers: what others do, for the comparison.
        file: the name of the file the results are from.
    """
    versions = ", ".join(f"{library} {version}" for library, version in results.versions.items())
    parts = [_INTRODUCTION.format(file=f"data/{file}", versions=versions), _summary(results, columns)]
    others = list(peers)
    if others:
        parts.append(_comparison([results, *others], columns))
    for family, title in _FAMILIES.items():
        names = [name for name in sorted(results.types) if _family(name) == family]
        if names:
            parts.append(f"## {title}\n\n{_table(results, names, columns)}")
    parts.append(_reasons(results, columns))
    weak = [name for name, entry in sorted(results.types.items()) if _sensitivity(entry) < _SENSITIVE]
    if weak:
        parts.append(
            "## Weak evidence\n\nThe logits of these models change by less than 0.001 when the cache holds other "
            f"tokens, so their replays say little about the cache: {_codes(weak)}.\n"
        )
    return "\n".join(parts)


def _summary(results: Results, columns: list[str]) -> str:
    lines = [f"## In numbers\n\n{len(results.types)} types.\n", _row(["column", "passed", "failed", "–"]), _rule(4)]
    for column in columns:
        counts = _counts(results, results.types, column)
        if sum(counts.values()):
            lines.append(_row([column, *(str(counts[ok]) for ok in (True, False, None))]))
    layers = Counter(
        layer for entry in results.types.values() for layer in entry["columns"].get("prefill", {}).get("layers", ())
    )
    caches = Counter(
        entry["columns"]["prefill"]["cache"]
        for entry in results.types.values()
        if entry["columns"].get("prefill", {}).get("ok")
    )
    for title, counter in (("Caches", caches), ("Layers", layers)):
        if counter:
            lines.append(
                f"\n{title} met: " + ", ".join(f"`{key}` {count}" for key, count in counter.most_common()) + "."
            )
    return "\n".join(lines) + "\n"


def _comparison(all_results: list[Results], columns: list[str]) -> str:
    shared = set.intersection(*(set(one.types) for one in all_results))
    lines = [
        f"## Beside transformers' own\n\nThe same cases, the {len(shared)} types that were run in all of these ways; "
        "passed of those tried. onnx-diagnostic does not import with transformers 5.23.\n",
        _row(["column", *(one.way for one in all_results)]),
        _rule(1 + len(all_results)),
    ]
    for column in columns:
        cells = []
        for one in all_results:
            counts = _counts(one, shared, column)
            cells.append(f"{counts[True]} of {counts[True] + counts[False]}" if counts[True] + counts[False] else "")
        if any(cells):
            lines.append(_row([column, *cells]))
    return "\n".join(lines) + "\n"


def _table(results: Results, names: list[str], columns: list[str]) -> str:
    run = [column for column in columns if any(column in results.types[name]["columns"] for name in names)]
    lines = [_row(["type", "cache", *run]), _rule(2 + len(run))]
    for name in names:
        held = results.types[name]["columns"]
        signs = [symbol_of(held.get(column)) for column in run]
        lines.append(_row([f"`{name}`", _cache(held.get("prefill", {})), *signs]))
    return "\n".join(lines) + "\n"


def _cache(prefill: dict[str, Any]) -> str:
    if not prefill.get("ok"):
        return ""
    short = [layer.replace("Dynamic", "").removesuffix("Layer") or "Dynamic" for layer in prefill["layers"]]
    return f"{prefill['cache']}" + (f" ({', '.join(layer or 'full' for layer in short)})" if short else "")


def _reasons(results: Results, columns: list[str]) -> str:
    lines = ["## What fails, and why\n"]
    found = failures(results, columns)
    for column, reasons in ((column, found[column]) for column in columns if column in found):
        lines.append(f"**{column}**\n")
        for _, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
            first = results.types[names[0]]["columns"][column]["why"]
            shown = re.sub(r"[`\s]+", " ", first).strip()
            lines.append(f"- {_codes(names)}: `{shown}`")
        lines.append("")
    skipped: dict[str, list[str]] = {}
    for name, entry in sorted(results.types.items()):
        for column, result in entry["columns"].items():
            if result["ok"] is None and not result["why"].endswith(("did not pass", "ended the process")):
                skipped.setdefault(f"{column}: {result['why'].partition(': ')[2] or result['why']}", []).append(name)
    if skipped:
        lines.append("**does not apply**\n")
        lines += [f"- {_codes(names)}: {reason}" for reason, names in sorted(skipped.items())]
    return "\n".join(lines) + "\n" if len(lines) > 1 else ""


def _counts(results: Results, names: Iterable[str], column: str) -> Counter[Any]:
    held = (results.types[name]["columns"].get(column) for name in names)
    return Counter(result["ok"] for result in held if result is not None)


def _family(name: str) -> str:
    return name.partition(":")[0] if ":" in name else "causal"


def _sensitivity(entry: dict[str, Any]) -> float:
    return float(entry["columns"].get("prefill", {}).get("sensitivity", 1.0))


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(count: int) -> str:
    return f"|{'---|' * count}"
