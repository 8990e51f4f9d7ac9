"""Export decoders and open the folders with onnxruntime-genai: ``python -m matrix.genai --help``."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

from .command import add_options, check_options, run_list
from .genai_cases import COLUMNS, SPLIT, TYPES, run_type
from .results import Results, symbol_of

__all__ = ["main", "page_of", "parse"]

_WAY = "onnxruntime-genai"

_PAGE = """# onnxruntime-genai

This table lists which exported models onnxruntime-genai {version} runs. `export_folder` writes each model from a small
configuration with random weights, and with a sliding window of eight tokens if the model type has a window. Models that
accept audio or pictures ({split}) are written with `layout="genai"`. The 30 tokens that onnxruntime-genai generates
after a prompt of nine tokens are compared with those of `model.generate`. `make genai` runs all models
(`python -m matrix.genai --help` lists the options to run fewer). The results come from `data/{file}`, measured with
{versions}.

| column | what is checked |
|---|---|
| folder | `export_folder(model, folder)` writes a folder, and all checks of the export pass |
| opened | onnxruntime-genai generates the same tokens as the model; – if the folder has no `genai_config.json` |
| folder for onnxruntime | `export_folder` with `optimize="onnxruntime"` |
| opened, shared cache | onnxruntime-genai generates from that folder, with one buffer for past and present keys |

✓ passed. ✗ failed. – does not apply, or an earlier column failed.

| type | {columns} | attention |
|---|{rule}|---|
{rows}
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser("python -m matrix.genai", description=__doc__, allow_abbrev=False)
    add_options(parser, COLUMNS, timeout=600.0, stem="genai", kinds="the list")
    options = parser.parse_args(arguments)
    try:
        version = importlib.metadata.version(_WAY)
    except importlib.metadata.PackageNotFoundError:
        parser.error(f"{_WAY} is not installed: make genai installs it")
    check_options(parser, options, COLUMNS, f"genai-{version}")
    return options


def page_of(results: Results, file: str) -> str:
    """Return the page.

    Args:
        results: the results of this matrix.
        file: the name of the file they are from.
    """
    rows = []
    for name, entry in sorted(results.types.items()):
        held = entry["columns"]
        operators = held.get("folder for onnxruntime", {}).get("operators", {})
        attention = next(
            (name for name in ("GroupQueryAttention", "Attention") if name in operators), "separate operators"
        )
        marks = " | ".join(symbol_of(held.get(column)) for column in COLUMNS)
        rows.append(f"| `{name}` | {marks} | {attention} |")
    names: dict[str, list[str]] = {}
    for name, entry in sorted(results.types.items()):
        for column, result in entry["columns"].items():
            if result["ok"] is not True and not result["why"].endswith("did not pass"):
                names.setdefault(f"{column}: {result['why'].removeprefix('SkipColumnError: ')}", []).append(f"`{name}`")
    reasons = [f"- {reason}: {', '.join(of)}" for reason, of in names.items()]
    versions = ", ".join(f"{library} {version}" for library, version in results.versions.items())
    shown = _PAGE.format(
        version=file.removeprefix("genai-").removesuffix(".json"),
        file=file,
        versions=versions,
        columns=" | ".join(COLUMNS),
        rule="|".join("---" for _ in COLUMNS),
        rows="\n".join(rows),
        split=", ".join(f"`{name}`" for name in SPLIT),
    )
    return shown + ("\n## What does not pass\n\n" + "\n".join(reasons) + "\n" if reasons else "")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_list(parse(arguments), _WAY, COLUMNS, TYPES, run_type, page_of)


if __name__ == "__main__":
    sys.exit(main())
