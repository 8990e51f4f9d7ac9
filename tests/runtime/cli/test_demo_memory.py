"""What the demo says of memory: counted on devices, and refused by one that has too little."""

import copy

import pytest
import torch
from torch import nn

from roundpipe_runtime import DeviceMemoryError
from roundpipe_runtime.cli.demo import CountingDevice, measure_needs

WIDTH, LAYERS, ROWS = 64, 12, 6
MATRIX = WIDTH * WIDTH * 4  # bytes


@pytest.fixture(scope="module")
def needs():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    before = copy.deepcopy(model.state_dict())
    batches = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(2)]
    found = measure_needs(model, batches, nn.functional.mse_loss, LAYERS * MATRIX * 3 // 4, devices=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return found


def test_plain_training_holds_each_weight_four_times(needs):
    """The weight, its gradient, two averages of Adam; of activations there is little in this model."""
    assert needs.weights == LAYERS * MATRIX
    activations = (LAYERS + 6) * ROWS * WIDTH * 4
    assert 4 * needs.weights <= needs.plain <= 4 * needs.weights + activations + MATRIX


def test_a_device_that_has_no_room_for_the_weights_refuses_them(needs):
    """Nine of twelve matrices fit to the last byte; the tenth does not."""
    assert needs.refusal == (
        f"the device is out of memory: it uses {9 * MATRIX} of {9 * MATRIX} bytes, and {MATRIX} more were requested "
        "((64, 64), torch.float32)."
    )


def test_a_pipeline_keeps_the_limit_that_plain_training_does_not(needs):
    """Its stages hold a weight and its gradient each, with those of the next stage; and some of it is held."""
    assert 2 * MATRIX < needs.pipeline <= LAYERS * MATRIX * 3 // 4 < needs.weights < needs.plain


def test_what_is_computed_counts_for_the_limit_as_copies_do():
    """Two tensors of 4 kB on a device of 10 kB, and no third one; it makes room when one of them goes."""
    device = CountingDevice("virtual:0", 10_000)
    copied = device.copy_in(torch.ones(1000))
    with device.computing():
        for _ in range(3):
            computed = copied + 1
            del computed
        computed = copied + 1
        with pytest.raises(DeviceMemoryError, match=r"it uses 8000 of 10000 bytes, and 4000 more .*\(1000,\)"):
            computed + 1
    device.close()
