"""The tables of `docs/tables`, which pages include: `make tables` writes them, and a test compares them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from benchmark_tables import write_benchmarks
from error_index import write_error_index
from oracle_table import write_oracle
from pictures import write_pictures
from plan_table import write_plans
from tried_table import write_tried

TABLES = Path(__file__).parent / "tables"


def write_tables(folder: Path) -> None:
    """Write all tables in Markdown, and the pictures that pages show."""
    folder.mkdir(exist_ok=True)
    _write(folder / "flattening_list.md", _flattening_list())
    _write_command_lines(folder)
    write_benchmarks(folder)
    write_plans(folder)
    write_error_index(folder)
    write_tried(folder)
    write_oracle(folder)
    write_pictures(folder)


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # an untouched file is not built again
        path.write_text(text, encoding="utf-8")


def _flattening_list() -> str:
    """The tables of all registered classes, from the registrations themselves."""
    from yobx_flatten import flattening_list

    kinds = {"layer": "Layers of caches", "cache": "Caches", "output": "Outputs", "container": "Containers"}
    heads = ["class", "code", "leaves", "counts tokens in", "static", "registered by", "registered in", "since"]
    lines = []
    rows = [row for row in flattening_list() if not row.cls.startswith("transformers.models.")]
    for kind, title in kinds.items():
        # what registers a layer is its cache
        count = len(heads) if kind != "layer" else 5
        shown = heads[:count] if kind != "layer" else [*heads[:5], "since"]
        lines += [f"### {title}", "", " | ".join(["", *shown, ""]).strip(), "|---" * len(shown) + "|"]
        for row in rows:
            if row.kind == kind:
                _, cls, code, *rest = dataclasses.astuple(row)
                cells = rest if kind != "layer" else [*rest[:3], rest[-1]]
                lines.append(" | ".join(["", f"`{cls.rpartition('.')[2]}`", f"`{code}`", *cells, ""]).strip())
        lines.append("")
    return "\n".join(lines)


def _write_command_lines(folder: Path) -> None:
    """The references of both command lines, from the help of the commands."""
    from command_reference import reference

    from roundpipe_runtime.cli.app import app as roundpipe
    from yobx_flatten.cli.app import app as flatten

    for name, app in (("command_line", flatten), ("runtime_command_line", roundpipe)):
        _write(folder / f"{name}.md", reference(app))


if __name__ == "__main__":
    write_tables(Path(sys.argv[1]) if len(sys.argv) > 1 else TABLES)
