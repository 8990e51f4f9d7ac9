"""The page of the table of exporters, and its small form for the guide: each verdict, why, and how to repeat it."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

from .oracle_cases import RANKS, TYPES
from .oracle_exporters import EXPORTERS
from .page import cleaned, row, rule
from .results import Results

__all__ = ["NOT_RUN", "page_of", "small_table", "verdict_of"]

NOT_RUN = "not run"

_PAGE = """# Files of every exporter

This table shows whether exported files compute the same as their model. {types} model types are built from small
configurations with random weights, and with a sliding window of eight tokens if the type has a window. Each exporter
exports the same checkpoint, in a separate process, as its documentation describes. `verify_file` then compares the
files with the eager model: other batch sizes and lengths, lengths past the window, padding, an empty cache, and three
calls in a loop over the cache of the file ([how](guide/from_optimum.md#verify-files-of-other-exporters)).

| verdict | meaning |
|---|---|
| right | all cases agree with the model |
| right at some sizes only | a file agrees in some cases, and refuses other sizes or raises an error in the rest |
| wrong values | a file runs and returns other values than the model in at least one case |
| refused | the exporter states that it does not support the model |
| not written | the export ends with another error |
| does not run | onnxruntime runs a file in none of the cases |
| not judged | file inputs are unknown, float32 is too inexact for the model, or the export takes over 30 minutes |
| not run | the cell was not tried |

A file is called wrong only if it differs from the model in float32 and from the model in float64, each time by more
than ten times the difference between the float32 and the float64 model. Some exporters announce that results may
differ: mobius-onnx logs a warning that its portable files attend to all tokens where the model has a window. A file
without the head of its checkpoint (BERT and RoBERTa of mobius-onnx) is compared with the model without its head. Files
of onnxruntime-genai are also run in onnxruntime-genai itself, which allocates a cache of the largest length.

To test whether this comparison misses faults, sixteen faults were planted in files that five of these exporters wrote:
a wrong axis, a lost window, permuted heads, a stale mask, a stale cache, a rounded weight. `verify_file` finds all
sixteen faults (`tests/flatten/verify/test_peer_faults.py`), and reports the files without a fault as right.

{small}

## All cells

{table}

## What is not right

{reasons}

## Repeat a cell

```bash
make oracle MATRIX_ARGS="--only llama --columns 'torch.onnx' --redo all --output llama.json"
```

`make oracle` runs all exporters for all types, and continues where it stopped (`python -m matrix.oracle --help` lists
the options). This page is written from `data/{file}`, with {versions}. The exporters:

| exporter | call | versions |
|---|---|---|
{exporters}
"""

_CALLS = {
    "yobx-flatten": '`export_folder("model", "out", proof="none")`, without checks, so that a wrong file is written',
    "transformers exporters": (
        "`OnnxExporter().export(model, inputs, config=OnnxConfig(dynamic=True))`; `export_for_generation` if the model "
        "generates"
    ),
    "optimum-onnx": "`optimum-cli export onnx --model model --task ... out`",
    "torch.onnx": (
        "`torch.onnx.export(model, kwargs=inputs, dynamic_shapes=..., dynamo=True)`, without a cache; batch and length "
        "vary"
    ),
    "onnxruntime-genai": "`python -m onnxruntime_genai.models.builder -i model -o out -p fp32 -e cpu`",
    "mobius-onnx": "`mobius build --model model out --dtype f32`",
}


def verdict_of(results: Results, name: str, exporter: str) -> str:
    """Return the verdict on a cell."""
    result = results.types.get(name, {}).get("columns", {}).get(exporter)
    if result is None or result["ok"] is None:
        return NOT_RUN
    return str(result.get("verdict", "not judged"))  # the process of the cell ended before its verdict


def small_table(results: Results) -> str:
    """Return how often each exporter got which verdict, in Markdown."""
    kinds = [*RANKS, NOT_RUN]
    counts = {one: Counter(verdict_of(results, name, one) for name in TYPES) for one in EXPORTERS}
    kinds = [kind for kind in kinds if any(counted[kind] for counted in counts.values())]
    lines = [row(["exporter", *kinds]), rule(len(kinds) + 1)]
    return "\n".join([*lines, *(row([one, *(str(counts[one][kind]) for kind in kinds)]) for one in EXPORTERS)])


def page_of(results: Results, file: str) -> str:
    """Return the page.

    Args:
        results: the results of this matrix.
        file: the name of the file they are from.
    """
    lines = [row(["type", *EXPORTERS]), rule(len(EXPORTERS) + 1)]
    lines += [row([f"`{name}`", *(verdict_of(results, name, one) for one in EXPORTERS)]) for name in TYPES]
    reasons: dict[str, list[str]] = {}
    for one in EXPORTERS:
        for name in TYPES:
            reasons.setdefault(f"{one}, {{}}: {_reason(name, one, results)}", []).append(f"`{name}`")
    exporters = [row([name, call, _versions(results, name)]) for name, call in _CALLS.items()]
    return _PAGE.format(
        types=len(TYPES),
        small=small_table(results),
        table="\n".join(lines),
        reasons="\n".join(
            f"- {line}".replace("{}", ", ".join(names), 1) for line, names in reasons.items() if line[-2:] != ": "
        ),
        file=file,
        versions=", ".join(f"{library} {version}" for library, version in results.versions.items()),
        exporters="\n".join(exporters),
    )


def _versions(results: Results, exporter: str) -> str:
    held = [entry["columns"].get(exporter, {}).get("versions", {}) for entry in results.types.values()]
    known: dict[str, Any] = next((one for one in held if one), {})
    return ", ".join(f"{library} {version}" for library, version in known.items())


def _reason(name: str, exporter: str, results: Results) -> str:
    """The verdict on a cell that is not right, and why."""
    verdict = verdict_of(results, name, exporter)
    result = results.types.get(name, {}).get("columns", {}).get(exporter)
    if verdict == "right" or result is None:
        return ""
    apart = result.get("apart")
    shown = ""
    if apart:
        shown = (
            f"; {apart['float32']:.1e} from float32, {apart['float64']:.1e} from float64, which are "
            f"{apart['between']:.1e} apart"
        )
    if "own_runtime" in result:
        shown += f"; in its own runtime, with one row, up to {result['own_runtime']:.1e} from the model"
    if result.get("without_head"):
        shown += "; next to the model without its head"
    where = f"`{result['file']}`, " if "file" in result else ""
    why = textwrap.shorten(cleaned(result.get("why", "")), 240, placeholder=" ...")
    return f"{verdict} ({where}{why}{shown})"
