"""Timelines of a run, recorded, loaded, summed up and drawn: what ran where and when."""

from __future__ import annotations

from .record import Record, Timeline

__all__ = [
    "Record",
    "Timeline",
]
