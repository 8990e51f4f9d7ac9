"""The tables of tried versions on the install page: from what was recorded, and what the project declares."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data" / "newest.json"
LIBRARIES = ("torch", "transformers", "onnxruntime", "onnx", "onnxscript")


def declared() -> dict[str, str]:
    """Return which versions of Python and of each library `pyproject.toml` asks for, in words."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [f"Python{project['requires-python']}", *project["dependencies"], *extras["transformers"], *extras["onnx"]]
    return {found.name: in_words(found) for found in map(Requirement, lines)}


def in_words(requirement: Requirement) -> str:
    """Return the bounds of a requirement: ``4.56 and newer, below 6``."""
    bounds = {one.operator: one.version for one in requirement.specifier}
    words = [f"{bounds['>=']} and newer"] if ">=" in bounds else []
    return ", ".join(words + ([f"below {bounds['<']}"] if "<" in bounds else []))


def development() -> dict[str, str]:
    """Return the versions of `constraints.txt`."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE))


def older() -> list[str]:
    """Return the versions of transformers that `make compat` runs with."""
    found = re.search(r"^VERSIONS \?= (\d.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1].split()


def lines(newest: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the lines of the page.

    Args:
        newest: what `make newest` has recorded; ``None`` where it has not run.
    """
    asked, held, tried = declared(), development(), {} if newest is None else dict(newest["versions"])
    tried["Python"] = tried.pop("python", "")
    held["Python"] = "3.11"
    yield "| | older | development and CI | newest | declared |"
    yield "|---|---|---|---|---|"
    for name in ("Python", *LIBRARIES):
        before = ", ".join(older()) if name == "transformers" else ""
        after = Version(tried[name]).public if tried.get(name) else ""
        yield f"| {name} | {before} | {held[name]} | {after} | {asked[name]} |"
    yield ""
    if newest is None:
        yield "The newest versions are not recorded yet: `make newest` records them."
        return
    worked = "all steps passed" if newest["ok"] else "not all steps passed"
    yield f"`make newest` ran with the newest versions on {newest['date']}, and {worked}:"
    yield ""
    yield "| step | result |"
    yield "|---|---|"
    for step in newest["steps"]:
        reason = " ".join(step["reason"].split()).replace("|", r"\|").replace("`", "'")
        shown = f"{step['result']}: `{reason[:200]}`" if step["result"] == "failed" else step["result"]
        yield f"| {step['name']} | {shown} |"
    unknown = {kind: names for kind, names in newest["unknown"].items() if names}
    if unknown:
        yield ""
        yield "The newest versions contain names that `yobx_flatten` does not know yet:"
        yield ""
        for kind, names in unknown.items():
            yield f"- {kind}: {', '.join(f'`{name}`' for name in names)}"


def write_tried(folder: Path) -> None:
    """Write the tables in Markdown into ``folder``."""
    newest = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else None
    text = "\n".join([*lines(newest), ""])
    path = folder / "tried.md"
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # an untouched file is not built again
        path.write_text(text, encoding="utf-8")
