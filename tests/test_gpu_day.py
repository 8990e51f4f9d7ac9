"""The day of a GPU in small: every part runs, keeps what it found, and shows the plan next to what was measured."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu_day
from benchmarks.gpu import page, programs, wheels
from benchmarks.gpu.apart import Done, run_apart
from benchmarks.gpu.measure import copied_bytes
from benchmarks.gpu.programs import PROGRAMS
from benchmarks.gpu.records import Records
from benchmarks.gpu.rows import ALL, OURS, ROWS, rows_of
from roundpipe_runtime.estimate.hardware import describe_hardware
from tests import fresh_process
from tests.accelerator.build import reason_not_to_build
from tests.cases import cases

ROOT = Path(__file__).parent.parent


def forked(command, environment, limit):
    done = fresh_process.run(*command[1:], imported=fresh_process.TRAINER, env=environment, cwd=ROOT)
    return Done(done.stdout, done.stderr, done.returncode)


@pytest.fixture
def day(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(gpu_day, "run_apart", forked)

    def run(*arguments):
        options = ("--shapes", "tiny", "--device", "cpu", "--out", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["gpu_day.py", *map(str, arguments), *options])
        return gpu_day.main()

    run.records = Records(tmp_path)
    return run


@pytest.mark.slow  # each program is a process of its own
@pytest.mark.parametrize("part", cases(["1.7B", "8B", "lora", "long"], quick=["1.7B"]))
def test_a_part_measures_every_program_of_its_rows(day, part, capfd):
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


FOUND = {"losses": [1.0, 0.9], "seconds": [2.0], "tokens per second": 5.0, "TFLOPS": 1.0} | dict.fromkeys(
    ("device peak", "host taken", "host resident"), 1
)


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day, "OPERATORS", tmp_path / "operators")
    return gpu_day.Day("cpu", Records(tmp_path), None, tiny=True, end=time.monotonic() + 540)


@pytest.fixture
def runs(monkeypatch):
    """Give what programs print, a `Done` or a function of their command; the calls are listed."""

    def replace(printed):
        calls = []

        def run(command, environment, limit):
            calls.append((command, environment, limit))
            return printed(command) if callable(printed) else printed

        monkeypatch.setattr(gpu_day, "run_apart", run)
        return calls

    return replace


@pytest.mark.parametrize("printed", ['{"losses": [1.0], "seconds": [2.0], "tokens per second": 5.0}\n', ""])
def test_a_program_that_is_ended_keeps_what_it_printed(made, runs, printed):
    runs(Done(printed, "at line 3", None))
    row = rows_of("1.7B", tiny=True)[0]
    whole = made._apart(OURS[0], row)
    assert whole == (json.loads(printed) if printed else {"error": "no step was timed in 150 s", "stderr": "at line 3"})
    made._end = time.monotonic() + 60
    if printed:
        assert made._apart(OURS[0], row) == whole
    else:
        with pytest.raises(gpu_day.OutOfTimeError):
            made._apart(OURS[0], row)


def test_only_a_program_that_a_launcher_starts_has_a_rank(made, runs, monkeypatch):
    """DeepSpeed would ask MPI for one; the others make their process group themselves."""
    calls = runs(Done('{"losses": [1.0]}\n', "", 0))
    monkeypatch.setattr(programs, "missing", lambda *_: [])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    row = rows_of("1.7B", tiny=True)[0]
    for program in ("DeepSpeed ZeRO-3 offload", "FSDP2, CPU offload", OURS[0]):
        assert made._apart(program, row) == {"losses": [1.0]}
    seen = {command[4] if command[1] == "-m" else "compiled": environment for command, environment, _ in calls}
    launched = seen.pop("DeepSpeed ZeRO-3 offload")
    assert [launched[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "1"]
    with socket.create_server((launched["MASTER_ADDR"], int(launched["MASTER_PORT"]))):
        pass  # the port is free
    del seen["compiled"]
    assert len(seen) == 2
    assert not any("RANK" in one or "MASTER_ADDR" in one for one in seen.values())


_KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from benchmarks import gpu_day
from benchmarks.gpu import apart
from benchmarks.gpu.records import Records

folder = Path({folder!r})
other = "import time; time.sleep(600)"  # a compiler, for one
program = (
    "import os, subprocess, sys, time; from pathlib import Path; "
    f"other = subprocess.Popen([sys.executable, '-S', '-c', {{other!r}}]); "
    "Path({started!r}).write_text(f'{{os.getpid()}} {{other.pid}}'); time.sleep(600)"
)

def kill():
    while not Path({started!r}).exists() or not Path({started!r}).read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

def run(command, environment, limit):
    if "benchmarks.gpu.plans" in command:
        return apart.Done({planned!r}, "", 0)
    if day.records.of("row"):
        threading.Thread(target=kill).start()
        return apart.run_apart([sys.executable, "-S", "-c", program], environment, limit)
    return apart.Done({printed!r}, "", 0)

gpu_day.run_apart = run
day = gpu_day.Day("cpu", Records(folder), None, tiny=True, end=time.monotonic() + 540)
day.run("long")
"""


def test_a_day_that_is_killed_keeps_its_rows_and_goes_on(made, runs, tmp_path):
    printed = json.dumps(FOUND)
    started = tmp_path / "started"
    made.records.machine.write_text(json.dumps(dataclasses.asdict(describe_hardware("virtual:1"))))
    (row,) = rows_of("long", tiny=True)
    planned = json.dumps({"row": row.name, "error": "it is not planned here"})
    code = _KILLED.format(folder=str(tmp_path), started=str(started), printed=printed, planned=planned)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = fresh_process.run("-c", code, imported=fresh_process.TRAINER, cwd=ROOT, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    first = made.records.of("row")
    assert [one["program"] for one in first.values()] == list(row.programs[:2])
    assert list(made.records.of("plan")) == [row.name]
    assert made.records.of("begun")[f"{row.name} | {row.programs[2]}"]["times"] == 1
    assert all(has_ended(int(process)) for process in started.read_text().split())
    with made.records.path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "row", "key"')  # a line that was cut
    calls = runs(Done(printed, "", 0))
    assert made.run("long")
    here = [name for name in row.programs if name not in programs.CUDA_ONLY]
    assert [command[4] for command, *_ in calls] == here[1:]
    found = made.records.of("row")
    assert [one["program"] for one in found.values()] == list(row.programs)
    assert found[f"{row.name} | {OURS[0]}"] == first[f"{row.name} | {OURS[0]}"]


def test_a_program_that_fails_is_named_and_the_others_run(made, runs, monkeypatch, capfd):
    (row,) = rows_of("long", tiny=True)
    seen = []

    def run(command):
        seen.append(command[2].removeprefix("benchmarks.gpu."))
        if command[4] == "PyTorch, resident":
            return Done("", "at line 3\ntorch.OutOfMemoryError: no memory is left", 1)
        if seen[-1] == "profile":
            return Done("{}", "RuntimeError: no device", 1)
        return Done(f"{{'of a library'}}\n{json.dumps(FOUND)}\n{{}}\n", "", 0)

    runs(run)
    monkeypatch.setattr(programs, "missing", lambda *_: [])
    assert not made.run("long")
    here = [name for name in row.programs if name not in programs.CUDA_ONLY]
    assert seen == ["profile", *["measure"] * len(here)]
    assert not made.records.of("plan")
    shown = capfd.readouterr().out
    assert "RuntimeError: no device" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("  PyTorch, resident")]
    assert line.split("  ")[2].strip() == "torch.OutOfMemoryError: no memory is left"
    failed = [one["program"] for one in made.records.of("row").values() if "tokens per second" not in one]
    assert failed == [name for name in row.programs if name not in here[:-1]]


@pytest.mark.parametrize("left", [540, 60])
def test_a_plan_that_takes_too_long_is_ended(made, runs, left):
    first, second = rows_of("lora", tiny=True)
    printed = json.dumps({"row": first.name, "seconds": {}})
    calls = runs(Done(printed, "at line 3", None))
    made.records.machine.touch()
    made._end = time.monotonic() + left
    with contextlib.nullcontext() if left > gpu_day.PLAN_SECONDS else pytest.raises(gpu_day.OutOfTimeError):
        made._plan([first.name, second.name])
    found = made.records.of("plan")
    assert found.pop(first.name)["seconds"] == {}
    assert [one["error"] for one in found.values()] == ["it was not made in 90 s"] * (left > gpu_day.PLAN_SECONDS)
    assert calls[0][2] <= min(gpu_day.PLAN_SECONDS, left)


def test_a_profile_that_takes_too_long_is_ended_and_time_that_is_over_ends_the_call(made, day, runs, capfd):
    runs(Done("", "", None))
    assert not made.run("profile")
    assert "the machine was not measured in 120 s" in capfd.readouterr().out
    made._end = time.monotonic() + 60
    with pytest.raises(gpu_day.OutOfTimeError):
        made.run("profile")
    assert day("profile", "1.7B", "--minutes", "0") == gpu_day.UNFINISHED
    assert not day.records.of("row")
    assert "run the same line again to continue" in capfd.readouterr().out


def test_a_profile_that_breaks_keeps_what_it_found(made, runs, capfd):
    begun = {"machine": "NVIDIA H100; AMD", "device": "cuda", "driver": None, "versions": {"CUDA": "13.0"}}
    error = "RuntimeError: no memory can be pinned"
    calls = runs(Done(json.dumps(begun) + "\n", error, 1))
    assert not made.run("profile")
    assert not made.run("profile")
    assert len(calls) == 2
    assert error in capfd.readouterr().out
    text = page.page({kind: made.records.of(kind) for kind in ("profile", "plan", "row", "test")})
    assert f"- it ended early: {error}" in text
    assert "It ran on NVIDIA H100." in text


def has_ended(process):
    for _ in range(100):  # whoever inherits it takes note of its end a moment later
        if not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    os.kill(process, signal.SIGKILL)
    return False


def test_a_process_is_ended_with_what_it_started(tmp_path):
    """A compiler below it would go on, and keep its output open."""
    other = "import os, time; open('other', 'w').write(str(os.getpid())); time.sleep(600)"
    started = f"""
import os, subprocess, sys, time
os.chdir({str(tmp_path)!r})
subprocess.Popen([sys.executable, "-c", {other!r}])
while not os.path.exists("other") or not open("other").read():
    time.sleep(0.01)
print("it runs", flush=True)
time.sleep(600)
"""
    begin = time.monotonic()
    done = run_apart([sys.executable, "-S", "-c", started], dict(os.environ), 10.0)
    assert done == Done("it runs\n", "", None)
    assert time.monotonic() - begin < 60
    assert has_ended(int((tmp_path / "other").read_text()))
    program = "print(open('/proc/self/oom_score_adj').read())"  # a kernel that has no memory ends it first
    assert run_apart([sys.executable, "-S", "-c", program], dict(os.environ), 60.0).out.strip() == "1000"
    assert Path("/proc/self/oom_score_adj").read_text().strip() != "1000"


_TESTS = """
import os, pytest
pytestmark = pytest.mark.gpu

def test_a():
    pass

def test_ends_the_process():
    os._exit(7)

def test_breaks_the_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_skips():
    pytest.skip("no such thing")

def test_b():
    pass
"""


def test_a_test_that_ends_its_process_hides_no_other(made, monkeypatch, tmp_path, capfd):
    (tmp_path / "test_some.py").write_text(_TESTS)
    calls = []

    def run(command, environment, limit, log):
        calls.append(command)
        options = ["-c", os.devnull, "--rootdir", str(tmp_path)]
        line = [str(tmp_path / "test_some.py") if one == "tests/gpu" else one for one in command]
        return run_apart([*line, *options], environment, limit, log=log)

    monkeypatch.setattr(gpu_day, "run_apart", run)
    assert not made.run("tests")
    outcomes = {name.partition("::")[2]: one["outcome"] for name, one in made.records.of("test").items()}
    names = ("test_a", "test_ends_the_process", "test_breaks_the_device", "test_skips", "test_b")
    assert outcomes == dict(zip(names, ("passed", "unfinished", "failed", "skipped", "passed"), strict=True))
    assert 3 <= len(calls) <= 4
    assert "2 passed, 1 failed, 1 skipped, 1 unfinished" in capfd.readouterr().out


def test_of_several_parts_the_programs_that_decide_run_first(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(gpu_day.Day, "run", lambda self, part, programs=None: seen.append((part, programs)) or True)
    for parts in (["8B"], ["tests", "8B", "long"]):
        options = ["--shapes", "tiny", "--device", "cpu", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["gpu_day.py", *parts, *options])
        assert gpu_day.main() == 0
    several = [("tests", 2), ("8B", 2), ("long", 2), ("8B", None), ("long", None)]
    assert seen == [("8B", None), *several]


def test_operators_are_compiled_once_and_before_a_program_has_its_time(made, runs, tmp_path):
    """Without the lock of a process that was ended while it compiled, for which torch waits without an end."""
    name = "DeepSpeed ZeRO-3 offload"
    lock = tmp_path / "operators" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    was_locked = []

    def run(command):
        was_locked.append(lock.exists())
        return Done("", "c++\nRuntimeError: no compiler", 1 if len(was_locked) == 1 else 0)

    calls = runs(run)
    assert made._compiled(name, {})["error"] == "RuntimeError: no compiler"
    assert made._compiled(name, {}) is made._compiled(name, {}) is made._compiled(OURS[0], {}) is None
    line = [sys.executable, "-c", programs.COMPILED[name]]
    assert [(command, limit) for command, _, limit in calls] == [(line, gpu_day.COMPILE_SECONDS)] * 2
    assert was_locked == [False, False]


@pytest.mark.slow
@pytest.mark.skipif(reason_not_to_build() is not None, reason=str(reason_not_to_build()))
def test_bytes_of_the_link_are_counted_on_an_accelerator():
    """Weights come twice in a step, gradients of float32 go back: 2 + 2 up, 4 down; activations add more."""
    row = rows_of("1.7B", tiny=True)[0]
    command = ("-m", "benchmarks.gpu.measure", row.name, OURS[0], "--device", "late:0", "--seconds", "250")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = fresh_process.run(*command, env=environment, imported=fresh_process.TRAINER)
    found = json.loads(done.stdout.splitlines()[-1])
    weights = found["parameters"]
    assert found["device peak"] > 0
    assert found["link bytes"]["up"] >= 4 * weights
    assert found["link bytes"]["down"] >= 4 * weights


def test_wheels_are_unpacked_without_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "CACHE", tmp_path / "cache")
    (tmp_path / "base").mkdir()
    with zipfile.ZipFile(tmp_path / "base" / "thing-1-py3-none-any.whl", "w") as archive:
        archive.writestr("thing/__init__.py", "x = 1")
        archive.writestr("thing-1.data/purelib/other.py", "y = 2")
    (found,) = wheels.unpacked(tmp_path, "base")
    assert (Path(found) / "thing" / "__init__.py").read_text() == "x = 1"
    assert (Path(found) / "other.py").read_text() == "y = 2"
    assert wheels.unpacked(tmp_path, "base") == [found]
    assert wheels.unpacked(tmp_path, "torchao") == wheels.unpacked(None, "base") == []
    wheel = tmp_path / "kernels.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("b/libbitsandbytes_cuda130.so", "b/libbitsandbytes_cuda118.so", "b/nn.py"):
            archive.writestr(name, name)
    wheels._cut_down(wheel)  # libraries of other platforms are left out
    assert zipfile.ZipFile(wheel).namelist() == ["b/libbitsandbytes_cuda130.so", "b/nn.py"]


def test_the_page_is_that_of_the_records_with_plan_and_measurement():
    """Records of a dry run are not those of a GPU."""
    stored = json.loads(page.DATA.read_text(encoding="utf-8")) if page.DATA.exists() else {}
    assert (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8") == page.page(stored)
    for name in ("README.md", "docs/guide/install.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert page.state(stored) in text.partition(page._BEGIN)[2].partition(page._END)[0]
    profile = {"cpu": {"versions": {"CUDA": "13.0"}, "device": "cpu", "machine": "virtual device"}}
    assert page.state({"profile": profile}) == page.state({})
    assert "**has not run on a GPU yet**" in page.page({"profile": profile})
    assert {program for row in ROWS for program in row.programs} == PROGRAMS.keys()
    assert {row.tokens for row in ROWS} == {65536, 262144}
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


def test_other_losses_and_what_ended_a_process_are_named(made):
    row = ROWS[0]
    made.records.add("row", "first", {"row": row.name, "program": OURS[0], "losses": [2.0, 1.0, 0.5]})
    assert not made._disagreement(row, {"program": "FSDP2, CPU offload", "losses": [2.01, 1.0, 0.5]})
    assert made._disagreement(row, {"program": "FSDP2, CPU offload", "losses": [2.0, 1.0, 0.6]})
    assert made._disagreement(row, {"program": "FSDP2, CPU offload", "losses": [float("nan")]})
    assert not made._disagreement(row, {"program": OURS[2], "losses": [2.0, 2.0, 1.0]})
    assert made._disagreement(row, {"program": OURS[2], "losses": [2.1, 2.0, 1.0]})
    no_memory = "signal 9 ended it: the host, or its container, had no memory left"
    for status, expected in {137: no_memory, -9: no_memory, 139: "signal 11 ended it", 1: "ValueError: no"}.items():
        done = Done("", "a warning\nValueError: no\n", status)
        assert made._ended(done, 150.0, 150.0, "it was not done")["error"] == expected
    kinds = {"HtoD (Pinned -> Device)": 100, "HtoD (Pageable -> Device)": 5, "DtoH (Device -> Pinned)": 40, "DtoD": 7}
    events = [{"cat": "gpu_memcpy", "name": f"Memcpy {kind}", "args": {"bytes": n}} for kind, n in kinds.items()]
    events += [{"cat": "kernel", "name": "copy HtoD"}, {"name": "process_name", "args": {}}]
    assert copied_bytes(events) == {"up": 105, "down": 40}  # copies of a profile are added up


def test_a_program_that_ends_two_calls_is_left_out(made, runs):
    """Where a container ends as a whole there is no row, and each call would end at the same place."""
    row = rows_of("1.7B", tiny=True)[0]
    first, second = (f"{row.name} | {program}" for program in OURS[:2])
    seen = []

    def run(command):
        seen.append(made.records.of("begun")[f"{row.name} | {command[4]}"]["times"])
        return Done(json.dumps(FOUND), "", 0)

    runs(run)
    made.records.add("begun", first, {"times": 2})
    for program in OURS[:2]:
        made._program(program, row)
    assert made.records.of("row")[first]["error"].startswith("2 calls ended while it ran")
    assert "error" not in made.records.of("row")[second]
    assert seen == [1]
    assert made.records.of("begun")[second]["times"] == 0
