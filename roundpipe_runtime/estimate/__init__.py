"""Estimate memory and time of a training before anything is allocated."""

from __future__ import annotations

from .disk_step import DiskUse
from .hardware import Hardware, describe_hardware
from .layer_footprint import LayerFootprint, measure_layers
from .machine_file import load_machine, save_machine
from .memory_estimate import DeviceMemory, HostMemory
from .step_plan import StepPlan, expected_share, step_plan
from .step_simulation import StepSimulation, simulate

__all__ = [
    "DeviceMemory",
    "DiskUse",
    "Hardware",
    "HostMemory",
    "LayerFootprint",
    "StepPlan",
    "StepSimulation",
    "describe_hardware",
    "expected_share",
    "load_machine",
    "measure_layers",
    "save_machine",
    "simulate",
    "step_plan",
]
