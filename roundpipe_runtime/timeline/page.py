"""Write a timeline as one self-contained HTML page: lanes of devices and links, and bubbles by cause."""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Sequence
from typing import Any

from yobx_flatten.files.scratch import write_text

from .bubbles import CAUSES, bubbles_of
from .record import KINDS, Record

_LINKS = {"upload": "in", "download": "back"}


def save_page(records: Sequence[Record], path: str | os.PathLike[str], *, title: str = "Timeline") -> None:
    """Write records as an HTML page, which zooms, explains what is under the pointer, and loads nothing.

    Args:
        records: records of a timeline; at least one.
        path: file to write.
        title: title of the page.
    """
    template = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # no text of a record can end the script that it stands in
    data = json.dumps({"title": title, **_data(records)}, separators=(",", ":")).replace("<", "\\u003c")
    write_text(path, template.replace("/*DATA*/", data))


def _data(records: Sequence[Record]) -> dict[str, Any]:
    """Lanes, bars and totals. Times are in microseconds from the first record."""
    first = min(record.start for record in records)
    bubbles = bubbles_of(records)
    lanes: dict[tuple[str, str], int] = {}
    for device in sorted({record.device for record in records}):
        kinds = {record.kind for record in records if record.device == device}
        lanes[device, "computes"] = len(lanes)
        for kind, name in _LINKS.items():
            if kind in kinds:
                lanes[device, name] = len(lanes)

    def micro(time: float) -> float:
        return round(1e6 * (time - first), 1)

    return {
        "lanes": [[device, what] for device, what in lanes],
        "kinds": KINDS,
        "causes": CAUSES,
        "bars": [
            [lanes[r.device, _LINKS.get(r.kind, "computes")], KINDS.index(r.kind), micro(r.start), micro(r.end),
             r.stage, r.microbatch, r.layer]
            for r in sorted(records, key=lambda record: record.start)
        ],
        "bubbles": [
            [lanes[b.device, "computes"], CAUSES.index(b.cause), micro(b.start), micro(b.end)]
            for b in sorted(bubbles, key=lambda bubble: bubble.start)
        ],
        "end": micro(max(record.end for record in records)),
    }  # fmt: skip
