"""A plugin of pytest for tests on the reference accelerator: ``pytest -p tests.accelerator.plugin tests/runtime``.

Where a test asks for ``"virtual:N"`` it gets ``late:0`` to ``late:N-1``, and so do fixtures with devices that check.
With ``LATE_DEVICES`` set there are so many devices, and a test that asks for several gets all of them.
``--order random --seed 7`` draws the order of the work; without it everything is done as late as it may.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

# Each test compares bits, and a kernel that is split over threads adds in another order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from roundpipe_runtime.device import accelerator
from roundpipe_runtime.device.accelerator import AcceleratorDevice
from roundpipe_runtime.device.protocol import Device
from roundpipe_runtime.estimate.hardware import measure_device
from tests.accelerator import late
from tests.accelerator.exceptions import reason_to_skip
from tests.runtime import small

# A number that the caller chose holds for tests that ask for several devices.
_ALL_DEVICES = "LATE_DEVICES" in os.environ


def _late(count: int) -> list[AcceleratorDevice]:
    count = late.DEVICES if _ALL_DEVICES and count > 1 else count
    return [AcceleratorDevice(torch.device("late", number)) for number in range(count)]


def _on_late(text: str) -> list[Device]:
    """In the place of ``accelerator._virtual``, which parses ``"virtual:N"``."""
    return [*_late(len(_virtual(text)))]


@contextlib.contextmanager
def _late_devices(count: int) -> Iterator[list[AcceleratorDevice]]:
    """In the place of ``small.checked_devices``."""
    made = _late(count)
    try:
        yield made
    finally:
        for device in made:
            device.close()


_virtual, accelerator._virtual = accelerator._virtual, _on_late
small.checked_devices = _late_devices

# What the doctor measures takes a second on a device, and minutes where its kernels are those of the CPU.
measure_device.__kwdefaults__.update(nbytes=2**20, rows=128)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reference accelerator")
    group.addoption("--order", choices=["late", "random", "eager"], default="late", help="when work is done")
    group.addoption("--seed", type=int, default=0, help="seed of a random order")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := reason_to_skip(item, late.DEVICES if _ALL_DEVICES else None):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _order(request: pytest.FixtureRequest) -> Iterator[None]:
    late.set_order(request.config.getoption("--order"), request.config.getoption("--seed"))
    yield
    for number in range(late.DEVICES):
        torch.accelerator.synchronize(number)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End without the destructors: a thread of autograd for a device may abort a process that ends after a backward."""
    status = getattr(config, "late_status", None)
    if status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.late_status = int(exitstatus)
