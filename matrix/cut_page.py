"""The page of the cut matrix, written from the JSON file alone."""

from __future__ import annotations

from typing import Any

from .cut_cases import COLUMNS
from .models import split_name
from .results import Results, symbol_of

__all__ = ["page_of"]

_INTRODUCTION = """# Supported models: training through a pipeline

These tables show which types of models run through a pipeline: every model type of the installed transformers, with
random weights from a small configuration, is cut into layers. `make cut-matrix` runs it (`python -m matrix.cut
--help` states how to run less); this page is written from `data/{file}`, with {versions}.

`.ci/run` runs 25 types again, one of every kind (family, experts, recurrent states, shared keys, number of phases), and
fails where one that passed does not any more.

| column | what is asked |
|---|---|
| built | the small configuration makes a model |
| cut | `cut` finds layers; on one batch in float32, outputs are within 1e-6 of the model's, gradients within 1e-5 |
| microbatches | 5 rows, one padded, in 3 microbatches on 2 virtual devices: loss, logits, gradients within 1e-6 |
| trained | 3 steps of SGD, another batch each: the losses of the reference model |

The last two run in float64. Some models compute parts in float32 whatever their dtype; for them an error counts as
rounding while it is below three times that of a multiple of the reference model's loss, divided again. A gradient that
is zero but for rounding, like that of the bias of keys, is compared with the largest of the model.

✓ passed, ✗ failed, – does not apply or was not tried because an earlier column did not pass, empty: not run.
"""

_FAMILIES = {
    "causal": "Causal language models",
    "seq2seq": "Encoder-decoder models",
    "image": "Vision-language models",
    "speech": "Speech models",
}


def page_of(results: Results, file: str) -> str:
    """Return the page.

    Args:
        results: the results of the cut matrix.
        file: the name of the file they are from.
    """
    versions = ", ".join(f"{library} {version}" for library, version in results.versions.items())
    parts = [_INTRODUCTION.format(file=file, versions=versions), _summary(results), _reasons(results)]
    for family, title in _FAMILIES.items():
        names = [name for name in sorted(results.types) if split_name(name)[0] == family]
        if names:
            parts.append(f"## {title}\n\n{_table(results, names)}")
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _summary(results: Results) -> str:
    lines = ["| types | built | cut | exact in microbatches | trained |", "|---|---|---|---|---|"]
    for family, title in _FAMILIES.items():
        held = [entry["columns"] for name, entry in results.types.items() if split_name(name)[0] == family]
        if held:
            counts = [sum(columns.get(name, {}).get("ok") is True for columns in held) for name in COLUMNS]
            lines.append(f"| {title} ({len(held)}) | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def _table(results: Results, names: list[str]) -> str:
    lines = [
        f"| type | {' | '.join(COLUMNS)} | layers | calls | phases | gradients |",
        f"|---|{'---|' * len(COLUMNS)}---|---|---|---|",
    ]
    for name in names:
        columns = results.types[name]["columns"]
        signs = " | ".join(symbol_of(columns.get(column)) for column in COLUMNS)
        lines.append(f"| `{split_name(name)[1]}` | {signs} | {_details(columns)} |")
    return "\n".join(lines)


def _details(columns: dict[str, Any]) -> str:
    cut, exact = columns.get("cut", {}), columns.get("microbatches", {})
    lists = ", ".join(f"`{path}`" for path in cut.get("lists", []))
    error = f"{exact['gradients']:.0e}" if exact.get("ok") else ""
    return f"{lists} | {cut.get('calls', '')} | {cut.get('phases', '')} | {error}"


def _reasons(results: Results) -> str:
    lines = ["## What did not pass\n"]
    for name, entry in sorted(results.types.items()):
        for column, result in entry["columns"].items():
            if result["ok"] is not True and not result.get("why", "").endswith("did not pass"):
                why = result["why"].replace("|", "\\|")
                lines.append(f"- `{name}`, {column}: {why}")
    return "\n".join(lines) if len(lines) > 1 else "Everything passed."
