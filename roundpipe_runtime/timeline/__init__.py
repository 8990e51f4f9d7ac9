"""What ran where and when: recorded, read back, added up and drawn."""

from __future__ import annotations

from .record import Record, Timeline

__all__ = [
    "Record",
    "Timeline",
]
