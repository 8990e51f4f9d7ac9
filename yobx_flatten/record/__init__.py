"""Record the calls of a running model, and derive an export's example and dynamic shapes from them."""

from __future__ import annotations

from .call import Call
from .calls import RecordedCalls, RecordReplay
from .recorder import record_calls

__all__ = [
    "Call",
    "RecordReplay",
    "RecordedCalls",
    "record_calls",
]
