"""Experts that are uploaded when a token was routed to them: the bits of a virtual device, in any order of the work."""

import pytest
import torch

from roundpipe_runtime import VirtualDevice
from roundpipe_runtime.engine.parameters import partial_table
from tests.accelerator import late
from tests.runtime.engine.test_routed import BATCHES, KINDS, gradients, model_of, pipe_of, squares


def results(kind, devices, experts):
    """Losses of some runs, gradients that add up over them, and the bytes that were not uploaded."""
    model = model_of(kind)
    pipe = pipe_of(model, devices, experts)
    losses = [
        pipe.forward_backward((x,), label=torch.ones(len(x), 3), loss_fn=squares).item()
        for x in (*BATCHES, *BATCHES[:3])
    ]
    skipped = pipe.parameter_traffic.skipped
    pipe.close()
    return losses, gradients(model), skipped


@pytest.mark.parametrize("order", [("late", 0), ("random", 1), ("random", 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_they_have_the_bits_of_a_virtual_device(kind, order, monkeypatch):
    monkeypatch.setattr(partial_table, "LEAST_BYTES", 0)
    late.set_order(*order)
    ours = results(kind, ["late:0", "late:1"], "routed")
    theirs = results(kind, [VirtualDevice("here")], "all")
    assert ours[0] == theirs[0]
    assert ours[2] > 0 == theirs[2]
    for name, value in theirs[1].items():
        assert (value is None) == (ours[1][name] is None), name
        assert value is None or torch.equal(value, ours[1][name]), name
