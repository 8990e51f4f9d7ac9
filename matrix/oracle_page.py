"""The page of the table of exporters, and its small form for the guide: each verdict, why, and how to repeat it."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

from .oracle_cases import RANKS, TYPES
from .oracle_exporters import EXPORTERS
from .page import cleaned, row, rule, stated
from .results import Results

__all__ = ["NOT_RUN", "page_of", "small_table", "verdict_of"]

NOT_RUN = "not run"

_PAGE = """# Files of every exporter

This page shows which exporters write ONNX files that compute the same values as the model. {types} model types are
built from small configurations with random weights, and with a sliding window of eight tokens if the model type has a
window. Each exporter exports the same checkpoint in a separate process, with the call that the exporter's documentation
describes. `verify_file` then compares the ONNX files with the eager model at other batch sizes and lengths, at lengths
past the window, with padding, with an empty cache, and in three calls that pass the cache on
([how](guide/from_optimum.md#verify-files-of-other-exporters)).

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

A file counts as wrong only if its outputs differ from the float32 model and from the float64 model by more than ten
times the difference between these two models. mobius-onnx warns that its portable files attend to all tokens even if
the model has a sliding window. mobius-onnx exports BERT and RoBERTa without the head of the checkpoint, so these files
are compared with the model without its head. Files of the onnxruntime-genai builder are also tested in
onnxruntime-genai itself, which allocates the cache for the largest length.

To test whether `verify_file` misses faults, we put sixteen faults into ONNX files of five of these exporters: for
example a wrong axis, a missing sliding window, permuted heads, an old mask, an old cache, or a rounded weight.
`verify_file` finds all sixteen faults (`tests/flatten/verify/test_written_files.py`), and reports the unchanged files
as right.

{small}

## All cells

{table}

## What is not right

{reasons}

## Repeat a cell

```bash
make oracle MATRIX_ARGS="--only llama --columns 'torch.onnx' --redo all --output llama.json"
```

`make oracle` repeats these checks (options: `python -m matrix.oracle --help`). The results come from `data/{file}`,
measured with {versions}. The exporters:

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
        versions=stated(results.versions),
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
