"""Devices for a module of tests, and a pipeline on them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from roundpipe_runtime import RoundPipe, VirtualDevice
from tests.runtime.small import checked_devices


@pytest.fixture(scope="module")
def devices() -> Iterator[list[VirtualDevice]]:
    """Two devices that check every access."""
    with checked_devices(2) as made:
        yield made


@pytest.fixture
def wrap(devices: list[VirtualDevice]) -> Callable[..., RoundPipe]:
    """Wraps a model for the devices; it takes the options of RoundPipe."""

    def wrap_model(model: nn.Module, *args: Any, **options: Any) -> RoundPipe:
        return RoundPipe(model, *args, **{"devices": devices, **options})

    return wrap_model
