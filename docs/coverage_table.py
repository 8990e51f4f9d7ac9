"""The table of coverage: `make coverage` prints it, and writes its numbers into `docs/data/`."""

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


def table(data: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table.

    Args:
        data: what `main` stores.
    """
    lines = [f"{'folder':<34}{'lines':>8}{'run':>9}{'branches':>10}{'taken':>9}"]
    for name, counts in [*data["folders"].items(), ("both packages", data["total"])]:
        shares = []
        for count, covered in (COUNTS[:2], COUNTS[2:]):
            shares += [f"{counts[count]:,}", f"{100 * counts[covered] / counts[count]:.1f} %" if counts[count] else "-"]
        lines.append(f"{name:<34}{shares[0]:>8}{shares[1]:>9}{shares[2]:>10}{shares[3]:>9}")
    return lines


def main() -> None:
    """Store the numbers of a measurement, by folder, and print them."""
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
    print(*table(data), sep="\n")


if __name__ == "__main__":
    main()
