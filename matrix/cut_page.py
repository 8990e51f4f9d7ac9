"""The page of the cut matrix, written from the JSON file alone."""

from __future__ import annotations

from typing import Any

from .cut_cases import COLUMNS
from .models import split_name
from .results import Results, symbol_of

__all__ = ["page_of"]

_INTRODUCTION = """# Supported models: training through a pipeline

These tables list every model type in the installed transformers, and whether the model trains through a pipeline of
`roundpipe_runtime`. Each model is built from a small configuration with random weights, and split into layers.
`make cut-matrix` runs all types (`python -m matrix.cut --help` lists the options to run fewer). The results come from
`data/{file}`, measured with {versions}.

CI (`.ci/run`) runs 25 model types again, at least one for each family and each special feature (experts, recurrent
states, shared keys, several [phases](guide/words.md#pipelines)). CI fails if a model type that passed before fails now.

| column | what is checked |
|---|---|
| built | the model can be built from the small configuration |
| cut | the model is split into layers; on one float32 batch, outputs are within 1e-6 and gradients within 1e-5 |
| microbatches | 5 rows, one padded, in 3 microbatches on 2 simulated devices: loss, logits, gradients within 1e-6 |
| trained | 3 steps of SGD, each on a different batch: the same losses as the reference model without a pipeline |

The columns *microbatches* and *trained* run in float64. Some models always compute some parts in float32. The rounding
error of such a model is estimated by a second backward, in which the loss is multiplied by a constant and the gradients
are divided by the constant. A difference of up to three times the estimated rounding error passes. A gradient that is
zero apart from rounding errors (the bias of the attention keys) is compared relative to the largest gradient of the
model.

✓ passed. ✗ failed. – does not apply, or an earlier column failed. Empty: not run.
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
