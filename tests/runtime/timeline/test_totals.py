"""What a timeline comes to."""

from roundpipe_runtime import Record
from roundpipe_runtime.timeline.record import device_totals, stage_totals


def test_every_second_of_a_device_is_one_of_three():
    records = [
        Record(0, -1, "a", "upload", 0.0, 2.0, 0),
        Record(0, 0, "a", "forward", 1.0, 4.0, 0),
        Record(0, -1, "a", "download", 4.0, 5.0, 0),
        Record(1, 0, "b", "backward", 8.0, 10.0, 1),
    ]
    a, b = device_totals(records)
    assert (a.device, a.busy, a.transfers, a.idle) == ("a", 3.0, 2.0, 5.0)
    assert (b.device, b.busy, b.transfers, b.idle) == ("b", 2.0, 0.0, 8.0)


def test_work_that_overlaps_counts_once():
    (totals,) = device_totals([Record(0, 0, "a", "forward", 0.0, 3.0), Record(0, 0, "a", "loss", 1.0, 2.0)])
    assert totals.busy == 3.0


def test_stages_are_listed_slowest_first():
    records = [
        Record(0, -1, "a", "upload", 0.0, 9.0, 0),
        Record(0, 0, "a", "forward", 9.0, 10.0, 0),
        Record(1, 0, "b", "recompute", 10.0, 11.0, 1),
        Record(1, 0, "b", "recompute", 11.0, 12.0, 2),
        Record(1, 0, "b", "backward", 12.0, 15.0, 2),
    ]
    slow, quick = stage_totals(records)
    assert (slow.stage, slow.device, slow.seconds, slow.layers) == (1, "b", 5.0, (1, 2))
    assert slow.kinds == ("recompute", "backward")
    assert (quick.stage, quick.seconds, quick.copies) == (0, 1.0, 9.0)


def test_nothing_comes_to_nothing():
    assert device_totals([]) == stage_totals([]) == []
