"""The timeline: what a run records, and how it is drawn and written."""

import itertools
import json

import torch
from torch import nn

from roundpipe_runtime import ModelExecutePlan, Record, RoundPipe, RoundPipeRunConfig, Timeline
from tests.runtime.small import batch, small_model

PLAN = ModelExecutePlan([range(4)], [range(4, 7), range(4)])


def test_every_layer_call_of_the_block_is_recorded_and_none_overlaps():
    """Three stages, three microbatches: 7 layers forward, 4 again, 7 backward, and the loss; the next run is not.

    Each device has one thread. An accelerator copies meanwhile.
    """
    pipe = RoundPipe(small_model(), devices="virtual:2")
    inputs, labels = batch(6)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=PLAN, loss_reduction="mean")
    with Timeline() as timeline:
        pipe.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=config)
    pipe.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=config)
    pipe.close()
    records, names = timeline.records, [device.name for device in pipe.devices]
    count = {kind: sum(r.kind == kind for r in records) for kind in ("forward", "recompute", "backward", "loss")}
    assert count == {"forward": 21, "recompute": 12, "backward": 21 + 3, "loss": 3}
    assert {(r.stage, r.device) for r in records} == {(stage, names[stage % len(names)]) for stage in range(3)}
    for device in names[:3]:
        own = sorted((r for r in records if r.device == device), key=lambda r: r.start)
        if not device.startswith("virtual"):
            own = [r for r in own if r.kind not in ("upload", "download")]
        assert own
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))


def test_the_drawing_has_a_row_per_device():
    timeline = Timeline()
    timeline.records = [
        Record(0, -1, "a", "upload", 0.0, 0.2),
        Record(0, 0, "a", "forward", 0.2, 0.6),
        Record(1, 0, "bb", "backward", 0.5, 1.0),
    ]
    assert timeline.draw(10).splitlines() == ["a  |uuFFFF....|", "bb |.....BBBBB|  1000.0 ms"]
    assert Timeline().draw() == "nothing was recorded"


def test_the_trace_is_what_a_viewer_reads(tmp_path):
    timeline = Timeline()
    timeline.records = [Record(2, 1, "virtual:0", "forward", 5.0, 5.5, 3)]
    timeline.save(tmp_path / "trace.json")
    names, event = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert names["args"] == {"name": "virtual:0"}
    assert (event["ph"], event["name"], event["ts"], event["dur"]) == ("X", "forward s2 m1", 0.0, 500_000.0)
    assert event["args"] == {"stage": 2, "microbatch": 1, "layer": 3}


def test_forward_alone_is_recorded_too():
    pipe = RoundPipe(small_model(), devices="virtual:1")
    with Timeline() as timeline, torch.no_grad():
        pipe(batch(4)[0])
    assert {r.kind for r in timeline.records} == {"upload", "forward", "download"}
