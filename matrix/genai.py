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

This table shows which exported models onnxruntime-genai {version} runs. Each is written by `export_folder` from a
small configuration with random weights (a window of eight tokens where there is one), with `layout="genai"` those that
read sound or a picture ({split}). 30 tokens after a prompt of nine are compared with those of `model.generate`.
`make genai` runs it (`python -m matrix.genai --help` lists how to run less); this page is written from `data/{file}`,
with {versions}.

| column | what is asked |
|---|---|
| folder | `export_folder(model, folder)` writes a proven folder |
| opened | the library opens it and generates the tokens of the model; – where the folder has no `genai_config.json` |
| folder for onnxruntime | the same with `optimize="onnxruntime"` |
| opened, shared cache | as before, with a cache in one piece of memory |

✓ passed, ✗ failed, – does not apply or was not tried because an earlier column did not pass.

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
        attention = next((name for name in ("GroupQueryAttention", "Attention") if name in operators), "spelled out")
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
    return shown + ("\n## What is not passed\n\n" + "\n".join(reasons) + "\n" if reasons else "")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_list(parse(arguments), _WAY, COLUMNS, TYPES, run_type, page_of)


if __name__ == "__main__":
    sys.exit(main())
