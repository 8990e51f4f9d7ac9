"""What devices waited for."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import Record, RoundPipe, RoundPipeRunConfig, Timeline
from roundpipe_runtime.timeline.bubbles import bubbles_of, device_totals


def causes(records):
    return [(bubble.device, bubble.cause, bubble.start, bubble.end) for bubble in bubbles_of(records)]


def test_each_gap_has_the_cause_that_ended_it():
    """Until the input is there; then copies; then the host; at last the other device's work."""
    records = [
        Record(0, 0, "a", "forward", 0.0, 2.0, 0),
        Record(0, 1, "a", "forward", 2.5, 4.0, 0),
        Record(1, -1, "b", "upload", 1.0, 3.0, 1),
        Record(1, 0, "b", "loss", 3.5, 4.5),
        Record(1, 1, "b", "loss", 4.5, 6.0),
        Record(1, -1, "b", "download", 6.0, 7.0, 1),
    ]
    assert causes(records) == [
        ("a", "interpreter", 2.0, 2.5),
        ("a", "dependency", 4.0, 7.0),
        ("b", "dependency", 0.0, 2.0),
        ("b", "transfer", 2.0, 3.0),
        ("b", "interpreter", 3.0, 3.5),
        ("b", "transfer", 6.0, 7.0),
    ]


def test_between_two_runs_is_the_optimizer():
    """Also where a run has one stage, and where copies of a later stage come before anything is computed."""
    one = [Record(0, 0, "a", "forward", 0.0, 1.0, 0), Record(0, 0, "a", "backward", 1.0, 2.0, 0)]
    two = [Record(0, 0, "a", "forward", 5.0, 6.0, 0)]
    assert causes([*one, *two]) == [("a", "optimizer", 2.0, 5.0)]
    early = [Record(1, -1, "b", "upload", 0.0, 0.5, 1), Record(0, 0, "a", "forward", 0.5, 1.0, 0)]
    assert [cause for _, cause, *_ in causes(early)] == ["interpreter", "transfer", "dependency"]


def test_a_download_of_the_first_stage_begins_no_run():
    """It may come when a later stage has computed, and nothing else is under way."""
    records = [
        Record(0, 0, "a", "forward", 0.0, 1.0, 0),
        Record(1, 0, "b", "loss", 1.0, 2.0),
        Record(0, -1, "a", "download", 2.5, 3.0, 0),
    ]
    assert "optimizer" not in {cause for _, cause, *_ in causes(records)}


def test_ranks_have_runs_of_their_own():
    """A rank that begins later waits for nothing of the other one."""
    records = [
        Record(0, 0, "rank 0 a", "forward", 0.0, 2.0),
        Record(0, 0, "rank 1 a", "forward", 1.0, 2.0),
    ]
    assert causes(records) == [("rank 1 a", "optimizer", 0.0, 1.0)]


def test_nothing_was_recorded():
    assert bubbles_of([]) == []


def test_bubbles_of_a_real_run_are_all_that_is_not_computed():
    """Two steps on two devices: each second of a device is computed or has one cause."""
    layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)
    model = RoundPipe(layers, devices="virtual:2", model_run_config=config)
    with Timeline() as timeline:
        for _ in range(2):
            model.forward_backward((torch.ones(6, 16),), label=torch.ones(6, 16), loss_fn=nn.functional.mse_loss)
    model.close()
    found = bubbles_of(timeline.records)
    assert len({(b.start, b.end) for b in found if b.cause == "optimizer"}) == 1
    for totals in device_totals(timeline.records):
        waited = sum(bubble.end - bubble.start for bubble in found if bubble.device == totals.device)
        assert waited == pytest.approx(totals.transfers + totals.idle)
