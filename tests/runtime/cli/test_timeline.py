"""``roundpipe timeline`` as a user meets it."""

import json
import time

import pytest
import torch
from torch import nn

from roundpipe_runtime import Record, RoundPipe, RoundPipeRunConfig, Timeline, parse_devices
from roundpipe_runtime.cli.app import run

NAMES = [device.name for device in parse_devices("virtual:2")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("timeline") / "run.json"
    layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)
    model = RoundPipe(layers, devices="virtual:2", model_run_config=config)
    with Timeline() as timeline:
        model.forward_backward((torch.ones(6, 16),), label=torch.ones(6, 16), loss_fn=nn.functional.mse_loss)
    model.close()
    timeline.save(path)
    return path


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_it_is_drawn_in_the_width_of_the_terminal(recorded, capsys, monkeypatch, columns):
    """A row per device, totals and the slowest stages, without colours in a log; shares of the JSON add up."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["timeline", str(recorded)]) == 0
    out = capsys.readouterr().out
    drawn = [line for line in out.splitlines() if line.startswith(tuple(NAMES)) and "%" not in line]
    assert [line.split()[0] for line in drawn] == NAMES
    assert max(map(len, drawn)) <= columns
    assert max(map(len, out.splitlines())) <= 80 or columns > 80
    assert "\x1b" not in out
    assert "slowest" in out
    assert run(["timeline", str(recorded), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [totals["device"] for totals in found["devices"]] == NAMES
    for totals in found["devices"]:
        assert totals["busy"] + totals["transfers"] + totals["idle"] == pytest.approx(found["seconds"])
    times = [stage["seconds"] for stage in found["stages"]]
    assert times == sorted(times, reverse=True)


def test_totals_are_those_of_the_records(tmp_path, capsys):
    timeline = Timeline()
    timeline.records = [
        Record(0, 0, "a", "forward", 0.0, 1.0, 0),
        Record(1, 0, "a", "backward", 1.0, 3.0, 0),
        Record(1, -1, "a", "download", 3.0, 4.0, 0),
    ]
    timeline.save(tmp_path / "run.json")
    assert run(["timeline", str(tmp_path / "run.json"), "--stages", "1"]) == 0
    out = capsys.readouterr().out
    totals = next(line for line in out.splitlines() if "%" in line)
    assert totals.split() == ["a", "3", "s", "75", "%", "1", "s", "25", "%", "0", "ms", "0", "%"]
    assert "The slowest of 2 stages" in out
    assert out.splitlines()[-1].split() == ["1", "a", "0", "2", "s", "1", "s", "backward"]


def test_files_that_are_no_timeline_are_one_line_and_2(tmp_path, refused):
    contents = {"empty": "", "damaged": '{"traceEvents"', "foreign": "[]", "trace": '{"traceEvents": [{}]}'}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    for name in (*contents, "missing", "."):
        assert refused("timeline", str(tmp_path / name)).out == ""


def of_rank(path, started, end):
    """A file with one record of a device, and the time of day at which it started."""
    timeline = Timeline()
    timeline.records = [Record(0, 0, "cuda:0", "forward", 5.0, 5.0 + end, 0)]
    content = timeline.to_chrome_trace()
    if started is not None:
        content["otherData"] = {"started": started}
    path.write_text(json.dumps(content))
    return str(path)


def test_timelines_of_ranks_are_one(tmp_path, capsys):
    """A row per rank and device, aligned by the time of day: the second rank began 2 s later, and ran 3 s."""
    files = [of_rank(tmp_path / "a.json", 1000.0, 1.0), of_rank(tmp_path / "b.json", 1002.0, 3.0)]
    assert run(["timeline", *files]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank ")]
    assert [row.split()[:3] for row in rows[:2]] == [["rank", "0", "cuda:0"], ["rank", "1", "cuda:0"]]
    assert run(["timeline", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] == pytest.approx(5.0)
    assert [(totals["device"], totals["busy"]) for totals in found["devices"]] == [
        ("rank 0 cuda:0", pytest.approx(1.0)),
        ("rank 1 cuda:0", pytest.approx(3.0)),
    ]
    files[0] = of_rank(tmp_path / "a.json", None, 1.0)  # of an earlier version: all begin together
    assert run(["timeline", *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(3.0)


def test_a_saved_timeline_has_its_time_of_day(tmp_path):
    now = time.time()
    with Timeline() as timeline:
        start = time.perf_counter() - 10
        timeline.records = [Record(0, 0, "a", "forward", start, start + 1, 0)]
    assert timeline.to_chrome_trace()["otherData"]["started"] == pytest.approx(now - 10, abs=1)


def test_bytes_of_experts_that_were_not_uploaded_are_stated(tmp_path, capsys):
    """Of two files with 30 and 20 MB uploaded, and 40 and 10 not; as JSON, and in words."""
    paths = []
    for rank, sizes in enumerate([(30_000_000, 40_000_000), (20_000_000, 10_000_000)]):
        with Timeline() as timeline:
            timeline.add("forward", 0, 0, "virtual:0", 0.0, 1.0, 0)
            timeline.add_parameters(*sizes)
        paths.append(str(tmp_path / f"{rank}.json"))
        timeline.save(paths[-1])
    assert run(["timeline", *paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == {"uploaded": 50_000_000, "skipped": 50_000_000}
    assert run(["timeline", *paths]) == 0
    assert "parameters uploaded: 50 MB of 100 MB, 50 %" in capsys.readouterr().out
