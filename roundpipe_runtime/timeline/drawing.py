"""Draw a timeline on the terminal, in its width, with a colour for each kind of work."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from .record import Timeline

# What a letter of the drawing stands for, and its colour on a terminal.
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
