"""Devices for a module of tests, and a pipeline on them."""

import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from roundpipe_runtime import RoundPipe, VirtualDevice
from roundpipe_runtime.device import disk
from tests.runtime.small import checked_devices


@pytest.fixture(scope="module")
def devices() -> Iterator[list[VirtualDevice]]:
    with checked_devices(2) as made:
        yield made


@pytest.fixture
def wrap(devices: list[VirtualDevice]) -> Callable[..., RoundPipe]:
    def wrap_model(model: nn.Module, *args: Any, **options: Any) -> RoundPipe:
        return RoundPipe(model, *args, **{"devices": devices, **options})

    return wrap_model


@pytest.fixture
def folder_on_disk(tmp_path: pathlib.Path) -> pathlib.Path:
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("state on a disk needs Linux")
    if disk._file_system(tmp_path) in disk._OF_MEMORY:
        pytest.skip("the temporary folder is in memory: --basetemp names one on a disk")
    made = tmp_path / "disk"
    made.mkdir()
    return made
