"""Everything that a GPU is wanted for, in one command: how fast it is, the tests, and trainings next to others.

    python benchmarks/gpu_day.py --out DIR              all parts, from a checkout: no pip, no network
    python benchmarks/gpu_day.py tests 1.7B --out DIR   some of them
    python benchmarks/gpu_day.py --wheels WHEELS        before: fetch what such a machine may lack, below 40 MB
    python benchmarks/gpu_day.py --page --out DIR       afterwards: docs/gpu.md, and lines of README and install page

It ends within nine minutes, with every result written as soon as it is there; the same line again continues where it
stopped. Of several parts, the first two programs of every row run before the others. The plan of each row is written
before the row runs, and is shown next to what was measured.

Exit status: 0 all is done; 1 a test failed, or a training of this runtime; 75 time was over before all was done.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import wheels  # noqa: E402  found from the root only
from benchmarks.gpu.apart import Done, run_apart  # noqa: E402
from benchmarks.gpu.records import Records  # noqa: E402

PARTS = ("profile", "tests", "1.7B", "8B", "lora", "long")
UNFINISHED = 75
ROUNDING = 0.02  # of a loss in bfloat16, relative
MINUTES = 9.0  # of a call
TESTS_MINUTES = 4.0
PROFILE_SECONDS = 120.0
PLAN_SECONDS = 90.0  # for all rows of a part
PROGRAM_SECONDS = 150.0  # for one program, its start included
COMPILE_SECONDS = 240.0  # for what it compiles when it runs first
TRIES = 2  # calls that may end while a program runs, before it is left out
DECIDE = 2  # programs of a row that run in all parts before the others do
OUTCOMES = ("passed", "failed", "skipped", "unfinished")
STARTED = 40.0  # seconds below which a program is left to the next call
OPERATORS = wheels.CACHE / "operators"  # what programs compile


class OutOfTimeError(Exception):
    """Not enough of the nine minutes is left for the next piece of work."""


class Day:
    """The parts of a day, with what they share: device, records, wheels, and the time that is left.

    Attributes:
        device: name of the accelerator, like ``cuda:0``.
        records: files of results.
        tiny: whether models are tiny ones, for a dry run.
        is_whole: whether everything that was asked for ran, until there is no time for the tests.
    """

    def __init__(
        self, device: str, records: Records, wheels: Path | None, *, tiny: bool, end: float, patience: float = 1.0
    ) -> None:
        # patience: what the limits of all processes are multiplied with, on a machine that others use
        self.device = device
        self.records = records
        self.tiny = tiny
        self.is_whole = True
        self._wheels = wheels
        self._end = end
        self._patience = patience
        self._failed = False

    def left(self, needed: float = 0.0) -> float:
        """Seconds that are left of this call; an error if fewer than needed."""
        found = self._end - time.monotonic()
        if found < needed:
            raise OutOfTimeError
        return found

    def run(self, part: str, programs: int | None = None) -> bool:
        """Run a part, so many programs of each row, and return whether nothing of this runtime failed."""
        self._failed = False
        say(f"== {part}")
        kinds: dict[str, Callable[[], None]] = {"profile": self._profile, "tests": self._tests}
        kinds.get(part, lambda: self._rows(part, programs))()
        return not self._failed

    # -- the machine ---------------------------------------------------------------------------------------------------

    def _profile(self) -> None:
        if any("difference" in one for one in self.records.of("profile").values()) and self.records.machine.exists():
            say("the machine was measured before")
            return
        limit = self._share(PROFILE_SECONDS)
        command = [sys.executable, "-m", "benchmarks.gpu.profile", self.device, str(self.records.machine)]
        done = run_apart([*command, *(["--tiny"] if self.tiny else [])], self._environment("base"), limit)
        found = ([one for one in _results(done) if "machine" in one] or [{}])[-1]  # the longest
        if "difference" not in found:
            found |= self._ended(done, limit, PROFILE_SECONDS, "the machine was not measured")
        if "machine" in found:
            self.records.add("profile", self.device, found)
        for name in ("machine", "driver", "rates", "Adam bytes per second", "versions"):
            say(f"{name}: {_rates(found.get(name))}")
        difference = found.get("difference", math.inf)
        say(found.get("error", f"two steps of a small training differ from plain PyTorch by {difference:.1e}"))
        self._failed |= not difference < 1e-3

    # -- tests ---------------------------------------------------------------------------------------------------------

    def _tests(self) -> None:
        environment = self._environment("base", "bitsandbytes", "torchao")
        environment |= {"GPU_DAY_RECORDS": str(self.records.folder), "GPU_TESTS_DEVICE": self.device}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-p",
            "benchmarks.gpu.noted_tests",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "tests/gpu",
            "-W",
            "ignore::SyntaxWarning",
        ]  # fmt: skip  of a library from a wheel, when Python compiles its source
        if self.device.startswith("late"):
            command += ["-p", "tests.accelerator.plugin"]
        end, known = time.monotonic() + self._share(60 * TESTS_MINUTES), -1
        done = Done("", "", None)
        # A test that ends the process, or breaks the device, runs again after all others.
        while len(self.records.of("test")) > known and (limit := end - time.monotonic()) > 0:
            known = len(self.records.of("test"))
            done = run_apart(command, environment, limit, log=self.records.folder / "tests.log")
            if done.status in (None, 0, 1):  # over, all passed, some failed
                break
        if done.status is None:
            self.is_whole = False
            say("the tests did not finish in time; run the same line again to continue")
        found = self.records.of("test")
        outcomes = [one["outcome"] for one in found.values()]
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in OUTCOMES)
        say(f"{counts}; see {self.records.folder / 'tests.log'}")
        for name, one in found.items():
            if one["outcome"] in ("failed", "unfinished"):
                say(f"{one['outcome']}: {name}")
        if not found:
            say(done.out[-2000:])
        ended = "unfinished" in outcomes and self.is_whole
        self._failed = ended or "failed" in outcomes or "passed" not in outcomes

    # -- trainings -----------------------------------------------------------------------------------------------------

    def _rows(self, part: str, programs: int | None) -> None:
        from benchmarks.gpu.page import row_lines
        from benchmarks.gpu.rows import rows_of

        if not (self.records.machine.exists() or self.records.of("profile")):
            self._profile()
        rows = rows_of(part, tiny=self.tiny)
        self._plan([row.name for row in rows])
        for row in rows:
            try:
                for program in row.programs[:programs]:
                    self._program(program, row)
            finally:
                kinds = ("plan", "row")
                say("\n".join([row.name, *row_lines(row.name, {kind: self.records.of(kind) for kind in kinds})]))

    def _plan(self, rows: list[str]) -> None:
        """Write the plan of each row that has none; without a profile of the machine there is none."""
        rows = [row for row in rows if not self._has("plan", row)]
        if not rows or not self.records.machine.exists():
            return
        limit = self._share(PLAN_SECONDS)
        command = [sys.executable, "-m", "benchmarks.gpu.plans", str(self.records.machine), *rows]
        done = run_apart(command, self._environment("base", "bitsandbytes"), limit)
        plans = {one.pop("row"): one for one in _results(done) if "row" in one}
        for row, found in plans.items():
            self.records.add("plan", row, found)
        for row in rows:
            if row not in plans:
                self.records.add("plan", row, self._ended(done, limit, PLAN_SECONDS, "it was not made"))

    def _has(self, kind: str, key: str) -> bool:
        """Whether there is a result, and not only the name of what was missing for it."""
        return "missing" not in self.records.of(kind).get(key, {"missing": True})

    def _program(self, program: str, row: Any) -> None:
        key = f"{row.name} | {program}"
        if self._has("row", key):
            return
        times = self.records.of("begun").get(key, {"times": 0})["times"]
        if times < TRIES:
            self.records.add("begun", key, {"times": times + 1})
            try:
                found = self._apart(program, row)
            finally:
                self.records.add("begun", key, {"times": 0})
        else:
            found = {"error": f"{TRIES} calls ended while it ran: the host had no memory left, or was taken away"}
        found |= {"row": row.name, "program": program, "tokens": row.tokens}
        found |= self._disagreement(row, found)
        self.records.add("row", key, found)
        self._failed |= "error" in found and "missing" not in found and program.startswith("this runtime")
        shown = f"{found['tokens per second']:,.0f} tokens/s" if "seconds" in found else ""
        say(f"{program}: {', '.join(filter(None, (shown, found.get('error'))))}")

    def _apart(self, program: str, row: Any) -> dict[str, Any]:
        """Return the result of a program in a separate process, or why there is none."""
        from benchmarks.gpu.programs import CUDA_ONLY, LAUNCHED, NEEDS, missing

        if program in CUDA_ONLY and not self.device.startswith("cuda"):
            return {"error": "it runs on CUDA alone", "missing": ["cuda"]}
        group = NEEDS.get(program, ("bitsandbytes" if row.few_bits else "", ()))[0]
        environment = self._environment("base", *filter(None, [group]))
        if program in LAUNCHED:
            environment |= _rank_of_one()
        if absent := missing(program, row, environment["PYTHONPATH"].split(os.pathsep)):
            return {"error": f"without {', '.join(absent)}, which {wheels.LINE} fetches", "missing": absent}
        if error := self._compiled(program, environment):
            return error
        command = [sys.executable, "-m", "benchmarks.gpu.measure", row.name, program, "--device", self.device]
        limit = self._share(PROGRAM_SECONDS)
        done = run_apart([*command, "--seconds", str(limit - 10)], environment, limit)
        if steps := [one for one in _results(done) if "losses" in one]:
            return steps[-1]  # which has most
        return self._ended(done, limit, PROGRAM_SECONDS, "no step was timed")

    def _compiled(self, program: str, environment: dict[str, str]) -> dict[str, Any] | None:
        """Compile what a program needs, once in a day and before its time is taken; an error if that fails."""
        from benchmarks.gpu.programs import COMPILED

        if program not in COMPILED or program in self.records.of("compiled"):
            return None
        for lock in OPERATORS.rglob("lock"):  # of a process that was ended: torch would wait for it forever
            lock.unlink()
        limit, start = self._share(COMPILE_SECONDS), time.monotonic()
        done = run_apart([sys.executable, "-c", COMPILED[program]], environment, limit)
        if done.status != 0:
            return self._ended(done, limit, COMPILE_SECONDS, "its operators were not compiled")
        self.records.add("compiled", program, {"seconds": time.monotonic() - start})
        return None

    def _share(self, most: float) -> float:
        """Seconds for a process: so many, or what is left of the call."""
        return min(most * self._patience, self.left(STARTED / 4 if self.tiny else STARTED) - 5)

    def _ended(self, done: Done, limit: float, most: float, what: str) -> dict[str, Any]:
        """Why a process found nothing; one that had less time than others have runs again in the next call."""
        if done.status is None and limit < most * self._patience:
            raise OutOfTimeError
        if done.status is None:
            return {"error": f"{what} in {limit:.0f} s", "stderr": done.error[-3000:]}
        if (number := -done.status if done.status < 0 else done.status - 128) > 0:
            why = ": the host, or its container, had no memory left" if number == signal.SIGKILL else ""
            return {"error": f"signal {number} ended it{why}", "stderr": done.error[-3000:]}
        return {"error": _reason(done.error) or f"exit status {done.status}", "stderr": done.error[-3000:]}

    def _environment(self, *groups: str) -> dict[str, str]:
        paths = [path for group in groups for path in wheels.unpacked(self._wheels, group)]
        before = os.environ.get("PYTHONPATH")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, str(ROOT), *([before] if before else [])]),
            "TORCH_EXTENSIONS_DIR": str(OPERATORS),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "DS_SKIP_CUDA_CHECK": "1",  # there may be headers of CUDA and no compiler
            "GLOO_SOCKET_IFNAME": "lo",  # the name of the host may have no address
            "NCCL_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(_cores())),
            **_cuda_home(),
        }

    def _disagreement(self, row: Any, found: dict[str, Any]) -> dict[str, str]:
        """Another first loss than that of the program that ran first, or other ones where every step is synchronous."""
        others = [one for one in self.records.of("row").values() if one["row"] == row.name and "error" not in one]
        if not others or "losses" not in found:
            return {}
        right = others[0]
        late = any("async" in one["program"] or "RoundPipe" in one["program"] for one in (found, right))
        pairs = list(zip(found["losses"], right["losses"], strict=False))[: 1 if late else 3]
        if all(abs(loss - expected) <= ROUNDING * abs(expected) for loss, expected in pairs):
            return {}
        return {"error": f"its losses differ from those of {right['program']}"}


def _results(done: Done) -> list[dict[str, Any]]:
    """The lines of JSON that a process printed, next to what libraries print."""
    found = []
    for line in done.out.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict)]


def _cores() -> int:
    """Cores that the container may use: OpenMP would start a thread for each of the machine."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
        quota, period = map(int, file.read().split())  # "max 100000" where there is no limit
        found = min(found, max(1, quota // period))
    return found


def _cuda_home() -> dict[str, str]:
    """The headers of CUDA that came with torch, where no toolkit is installed."""
    if "CUDA_HOME" in os.environ or shutil.which("nvcc") or Path("/usr/local/cuda").exists():
        return {}
    found = (Path(folder, "nvidia", "cu13") for folder in sys.path)
    home = next((one for one in found if (one / "include" / "cuda.h").exists()), None)
    return {} if home is None else {"CUDA_HOME": str(home)}


def _rank_of_one() -> dict[str, str]:
    """What a launcher sets in the environment of a process that trains alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _reason(error: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Interrupt"))]
    return (named or lines or [""])[-1][:300]


def _rates(found: Any) -> str:
    if not isinstance(found, dict):
        return str(found)
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )


def _why_no_cuda() -> str:
    """What torch reports where it is made for CUDA and finds no GPU: a driver may be older than that CUDA."""
    import torch

    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return f" ({str(error).splitlines()[0]})"
    return ""


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    begin = time.monotonic()  # before torch is imported, which takes long on a busy machine
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}. Default: all, in order")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results, also of those of earlier calls")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="with --out: take wheels from there; alone: fetch them"
    )
    parser.add_argument("--page", action="store_true", help="write the page, of the results in --out where it is given")
    parser.add_argument("--device", help="accelerator, or cpu. Default: the first accelerator")
    parser.add_argument("--shapes", choices=["full", "tiny"], default="full", help="tiny: a dry run of everything")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="of the call, 9 by default; with more a process may take longer"
    )
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}: {', '.join(PARTS)}")
    if options.page:
        return page(options.out)
    if options.out is None:
        if options.wheels is None or options.parts:
            parser.error("--out DIR is needed, for the results")
        say(f"{options.wheels} has {wheels.fetch(options.wheels) / 1e6:.1f} MB of wheels")
        return 0
    for folder in wheels.unpacked(options.wheels, "base"):
        sys.path.insert(0, folder)
    return measure(options, begin)


def page(folder: Path | None) -> int:
    from benchmarks.gpu.page import store, write_page

    if folder is not None:
        store(folder)
    write_page()
    return 0


def measure(options: argparse.Namespace, begin: float) -> int:
    import torch

    absent = [name for name in ("msgspec",) if importlib.util.find_spec(name) is None]
    if absent:
        say(f"missing here: {', '.join(absent)}. Fetch wheels where there is a network: {wheels.LINE}")
    device = options.device
    if device is None and not torch.accelerator.is_available():
        say(f"There is no accelerator here{_why_no_cuda()}. --shapes tiny --device cpu makes a dry run.")
        return 1
    device = device or f"{torch.accelerator.current_accelerator()}:0"
    if device.startswith("late"):  # the reference accelerator, made of the CPU
        device = "late:0"
        importlib.import_module("tests.accelerator.late")
    records = Records(options.out.absolute())  # processes have another working directory
    end = begin + 60 * options.minutes
    patience = max(1.0, options.minutes / MINUTES)
    day = Day(device, records, options.wheels, tiny=options.shapes == "tiny", end=end, patience=patience)
    status = 0
    try:
        parts = options.parts or PARTS
        rows = [part for part in parts if part not in ("profile", "tests")]
        for part in parts:  # of each row the programs that decide; then the others
            status |= not day.run(part, DECIDE if len(rows) > 1 else None)
        for part in rows if len(rows) > 1 else ():
            status |= not day.run(part)
    except OutOfTimeError:
        say("time is over; run the same line again to continue from here")
        return status or UNFINISHED
    return status or (0 if day.is_whole else UNFINISHED)


if __name__ == "__main__":
    found = main()
    sys.stdout.flush()
    os._exit(found)  # a thread of autograd for a device may abort a process that ends after a backward
