"""Check an accelerator: its speed, whether copies overlap with compute, and a plan for it."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from yobx_flatten.errors.messages import format_bytes

from ...device.accelerator import AcceleratorDevice
from ...engine.planner import FOR_PARAMETERS
from ...estimate.device_rates import DeviceRates, measure_device

# A link below this keeps any device waiting: PCIe 3 with 8 lanes.
_SLOW_LINK = 6e9

# A copy next to a computation takes a little of the same memory.
_OVERLAPS = 0.7

# The clock of the host includes launches, and what else the machine does.
_CLOCKS_AGREE = 0.5, 1.2


def device_checks(device: torch.device) -> list[Check]:
    """Measure an accelerator and return the findings."""
    rates = measure_device(device)
    return [_link(device, rates), _speed(device, rates), _streams(device, rates), _events(device, rates),
            _plan(device, rates, AcceleratorDevice(device).memory)]  # fmt: skip


def _link(device: torch.device, rates: DeviceRates) -> Check:
    up, down, both = (format_bytes(rate) for rate in (rates.up, rates.down, rates.both))
    pageable = f"{format_bytes(rates.pageable_up)}/s and {format_bytes(rates.pageable_down)}/s"
    found = f"{up}/s up, {down}/s down, {both}/s both at once; from and to memory that is not pinned {pageable}"
    slow = min(rates.up, rates.down) < _SLOW_LINK
    line = "Transfers are too slow to overlap with computing. Is the card in a slot with all lanes?" if slow else ""
    return Check(f"link of {device}", "warning" if slow else "ok", found, line)


def _speed(device: torch.device, rates: DeviceRates) -> Check:
    return Check(f"speed of {device}", "ok", f"{rates.flops / 1e12:.0f} TFLOP/s in bfloat16 matrix products")


def _streams(device: torch.device, rates: DeviceRates) -> Check:
    found = f"{rates.overlap:.0%} of a copy overlaps with a computation"
    if rates.overlap >= _OVERLAPS:
        return Check(f"streams of {device}", "ok", found)
    line = "Copies wait for kernels. Unset CUDA_LAUNCH_BLOCKING, and end what else uses the device."
    return Check(f"streams of {device}", "warning", found, line)


def _events(device: torch.device, rates: DeviceRates) -> Check:
    found = f"its clock shows {rates.clock:.2f} s in a second of the host"
    least, most = _CLOCKS_AGREE
    if least <= rates.clock <= most:
        return Check(f"events of {device}", "ok", found)
    return Check(f"events of {device}", "warning", found, "Plans are made from the device's clock: measure again.")


def _plan(device: torch.device, rates: DeviceRates, memory: int | None) -> Check:
    tokens = rates.tokens_to_hide_transfers()
    found = f"from {tokens:,.0f} tokens in a step on, a forward takes longer than the upload of its parameters"
    if memory is not None:  # parameters and gradients of 16 bits
        found += f"; models of up to {FOR_PARAMETERS * memory / 4e9:.1f} billion parameters of 16 bits stay there"
    return Check(f"plan for {device}", "ok", found)


# Result of one check of the doctor.


Status = Literal["ok", "warning", "fail"]


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """Result of one check of the installation."""

    name: str  # what was looked at
    status: Status  # `"ok"`; `"warning"`, something is missing or slow; `"fail"`, it does not work
    found: str  # the finding, in words
    remedy: str = ""  # what to do about it; empty where there is nothing to do
