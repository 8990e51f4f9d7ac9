"""The day of a GPU in small: every part runs, keeps what it found, and shows the plan next to what was measured."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import gpu_day
from benchmarks.gpu import page, wheels
from benchmarks.gpu.measure import copied_bytes
from benchmarks.gpu.programs import PROGRAMS
from benchmarks.gpu.records import Records
from benchmarks.gpu.rows import ALL, OURS, ROWS, rows_of
from tests import fresh_process
from tests.accelerator.build import reason_not_to_build
from tests.cases import cases

ROOT = Path(__file__).parent.parent


def forked(command, *, timeout, **options):
    """In the place of ``subprocess.run``: a fork of a process that has imported transformers."""
    options = {name: options[name] for name in ("env", "cwd")}
    return fresh_process.run(*command[1:], imported=fresh_process.TRAINER, **options)


@pytest.fixture
def day(tmp_path, monkeypatch):
    """Runs the command in this process, on a virtual device and tiny models, and returns its status."""
    pytest.importorskip("peft")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(gpu_day.subprocess, "run", forked)

    def run(*arguments):
        options = ("--shapes", "tiny", "--device", "cpu", "--out", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["gpu_day.py", *map(str, arguments), *options])
        return gpu_day.main()

    run.records = Records(tmp_path)
    return run


@pytest.mark.slow  # each program is a process of its own
@pytest.mark.parametrize("part", cases(["1.7B", "8B", "lora", "long"], quick=["1.7B"]))
def test_a_part_measures_every_program_of_its_rows(day, part, capfd):
    """Losses agree, the plan is written before the row, and the same line again runs nothing."""
    assert day("profile", part) == 0
    found = day.records.of("row")
    for row in rows_of(part, tiny=True):
        here = {one["program"]: one for one in found.values() if one["row"] == row.name}
        assert tuple(here) == row.programs
        ours = {name: one for name, one in here.items() if name in OURS and "missing" not in one}
        assert all(len(one["seconds"]) == 3 and one["tokens per second"] > 0 for one in ours.values())
        if row.few_bits:
            continue
        right = here.get("PyTorch, resident", here[OURS[0]])["losses"]
        assert ours[OURS[0]]["losses"] == pytest.approx(right, rel=2e-3)
        assert all(one["losses"][0] == pytest.approx(right[0], rel=2e-3) for one in ours.values())
        shown = page.row_lines(row.name, {"plan": day.records.of("plan"), "row": found})
        line = next(line for line in shown if line.split("  ")[1] == OURS[0])
        assert f"({page._seconds(day.records.of('plan')[row.name]['seconds'][OURS[0]])})" in line
    lines = [json.loads(line) for line in day.records.path.read_text(encoding="utf-8").splitlines()]
    order = [(line["kind"], line.get("row", line["key"])) for line in lines if line["kind"] != "profile"]
    assert all(order.index(("plan", name)) < place for place, (kind, name) in enumerate(order) if kind == "row")
    finished = [one for one in found.values() if "missing" not in one]
    assert day(part) == 0
    assert [one for one in day.records.of("row").values() if "missing" not in one] == finished
    assert "bitsandbytes" in capfd.readouterr().out or part != "lora"


def test_time_that_is_over_ends_the_call_before_the_next_program(day, capfd):
    """With a status of its own, and the line that goes on."""
    assert day("profile", "1.7B", "--minutes", "0") == gpu_day.UNFINISHED
    assert not day.records.of("row")
    assert "the same line again goes on" in capfd.readouterr().out


@pytest.mark.parametrize("printed", ['{"losses": [1.0], "seconds": [2.0], "tokens per second": 5.0}\n', ""])
def test_a_program_that_is_ended_keeps_what_it_printed(tmp_path, monkeypatch, printed):
    """And one that printed nothing has no result, unless it had the time that everyone has."""

    def ended(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout, printed.encode(), b"")

    monkeypatch.setattr(gpu_day.subprocess, "run", ended)
    made = gpu_day.Day("cpu", Records(tmp_path), None, tiny=True, minutes=9)
    row = rows_of("1.7B", tiny=True)[0]
    found = made._apart(OURS[0], row, 30.0)
    assert found == (json.loads(printed) if printed else None)
    whole = made._apart(OURS[0], row, gpu_day.PROGRAM_SECONDS)
    assert ("error" in whole) == (not printed)


def test_a_damaged_last_line_is_no_result(tmp_path):
    """The machine went away while it was written."""
    records = Records(tmp_path)
    records.add("row", "a", {"x": 1})
    with records.path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "row", "key": "b", "x"')
    assert list(records.of("row")) == ["a"]


def test_other_losses_are_named(tmp_path):
    """The first one of everyone; those after it where no step is late."""
    records = Records(tmp_path)
    made = gpu_day.Day("cpu", records, None, tiny=True, minutes=9)
    row = ROWS[0]
    records.add("row", "first", {"row": row.name, "program": OURS[0], "losses": [2.0, 1.0, 0.5]})
    assert not made._disagreement(row, {"program": "FSDP2, CPU offload", "losses": [2.01, 1.0, 0.5]})
    assert made._disagreement(row, {"program": "FSDP2, CPU offload", "losses": [2.0, 1.0, 0.6]})
    assert made._disagreement(row, {"program": "FSDP2, CPU offload", "losses": [float("nan")]})
    assert not made._disagreement(row, {"program": OURS[2], "losses": [2.0, 2.0, 1.0]})
    assert made._disagreement(row, {"program": OURS[2], "losses": [2.1, 2.0, 1.0]})


@pytest.mark.slow
@pytest.mark.skipif(reason_not_to_build() is not None, reason=str(reason_not_to_build()))
def test_bytes_of_the_link_are_counted_on_an_accelerator():
    """Weights come to the device twice in a step, and gradients of float32 go back: 2 + 2 up and 4 down of a weight.

    Activations between stages come on top: in the small shape they are more than the weights.
    """
    row = rows_of("1.7B", tiny=True)[0]
    command = ("-m", "benchmarks.gpu.measure", row.name, OURS[0], "--device", "late:0", "--seconds", "250")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = fresh_process.run(*command, env=environment, imported=fresh_process.TRAINER)
    found = json.loads(done.stdout.splitlines()[-1])
    weights = found["parameters"]
    assert found["device peak"] > 0
    assert found["link bytes"]["up"] >= 4 * weights
    assert found["link bytes"]["down"] >= 4 * weights


def test_copies_of_a_profile_are_added_up():
    """As the profiler of torch writes them for CUDA; other events do not count."""
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 100}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 5}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 40}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 7}},
        {"cat": "kernel", "name": "copy HtoD"},
        {"name": "process_name", "args": {}},
    ]
    assert copied_bytes(events) == {"up": 105, "down": 40}


# -- wheels ------------------------------------------------------------------------------------------------------------


def test_wheels_are_unpacked_without_pip(tmp_path, monkeypatch):
    """Once, with what belongs into the folder of pure Python; a group without wheels adds no folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    with zipfile.ZipFile(tmp_path / "base" / "thing-1-py3-none-any.whl", "w") as archive:
        archive.writestr("thing/__init__.py", "x = 1")
        archive.writestr("thing-1.data/purelib/other.py", "y = 2")
    (found,) = wheels.unpacked(tmp_path, "base")
    assert (Path(found) / "thing" / "__init__.py").read_text() == "x = 1"
    assert (Path(found) / "other.py").read_text() == "y = 2"
    assert wheels.unpacked(tmp_path, "base") == [found]
    assert wheels.unpacked(tmp_path, "torchao") == wheels.unpacked(None, "base") == []


def test_libraries_of_other_platforms_are_left_out(tmp_path):
    """Of a wheel with kernels for many, those for one CUDA and the CPU stay."""
    wheel = tmp_path / "kernels.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("b/libbitsandbytes_cuda130.so", "b/libbitsandbytes_cuda118.so", "b/nn.py"):
            archive.writestr(name, name)
    wheels._cut_down(wheel)
    assert zipfile.ZipFile(wheel).namelist() == ["b/libbitsandbytes_cuda130.so", "b/nn.py"]


# -- the page ----------------------------------------------------------------------------------------------------------


def stored():
    return json.loads(page.DATA.read_text(encoding="utf-8")) if page.DATA.exists() else {}


def test_the_page_and_the_lines_of_others_are_those_of_the_records():
    """`python benchmarks/gpu_day.py --page` writes them."""
    assert (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8") == page.page(stored())
    for name in ("README.md", "docs/guide/install.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert page.state(stored()) in text.partition(page._BEGIN)[2].partition(page._END)[0]


def test_records_of_a_dry_run_are_not_those_of_a_gpu():
    """A virtual device, also where torch was built for CUDA."""
    profile = {"cpu": {"versions": {"CUDA": "13.0"}, "device": "cpu", "machine": "virtual device"}}
    assert page.state({"profile": profile}) == page.state({})
    assert "No GPU has run it yet" in page.page({"profile": profile})


def test_a_day_of_a_gpu_becomes_a_page_with_plan_and_measurement():
    row = ROWS[0].name
    rates = {"up": 50e9, "down": 49e9, "both": 90e9, "pageable_up": 8e9, "pageable_down": 7e9, "flops": 7e14}
    one = {"row": row, "tokens": 65536, "TFLOPS": 272.0, "device peak": 3e10, "host taken": 4e10, "host resident": 1e9}
    day = {
        "profile": {"cuda:0": {"machine": "NVIDIA H100; AMD", "device": "cuda", "versions": {"CUDA": "13.0"},
                               "driver": "580", "rates": rates | {"overlap": 0.9, "clock": 1.0},
                               "Adam bytes per second": {"16 threads": 6e10}}},
        "plan": {row: {"seconds": {OURS[0]: 2.5}, "device peak": 2e10, "host": 4.2e10, "bottleneck": "compute",
                       "link bytes": {"up": 29e9, "down": 31e9}, "fits": {"device": True, "host": True},
                       "optimizer seconds that show": {OURS[0]: 0.2}}},
        "row": {
            "a": {**one, "program": OURS[0], "tokens per second": 32768.0, "seconds": [2.0, 2.1, 1.9],
                  "losses": [12.0, 11.0, 10.0], "optimizer seconds that show": 0.3,
                  "link bytes": {"up": 30e9, "down": 32e9}},
            "b": {"row": row, "program": ALL[3], "error": "it is not here"},
        },
        "test": {"t1": {"outcome": "passed"}, "t2": {"outcome": "skipped", "reason": "no bitsandbytes"}},
    }  # fmt: skip
    text = page.page(day)
    assert "It ran on NVIDIA H100. Tests for devices: 1 passed, 1 skipped. Tokens a second: 1.7B 32,768." in text
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {OURS[0]} | 32,768")]
    assert "| 2.00 s (2.50 s) | 30 GB (20 GB) | 40 GB (42 GB) | 30 GB, 32 GB (29 GB, 31 GB) | 0.30 s (0.20 s) |" in line
    assert f"| {ALL[3]} | it is not here |" in text
    assert "No GPU" not in text


def test_every_row_names_programs_that_there_are():
    assert {program for row in ROWS for program in row.programs} == PROGRAMS.keys()
    assert {row.tokens for row in ROWS} == {65536, 262144}
