"""The table of coverage: `make coverage` writes its numbers into `docs/data/`, and the site shows them."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "coverage.json"
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def by_folder(measured: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the counts of each folder, by its path.

    Args:
        measured: what `coverage json` writes.
    """
    found: dict[str, dict[str, int]] = {}
    for file, entry in sorted(measured["files"].items()):
        parts = Path(file).parts
        parts = parts[max(parts.index(name) for name in ("yobx_flatten", "roundpipe_runtime") if name in parts) :]
        counts = found.setdefault("/".join(parts[: min(2, len(parts) - 1)]), dict.fromkeys(COUNTS, 0))
        for name in COUNTS:
            counts[name] += entry["summary"][name]
    return found


def write_coverage(folder: Path) -> None:
    """Write the table in Markdown into `folder`, from the numbers that are stored."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    lines = ["| folder | lines | run | branches | taken |", "|---|---:|---:|---:|---:|"]
    for name, counts in [*data["folders"].items(), ("**both packages**", data["total"])]:
        cells = [name if name.startswith("*") else f"`{name}`"]
        for count, covered in (COUNTS[:2], COUNTS[2:]):
            share = f"{100 * counts[covered] / counts[count]:.1f} %" if counts[count] else "–"
            cells += [f"{counts[count]:,}", share]
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{library} {version}" for library, version in data["versions"].items())
    text = "\n".join([*lines, "", f"`make coverage`; {versions}. All numbers: `docs/data/coverage.json`.", ""])
    path = folder / "coverage.md"
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # an untouched file is not built again
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Store the numbers of a measurement, by folder."""
    measured = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    libraries = ("coverage", "torch", "transformers")
    data = {
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in libraries},
        },
        "folders": by_folder(measured),
        "total": {name: measured["totals"][name] for name in COUNTS},
    }
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
