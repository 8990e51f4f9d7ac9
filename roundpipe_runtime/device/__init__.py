"""Run work on virtual devices and accelerators: their memory, threads, copies and events."""

from .accelerator import parse_devices
from .protocol import Device, Event
from .virtual import VirtualDevice

__all__ = ["Device", "Event", "VirtualDevice", "parse_devices"]
