"""The small table of exporters in the guide: how often each of them got which verdict, as `make oracle` recorded it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def write_oracle(folder: Path) -> None:
    """Write the table in Markdown."""
    from matrix.oracle_page import small_table
    from matrix.results import Results, recorded_file

    (folder / "oracle.md").write_text(f"{small_table(Results.read(recorded_file('oracle')))}\n", encoding="utf-8")
