"""Record calls of a running model, and derive example inputs and dynamic shapes for an export from the calls."""

from __future__ import annotations

from .call import Call
from .calls import RecordedCalls, RecordReplay
from .recorder import record_calls

__all__ = ["Call", "RecordReplay", "RecordedCalls", "record_calls"]
