"""Record the calls of a running model, and read an export's example and dynamic shapes off them."""

from __future__ import annotations

from .call import Call
from .calls import RecordedCalls
from .recorder import record_calls
from .replays import RecordReplay

__all__ = [
    "Call",
    "RecordReplay",
    "RecordedCalls",
    "record_calls",
]
