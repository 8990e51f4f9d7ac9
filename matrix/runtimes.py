"""Export models for every runtime and prove them there: ``python -m matrix.runtimes --help``."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

from .command import add_options, check_options, run_list
from .results import Results, symbol_of
from .runtimes_cases import BOUNDS, COLUMNS, TYPES, run_type

__all__ = ["main", "page_of", "parse"]

_WAY = "runtimes"

_PAGE = """# Runtimes

Models of transformers, exported with `export_folder(model, folder, target=...)` from a small configuration with random
weights (a window of eight tokens where there is one). A folder is proven in its runtime before it appears: each file
with the example and cases of other batch sizes and lengths, one padded, three calls each that hand on the cache, and 40
tokens of `model.generate` for three rows, two of them padded. ExecuTorch has bounds of {batch} rows and {length}
tokens. Then the stored cases run again with inputs in other places of memory: slices of larger tensors, and axes in
another order. `make runtimes` runs it (`python -m matrix.runtimes --help` lists how to run less); this page is
written from `data/{file}`, with {versions}.

✓ passed, ✗ failed, – does not apply or was not tried because an earlier column did not pass. The number is the largest
difference of an output to the eager model's.

| type | {columns} |
|---|{rule}|
{rows}
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser("python -m matrix.runtimes", description=__doc__, allow_abbrev=False)
    add_options(parser, COLUMNS, timeout=1800.0, stem="runtimes", kinds="the list")
    options = parser.parse_args(arguments)
    check_options(parser, options, COLUMNS, f"runtimes-{importlib.metadata.version('transformers')}")
    return options


def page_of(results: Results, file: str) -> str:
    """Return the page.

    Args:
        results: the results of this matrix.
        file: the name of the file they are from.
    """
    rows, reasons = [], []
    for name, entry in sorted(results.types.items()):
        cells = []
        for column in COLUMNS:
            result = entry["columns"].get(column)
            most = (result or {}).get("max_difference")
            cells.append(symbol_of(result) + ("" if most is None else f" {most:.0e}"))
            if result is not None and result["ok"] is not True and not result["why"].endswith("did not pass"):
                reasons.append(f"- {column}, `{name}`: {result['why']}")
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    found = [result for entry in results.types.values() for result in entry["columns"].values()]
    made_by = dict(result["library"] for result in found if "library" in result)
    versions = ", ".join(f"{library} {version}" for library, version in {**results.versions, **made_by}.items())
    shown = _PAGE.format(
        **BOUNDS,
        file=file,
        versions=versions,
        columns=" | ".join(COLUMNS),
        rule="|".join("---" for _ in COLUMNS),
        rows="\n".join(rows),
    )
    return shown + ("\n## What is not passed\n\n" + "\n".join(reasons) + "\n" if reasons else "")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_list(parse(arguments), _WAY, COLUMNS, TYPES, run_type, page_of)


if __name__ == "__main__":
    sys.exit(main())
