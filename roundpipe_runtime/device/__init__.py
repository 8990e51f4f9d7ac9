"""Virtual devices and accelerators, with their memory, threads, copies and events."""

from __future__ import annotations

from .events import Event
from .virtual import Device, VirtualDevice, parse_devices

__all__ = [
    "Device",
    "Event",
    "VirtualDevice",
    "parse_devices",
]
