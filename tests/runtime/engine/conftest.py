"""What tests of the engine have in common."""

import pytest
from torch import nn

from roundpipe_runtime import RoundPipe
from tests.runtime.small import checked_devices


@pytest.fixture(scope="module")
def four():
    """Four devices that check every access, for all examples: a new set per example would start 4 threads each."""
    with checked_devices(4) as made:
        yield made


@pytest.fixture
def pipe():
    def make(*layers, devices="virtual:2:check", **options):
        is_model = len(layers) == 1 and isinstance(layers[0], nn.Sequential)
        return RoundPipe(layers[0] if is_model else nn.Sequential(*layers), devices=devices, **options)

    return make
