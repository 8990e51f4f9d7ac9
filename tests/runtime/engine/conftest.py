"""What tests of the engine have in common."""

import pytest
from torch import nn

from roundpipe_runtime import RoundPipe


@pytest.fixture
def pipe():
    def make(*layers, devices="virtual:2:check", **options):
        is_model = len(layers) == 1 and isinstance(layers[0], nn.Sequential)
        return RoundPipe(layers[0] if is_model else nn.Sequential(*layers), devices=devices, **options)

    return make
