"""Run more cases of all doors, each door in a process that is started again where it dies. See the package."""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator

from .cases import SECONDS, run_cases
from .doors import DOORS

FOUND = pathlib.Path(__file__).parent / "found.json"
_STATE = pathlib.Path("build/fuzz.json")


def _announced(seeds: Iterable[int]) -> Iterator[int]:
    """In a process of its own, the number of each case is printed before it begins."""
    for seed in seeds:
        print(json.dumps([seed]), flush=True)
        yield seed


def _run(door: str, first: int, count: int) -> tuple[collections.Counter[str], list[tuple[int, str]]]:
    counts: collections.Counter[str] = collections.Counter()
    findings: list[tuple[int, str]] = []
    end = first + count
    while first < end:
        command = [sys.executable, "-m", "tests.fuzz", "--work", door, f"{first}:{end}"]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
                begun, started = first - 1, False
                assert process.stdout is not None
                for line in process.stdout:
                    if not line.startswith("["):
                        continue
                    seed, *outcome = json.loads(line)
                    if not outcome:
                        begun, started = seed, True
                        continue
                    counts[outcome[0]] += 1
                    if outcome[1]:
                        findings.append((seed, outcome[1]))
                        print(f"\n{door} {seed}: {outcome[1]}", flush=True)
                    if sys.stdout.isatty():
                        print(f"\r{door}: {seed + 1 - (end - count)} of {count}", end="", flush=True)
            if process.returncode == 0:
                break
            errors.seek(0)
            if not started:
                raise SystemExit(f"{door}: the good file is not read:\n{errors.read()[-3000:]}")
            counts["finding"] += 1
            findings.append((begun, f"the process died with status {process.returncode}"))
            print(f"\n{door} {begun}: {findings[-1][1]}", flush=True)
            first = begun + 1
    return counts, findings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("door", nargs="?", choices=sorted(DOORS), help="only this kind of file")
    parser.add_argument("seed", nargs="?", type=int, help="only this case, with its stack trace")
    parser.add_argument("--count", type=int, default=1000, help="cases of a door of share 1 (default: 1000)")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work or given.seed is not None:
        door, text = given.work or (given.door, str(given.seed))
        seeds = range(*map(int, text.split(":"))) if ":" in text else map(int, text.split(","))
        if not given.work:
            os.environ["FUZZ_TRACEBACK"] = "1"
        with tempfile.TemporaryDirectory() as folder:
            for outcome in run_cases(door, _announced(seeds), pathlib.Path(folder)):
                print(json.dumps(outcome), flush=True)
        return 0
    state: dict[str, int] = json.loads(_STATE.read_text()) if _STATE.exists() else {}
    found: dict[str, list[int]] = json.loads(FOUND.read_text())
    wrong = 0
    for door in [given.door] if given.door else DOORS:
        first, count = state.get(door, 0), given.count * DOORS[door].share
        begin = time.monotonic()
        counts, findings = _run(door, first, count)
        print(f"\r{door}: {dict(counts)} in {time.monotonic() - begin:.0f} s, seeds {first} to {first + count - 1}")
        found[door] = sorted({*found.get(door, []), *(seed for seed, _ in findings)})
        wrong += len(findings)
        FOUND.write_text(json.dumps({name: found[name] for name in sorted(found) if found[name]}, indent=1) + "\n")
        _STATE.parent.mkdir(exist_ok=True)
        _STATE.write_text(json.dumps({**state, door: first + count}))
        state[door] = first + count
    print(f"{wrong} findings" if wrong else f"no finding; none took {SECONDS} seconds or a gigabyte")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
