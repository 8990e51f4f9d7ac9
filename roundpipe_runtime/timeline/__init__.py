"""Record, load, summarize and draw timelines of the work of each device."""

from .record import Record, Timeline

__all__ = ["Record", "Timeline"]
