"""Draw a timeline on the terminal, in its width, with a colour for each kind of work."""

from __future__ import annotations

import importlib.resources
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from yobx_flatten.errors.dependencies import require
from yobx_flatten.files.scratch import whole_file, write_text

from .bubbles import CAUSES, bubbles_of
from .record import KINDS, Record, Timeline, TimelineFileError

# Meaning of each letter of the drawing, and its colour on a terminal.
_WORK = {
    "F": ("forward", "white on blue"),
    "R": ("forward again", "black on cyan"),
    "L": ("loss", "black on yellow"),
    "B": ("backward", "white on red"),
    "u": ("copy in", "black on white"),
    "d": ("copy back", "black on white"),
    ".": ("waiting", "bright_black"),
}


def draw_on(console: Any, timeline: Timeline, shown: Callable[[str], str] = str) -> None:
    """Print the drawing of a timeline and its legend."""
    # shown: function that makes names of a file safe for a terminal; by default they are trusted
    from rich.text import Text

    margin = max(len(record.device) for record in timeline.records)
    width = max(8, min(console.width, 120) - margin - 3)
    drawing, _, total = timeline.draw(width).rpartition("  ")
    found = set()
    for line in drawing.splitlines():
        name, row = line.rstrip("|").split(" |")
        text = Text(f"{shown(name)} ")
        for letter, same in itertools.groupby(row):
            text.append("".join(same), _WORK[letter][1])
            found.add(letter)
        console.print(text)
    console.print(f"{'':{margin}} 0{total:>{width - 1}}", style="dim")
    legend = Text()
    for letter, (meaning, style) in _WORK.items():
        if letter in found:
            legend.append(f" {letter} ", style).append(f" {meaning} ")
    console.print(legend)


# Draw a timeline into an image file: a row per device, a bar per piece of work, a colour per kind.


_COLOURS = {
    "upload": "#bbbbbb",
    "forward": "#3b75af",
    "recompute": "#6fc3d0",
    "loss": "#e3b23c",
    "backward": "#c44e52",
    "download": "#888888",
}


def save_picture(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draw records into an image file."""
    # path: path of the image; its suffix determines the format: `.png`, `.svg`, `.pdf`
    require("matplotlib", purpose="a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    devices = sorted({record.device for record in records})
    first = min(record.start for record in records)
    figure = Figure(figsize=(12, 1.2 + 0.5 * len(devices)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # copies first, so that computation is drawn over them
    for kind, colour in sorted(_COLOURS.items(), key=lambda pair: pair[0] not in ("upload", "download")):
        for row, device in enumerate(devices):
            bars = [
                (1e3 * (record.start - first), 1e3 * (record.end - record.start))
                for record in records
                if record.device == device and record.kind == kind
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
    axes.set_yticks(range(len(devices)), devices)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    there = {record.kind for record in records}
    handles = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items() if kind in there]
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(handles), frameon=False)
    suffix = pathlib.Path(path).suffix.lstrip(".").lower()
    if suffix not in canvas.get_supported_filetypes():
        known = ", ".join(f".{name}" for name in ("png", "svg", "pdf"))
        raise TimelineFileError(f"{os.fspath(path)}: the file name of a picture must end in {known}.")
    with whole_file(path) as file:
        figure.savefig(file)


# Write a timeline as one self-contained HTML page: lanes of devices and links, and bubbles by cause.


_LINKS = {"upload": "in", "download": "back"}


def save_page(records: Sequence[Record], path: str | os.PathLike[str], *, title: str = "Timeline") -> None:
    """Write records as a self-contained HTML page with zoom and tooltips.

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
