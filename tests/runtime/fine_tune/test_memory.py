"""Memory in use, as the system and the accelerator tell it."""

import pytest
import torch

from roundpipe_runtime.fine_tune.records import device_peak, process_memory


def test_memory_that_is_taken_is_seen():
    """Within a tenth of what was taken."""
    before = process_memory()
    taken = torch.ones(2**25)
    grown = process_memory() - before
    assert grown == pytest.approx(taken.nbytes, rel=0.1)


def test_virtual_devices_have_no_memory_of_their_own():
    from roundpipe_runtime import parse_devices

    assert device_peak(parse_devices("virtual:2")) is None
    assert device_peak([]) is None
