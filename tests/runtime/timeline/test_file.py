"""Timelines that were written, and read again."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_runtime import Record, Timeline
from roundpipe_runtime.timeline.record import KINDS, TimelineFileError, load_timeline

numbers = st.integers(-1, 500)
seconds = st.floats(0, 1e4, allow_nan=False).map(lambda value: round(value, 6))
records = st.builds(
    lambda stage, microbatch, device, kind, start, length, layer: Record(
        stage, microbatch, device, kind, start, start + length, layer
    ),
    numbers, numbers, st.sampled_from(["virtual:0", "cuda:1", "ü"]), st.sampled_from(KINDS), seconds, seconds, numbers,
)  # fmt: skip


@given(st.lists(records, min_size=1, max_size=20))
def test_what_was_saved_is_read(tmp_path_factory, given_records):
    path = tmp_path_factory.mktemp("timeline") / "run.json"
    timeline = Timeline()
    timeline.records = given_records
    timeline.save(path)
    first = min(record.start for record in given_records)
    for one, other in zip(given_records, load_timeline(path).records, strict=True):
        assert (one.stage, one.microbatch, one.device, one.kind, one.layer) == (
            other.stage, other.microbatch, other.device, other.kind, other.layer,
        )  # fmt: skip
        assert other.start == pytest.approx(one.start - first, abs=1e-6)
        assert other.end == pytest.approx(one.end - first, abs=1e-6)


RECORD = {
    "ph": "X", "name": "forward s0 m0", "cat": "forward", "pid": 0, "tid": 0, "ts": 0.0, "dur": 1.0,
    "args": {"stage": 0, "microbatch": 0, "layer": 0},
}  # fmt: skip
ROW = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "virtual:0"}}


def written(tmp_path, content):
    path = tmp_path / "run.json"
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is empty"),
        ('{"traceEvents": [', "it is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[1, 2]", "Expected `object`, got `array`"),
        (b"\x89PNG\r\n\x1a\n\xff", "run.json is not a timeline file"),
        ("a log of a training\n", "run.json is not a timeline file. To write one: roundpipe train"),
        ({"weights": []}, "but not a trace"),
        ({"traceEvents": {}}, "but not a trace"),
        ({"traceEvents": []}, "no record"),
        ({"traceEvents": [ROW]}, "no record"),
        ({"traceEvents": [RECORD]}, "event 0 is not a record"),
        ({"traceEvents": [ROW, 5]}, "event 1 is not a record"),
        ({"traceEvents": [ROW, {**RECORD, "ph": "B"}]}, "trace of another program"),
        ({"traceEvents": [ROW, {**RECORD, "cat": "cpu_op"}]}, "trace of another program"),
        ({"traceEvents": [ROW, {**RECORD, "cat": ["forward"]}]}, "trace of another program"),
        ({"traceEvents": [ROW, {**RECORD, "tid": [0]}]}, "trace of another program"),
        ({"traceEvents": [ROW, {**RECORD, "args": {"stage": "0"}}]}, "trace of another program"),
        ({"traceEvents": [ROW, {**RECORD, "ts": "0"}]}, "has no time"),
        ({"traceEvents": [ROW, {**RECORD, "ts": 10**400}]}, "has no time"),
        ({"traceEvents": [ROW, {**RECORD, "dur": -1}]}, "has no time"),
        ({"traceEvents": [ROW, {**RECORD, "dur": float("nan")}]}, "NaN is not a finite number"),
    ],
)
def test_files_of_something_else_are_refused(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(TimelineFileError, match=message) as caught:
        load_timeline(path)
    assert str(path) in str(caught.value)


def test_a_whole_file_is_read(tmp_path):
    (record,) = load_timeline(written(tmp_path, {"traceEvents": [ROW, RECORD]})).records
    assert record == Record(0, 0, "virtual:0", "forward", 0.0, 1e-6, 0)


@given(st.data())
def test_a_file_that_was_cut_short_is_refused_wherever_it_ends(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("timeline") / "run.json"
    timeline = Timeline()
    timeline.records = [Record(n, 0, "a", "forward", n, n + 1.0) for n in range(3)]
    timeline.save(path)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(TimelineFileError):
        load_timeline(path)
