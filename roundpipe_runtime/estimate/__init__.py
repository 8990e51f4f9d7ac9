"""Estimate memory and time of a training before anything is allocated."""

from __future__ import annotations

from .footprint import LayerFootprint, measure_layers
from .hardware import Hardware, describe_hardware, load_machine, save_machine
from .report import DiskUse, StepSimulation, simulate
from .step_plan import DeviceMemory, HostMemory, StepPlan, expected_share, step_plan

__all__ = [
    "DeviceMemory", "DiskUse", "Hardware", "HostMemory", "LayerFootprint", "StepPlan", "StepSimulation",
    "describe_hardware", "expected_share", "load_machine", "measure_layers", "save_machine", "simulate", "step_plan",
]  # fmt: skip
