"""The files of a day: a line is added for each result when it is there, so a run that is cut keeps what it has."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Records"]


class Records:
    """Results of a day, in a folder without folders in it: ``machine.json``, and lines of JSON.

    A result is found again by its kind and its key; of two, the later one counts.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.machine = folder / "machine.json"
        self.path = folder / "records.jsonl"

    def add(self, kind: str, key: str, found: dict[str, Any]) -> None:
        """Write a result, so that it outlasts the process."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "key": key, **found}, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """The results of a kind by their keys, in the order in which they came first."""
        return {line["key"]: line for line in self._lines() if line["kind"] == kind}

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for text in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(text)
            except ValueError:  # the last line of a run that was cut
                continue
