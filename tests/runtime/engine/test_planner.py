"""Tests of roundpipe_runtime.engine.planner: what stays on a device from forward to backward."""

import types

import pytest
import torch
from torch import nn

from roundpipe_runtime.engine.planner import Planner


def devices(*kinds_and_memory):
    return [types.SimpleNamespace(torch_device=torch.device(kind), memory=memory) for kind, memory in kinds_and_memory]


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ([("cpu", None)], True),
        ([("cuda", 8000)], True),
        ([("cuda", 1000)], False),
        ([("cuda", None)], False),
        ([("cuda", 8000), ("cuda", None)], False),
        ([("cuda", 8000), ("cuda", 1000)], False),
    ],
)
def test_layers_stay_where_there_is_room_for_all(found, fits):
    """2,112 bytes of parameters and gradients in 60 %. An accelerator that cannot be asked has no room to count on."""
    assert Planner([nn.Linear(32, 8)], devices(*found)).fits() is fits


@pytest.mark.parametrize(("dtype", "fits"), [(torch.float32, True), (torch.float64, False)])
def test_sums_in_a_wider_dtype_need_room(dtype, fits):
    """2,112 bytes, and 2,112 more for sums in float64, in 60 % of 4,000."""
    planner = Planner([nn.Linear(32, 8)], devices(("cuda", 4000)), lambda parameter: dtype)
    assert planner.fits() is fits
