"""The results: one JSON file, one entry per type, written whole after every type."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Mapping
from typing import Any

from packaging.version import Version

__all__ = [
    "FAILED",
    "LIBRARIES",
    "Results",
    "alike",
    "failures",
    "installed_versions",
    "library_state",
    "passes",
    "recorded_file",
    "regressions",
    "symbol_of",
    "untried",
    "was_tried",
]

LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
FAILED = "did not run"
_RECORDED = pathlib.Path(__file__).parent.parent / "docs" / "data"


def installed_versions() -> dict[str, str]:
    """Return the versions that results depend on; a library that is missing is left out."""
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def library_state(folder: pathlib.Path) -> str:
    """Return a short name for the state of the package's source: results of another state may be outdated.

    Args:
        folder: the package.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


def recorded_file(stem: str, folder: pathlib.Path = _RECORDED) -> pathlib.Path:
    """Return the recorded results of the newest version of transformers.

    Args:
        stem: how the names of the files of a matrix begin: ``matrix``, ``cut``, ``runtimes``.
        folder: holds the files; that of the committed ones by default.

    >>> recorded_file("cut").name.startswith("cut-")
    True
    """
    found = {
        Version(version[1]): path
        for path in folder.glob(f"{stem}-*.json")
        if (version := re.fullmatch(rf"{stem}-([\d.]+)", path.stem))
    }
    return found[max(found)]


class Results:
    """What is known of each type, and the file that holds it.

    Attributes:
        versions: the versions of the libraries that made the results.
        way: how caches were flattened and programs were made, a name of `ways.WAYS`.
        types: name -> column -> result, next to ``family`` and ``state`` (of the package when it was made).
    """

    def __init__(self, path: pathlib.Path, versions: dict[str, str], way: str) -> None:
        self.path, self.versions, self.way = path, versions, way
        self.types: dict[str, dict[str, Any]] = {}

    @classmethod
    def open(cls, path: pathlib.Path, versions: dict[str, str], way: str) -> Results:
        """Return the results of a file as far as they were made with the same versions, and in the same way."""
        results = cls(path, versions, way)
        if path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["versions"] == versions and held["way"] == way:
                results.types = held["types"]
        return results

    @classmethod
    def read(cls, path: pathlib.Path) -> Results:
        """Return the results of a file, whatever made them."""
        held = json.loads(path.read_text(encoding="utf-8"))
        results = cls(path, held["versions"], held["way"])
        results.types = held["types"]
        return results

    def missing(self, name: str, columns: list[str]) -> list[str]:
        """Return those of the columns that are not recorded for a type."""
        held = self.types.get(name, {}).get("columns", {})
        return [column for column in columns if column not in held]

    def passed(self, name: str) -> dict[str, bool | None]:
        """Return which columns of a type are recorded, and whether they passed."""
        held = self.types.get(name, {}).get("columns", {})
        return {column: result["ok"] for column, result in held.items()}

    def record(self, name: str, columns: dict[str, dict[str, Any]], state: str) -> None:
        """Add results of a type, and write the file.

        Raises:
            ValueError: for a column that was not tried and does not state why.
        """
        silent = [column for column, result in columns.items() if result["ok"] is None and not result.get("why")]
        if silent:
            raise ValueError(f"{name}, {', '.join(silent)}: a column that is not tried states why")
        entry = self.types.setdefault(name, {"columns": {}})
        entry["columns"] |= columns
        entry["state"] = state
        self.write()

    def write(self) -> None:
        """Write the file; a reader finds the old one or the new one, never half of it."""
        held = {"versions": self.versions, "way": self.way, "types": dict(sorted(self.types.items()))}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def symbol_of(result: dict[str, Any] | None) -> str:
    """Return how a result is shown: passed (``*``: with a separate program), failed, does not apply, not tried.

    >>> symbol_of({"ok": True}), symbol_of({"ok": False}), symbol_of({"ok": None}), symbol_of(None)
    ('✓', '✗', '–', '')
    """
    if result is None:
        return ""
    return {True: "✓*" if result.get("own") else "✓", False: "✗", None: "–"}[result["ok"]]


def untried(result: dict[str, Any]) -> bool:
    """Return whether a column was left out because an earlier one did not pass.

    >>> untried({"ok": None, "why": "export did not pass"}), untried({"ok": None, "why": "takes no mask"})
    (True, False)
    """
    return result["ok"] is None and result.get("why", "").endswith(("did not pass", "ended the process"))


def passes(entry: dict[str, Any], columns: list[str]) -> bool:
    """Return whether a type passes all of these columns, or those of them that apply to it and were run.

    >>> passes({"columns": {"built": {"ok": True}, "left padding": {"ok": None, "why": "takes no mask"}}}, ["built"])
    True
    """
    held = [entry["columns"][column] for column in columns if column in entry["columns"]]
    return bool(held) and not any(result["ok"] is False or untried(result) for result in held)


def was_tried(results: Results, name: str, columns: Iterable[str]) -> bool:
    """Return whether one of these columns of a type passed or failed: a column that is null was not tried."""
    passed = results.passed(name)
    return any(passed.get(column) is not None for column in columns)


def regressions(found: Results, expected: Results, names: list[str], columns: Iterable[str] | None = None) -> list[str]:
    """Return, in words, every column of these types that passed in ``expected`` and does not pass in ``found``.

    A column that is null was not tried: it is worse than one that passed, and its reason is stated. One without a
    reason is worse whatever it was before. A cut that calls fewer layers than the recorded one is also worse: the model
    is right, but in larger pieces. So is a training that runs once for the whole batch, and ran by microbatches before.

    Args:
        found: the results of this run.
        expected: recorded ones.
        names: the names of the types that were chosen.
        columns: those that were chosen. Default: all.
    """
    lines = []
    for name in names:
        before, now = expected.passed(name), found.passed(name)
        for column in dict.fromkeys([*before, *now]) if columns is None else columns:
            result = found.types[name]["columns"][column] if column in now else None
            if result is None and before.get(column):
                lines.append(f"{name}, {column}: was not run")
            elif result is not None and result["ok"] is False and before.get(column):
                lines.append(f"{name}, {column}: {result['why']}")
            elif result is not None and result["ok"] is None and (before.get(column) or not result.get("why")):
                lines.append(f"{name}, {column}: was not tried: {result.get('why') or 'no reason is recorded'}")
            elif before.get(column) and way_of(result or {}) > way_of(recorded := _result(expected, name, column)):
                lines.append(f"{name}, {column}: {_WAYS[way_of(result or {})]}, not {_WAYS[way_of(recorded)]}")
        calls, most = (_result(one, name, "cut").get("calls", 0) for one in (found, expected))
        if now.get("cut") and calls < most:
            lines.append(f"{name}, cut: {calls} calls of layers, not {most}")
    return lines


_WAYS = ("by microbatches", "the loss once for the whole batch", "in one microbatch")


def way_of(result: Mapping[str, Any]) -> int:
    """Return how a training ran, as its warnings have it: a place in ``_WAYS``."""
    notes = " ".join(result.get("notes", ()))
    return 2 if "in one microbatch" in notes else int("once for the whole batch" in notes)


def _result(results: Results, name: str, column: str) -> dict[str, Any]:
    found: dict[str, Any] = results.types.get(name, {}).get("columns", {}).get(column, {})
    return found


def failures(results: Results, columns: list[str]) -> dict[str, dict[str, list[str]]]:
    """Group failures: column -> reason -> types. Numbers in a reason are left out, so that alike ones come together."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, entry in sorted(results.types.items()):
        for column in columns:
            result = entry["columns"].get(column)
            if result is not None and result["ok"] is False:
                found.setdefault(column, {}).setdefault(alike(result["why"]), []).append(name)
    return found


def alike(reason: str) -> str:
    """Return a reason with its numbers replaced by a sign."""
    digits = "".join("#" if letter.isdigit() else letter for letter in reason)
    while "##" in digits:
        digits = digits.replace("##", "#")
    return digits
