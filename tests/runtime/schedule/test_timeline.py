"""Timelines: recorded, drawn, added up, and written to files."""

import dataclasses
import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from roundpipe_runtime import ModelExecutePlan, Record, RoundPipe, RoundPipeRunConfig, Timeline
from roundpipe_runtime.schedule import timeline as module
from roundpipe_runtime.schedule.timeline import TimelineFileError, device_totals, draw_on, merge_timelines, stage_totals
from tests.runtime.small import batch, small_model
from yobx_flatten.core.terminal.command_line import console

PLAN = ModelExecutePlan([range(4)], [range(4, 7), range(4)])


def timeline_of(*records: Record) -> Timeline:
    timeline = Timeline()
    timeline.records = list(records)
    return timeline


def test_the_drawing_has_a_row_per_device_and_the_trace_is_what_a_viewer_reads(tmp_path):
    timeline = timeline_of(
        Record(0, -1, "a", "upload", 0.0, 0.2),
        Record(0, 0, "a", "forward", 0.2, 0.6),
        Record(1, 0, "bb", "backward", 0.5, 1.0),
    )
    assert timeline.draw(10).splitlines() == ["a  |uuFFFF....|", "bb |.....BBBBB|  1000.0 ms"]
    assert Timeline().draw() == "nothing was recorded"
    timeline_of(Record(2, 1, "virtual:0", "forward", 5.0, 5.5, 3)).save(tmp_path / "trace.json")
    names, event = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert names["args"] == {"name": "virtual:0"}
    assert (event["ph"], event["name"], event["ts"], event["dur"]) == ("X", "forward s2 m1", 0.0, 500_000.0)
    assert event["args"] == {"stage": 2, "microbatch": 1, "layer": 3}


def test_every_layer_call_of_the_block_is_recorded_and_none_overlaps():
    """7 layers forward, 4 again, 7 backward, a loss. Each device has one thread, an accelerator copies meanwhile."""
    pipe = RoundPipe(small_model(), devices="virtual:2")
    inputs, labels = batch(6)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=PLAN, loss_reduction="mean")
    with Timeline() as timeline:
        pipe.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=config)
    pipe.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=config)
    with Timeline() as of_forward, torch.no_grad():
        pipe(inputs)
    assert {r.kind for r in of_forward.records} == {"upload", "forward", "download"}
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


numbers = st.integers(-1, 500)
seconds = st.floats(0, 1e4, allow_nan=False).map(lambda value: round(value, 6))
devices, kinds = st.sampled_from(["virtual:0", "cuda:1", "ü"]), st.sampled_from(module.KINDS)
records = st.builds(Record, numbers, numbers, devices, kinds, seconds, seconds, numbers).map(
    lambda record: dataclasses.replace(record, end=record.start + record.end)
)


@given(st.lists(records, min_size=1, max_size=20))
def test_what_was_saved_is_read(tmp_path_factory, given_records):
    path = tmp_path_factory.mktemp("timeline") / "run.json"
    timeline_of(*given_records).save(path)
    first = min(record.start for record in given_records)
    for one, other in zip(given_records, merge_timelines([path]).records, strict=True):
        assert dataclasses.replace(one, start=other.start, end=other.end) == other
        assert (other.start, other.end) == pytest.approx((one.start - first, one.end - first), abs=1e-6)


RECORD = {
    "ph": "X", "name": "forward s0 m0", "cat": "forward", "pid": 0, "tid": 0, "ts": 0.0, "dur": 1.0,
    "args": {"stage": 0, "microbatch": 0, "layer": 0},
}  # fmt: skip
ROW = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "virtual:0"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is empty"),
        ('{"traceEvents": [', "it is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[1, 2]", "Expected `object`, got `array`"),
        (b"\x89PNG\r\n\x1a\n\xff", "run.json is not a timeline file"),
        ("a log of a training\n", "run.json is not a timeline file. To write one: roundpipe train"),
        ({"traceEvents": {}}, "no list of events"),
        ({"traceEvents": [ROW]}, "no record"),
        ({"traceEvents": [RECORD]}, "event 0 was not written by"),
        ({"traceEvents": [ROW, 5]}, "event 1 was not written by"),
        *(
            ({"traceEvents": [ROW, {**RECORD, **change}]}, "another program write the trace")
            for change in ({"ph": "B"}, {"cat": "cpu_op"}, {"cat": []}, {"tid": [0]}, {"args": {"stage": "0"}})
        ),
        ({"traceEvents": [ROW, {**RECORD, "ts": "0"}]}, "has no valid start"),
        ({"traceEvents": [ROW, {**RECORD, "ts": 10**400}]}, "has no valid start"),
        ({"traceEvents": [ROW, {**RECORD, "dur": -1}]}, "has no valid start"),
        ({"traceEvents": [ROW, {**RECORD, "dur": float("nan")}]}, "NaN is not a finite number"),
    ],
)
def test_files_of_something_else_are_refused(tmp_path, content, message):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"traceEvents": [ROW, RECORD]}))
    (record,) = merge_timelines([path]).records
    assert record == Record(0, 0, "virtual:0", "forward", 0.0, 1e-6, 0)
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TimelineFileError, match=message) as caught:
        merge_timelines([path])
    assert str(path) in str(caught.value)


@given(st.data())
def test_a_file_that_was_cut_short_is_refused_wherever_it_ends(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("timeline") / "run.json"
    timeline_of(*[Record(n, 0, "a", "forward", n, n + 1.0) for n in range(3)]).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(TimelineFileError):
        merge_timelines([path])


def test_the_drawing_has_a_legend_of_what_it_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    draw_on(console(), timeline_of(Record(0, 0, "a", "forward", 0.0, 0.5), Record(1, 0, "b", "loss", 0.5, 1.0)))
    first, second, axis, legend = capsys.readouterr().out.splitlines()
    assert (first, second) == ("a " + "F" * 18 + "." * 18, "b " + "." * 18 + "L" * 18)
    assert axis.split() == ["0", "1000.0", "ms"]
    assert legend.split() == ["F", "forward", "L", "loss", ".", "waiting"]
    for columns in (40, 80, 200):  # no line is wider than the terminal
        monkeypatch.setenv("COLUMNS", str(columns))
        draw_on(console(), timeline_of(*[Record(0, 0, f"cuda:{n}", "forward", n, n + 1.0) for n in range(8)]))
        assert max(map(len, capsys.readouterr().out.splitlines())) <= min(columns, 120)


def test_every_second_of_a_device_is_one_of_three_and_stages_are_listed_slowest_first():
    records = [
        Record(0, -1, "a", "upload", 0.0, 2.0, 0),
        Record(0, 0, "a", "forward", 1.0, 4.0, 0),
        Record(0, -1, "a", "download", 4.0, 5.0, 0),
        Record(1, 0, "b", "backward", 8.0, 10.0, 1),
    ]
    a, b = device_totals(records)
    assert (a.device, a.busy, a.transfers, a.idle) == ("a", 3.0, 2.0, 5.0)
    assert (b.device, b.busy, b.transfers, b.idle) == ("b", 2.0, 0.0, 8.0)
    (overlapping,) = device_totals([Record(0, 0, "a", "forward", 0.0, 3.0), Record(0, 0, "a", "loss", 1.0, 2.0)])
    assert overlapping.busy == 3.0
    assert device_totals([]) == stage_totals([]) == []
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
