"""Draw a timeline into an image file: a row per device, a bar per piece of work, a colour per kind."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from yobx_flatten.errors.dependencies import require
from yobx_flatten.files.scratch import whole_file

from .file import TimelineFileError
from .record import Record

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
        raise TimelineFileError(f"{os.fspath(path)}: a picture is written into a file that ends in {known}.")
    with whole_file(path) as file:
        figure.savefig(file)
