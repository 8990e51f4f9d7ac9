"""Train in many random orders and compare every bit: ``python -m tests.accelerator.interleavings 10000 --jobs 2``.

It continues where it stopped: seeds that were tried are in ``build/accelerator/interleavings.json``, for this source.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

_ROOT = Path(__file__).parents[2]
_RECORD = _ROOT / "build" / "accelerator" / "interleavings.json"

# Seeds of one process.
_CHUNK = 1000

# Which training, on how many devices; seed after seed takes the next one. A step that is applied later shows in the
# third one first.
VARIANTS: list[dict[str, Any]] = [
    *({"grain": grain, "devices": devices} for grain in ("stage", "layer") for devices in (1, 2, 4)),
    *({"classic": True, "devices": devices} for devices in (1, 2, 3)),
    *({"is_async": late, "steps": 3, "devices": devices} for late in (True, "exact") for devices in (1, 2, 4)),
    *({"checkpoints": True, "devices": devices} for devices in (1, 2)),
    *({"pin": "off", "devices": devices} for devices in (1, 2)),
    *({"copies": 2, "devices": devices} for devices in (2, 3)),
    *({"keep": 1.0, "is_async": late, "devices": devices} for late in (False, "exact") for devices in (1, 2)),
]


def _source() -> str:
    key = hashlib.sha256()
    for folder in ("roundpipe_runtime", "tests/accelerator"):
        for file in sorted((_ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".h", ".cpp"):
                key.update(file.read_bytes())
    return key.hexdigest()


def _try(seeds: range, mutant: str | None) -> None:
    """Train once with each seed; end the process at the first difference."""
    if mutant:
        from tests.accelerator.mutants import install

        install(mutant)
    from tests.accelerator import late
    from tests.accelerator.training import Log, expected, late_devices, train
    from tests.runtime.small import same_bits

    variants = [{"steps": 2, "is_short": True, **variant} for variant in VARIANTS]
    counts = [variant.pop("devices") for variant in variants]
    # An exact step and copies of a stage leave what a step without them does, which is computed in their place.
    right = [expected(**{**one, "is_async": one.get("is_async") is True, "copies": 1}) for one in variants]
    for seed in seeds:
        number = seed % len(VARIANTS)
        late.set_order("random", seed)
        log = Log()
        try:
            found = train(late_devices(counts[number]), log=log, **variants[number])
        except Exception as error:
            sys.exit(f"seed {seed}: {error!r} with {VARIANTS[number]}")
        if not same_bits(found, right[number]):
            sys.exit(f"seed {seed}: wrong numbers with {VARIANTS[number]}\n{log.difference(found, right[number])}")


def _run(count: int, jobs: int, record: dict[str, Any]) -> None:
    """Try the seeds below a number that were not tried, in processes of their own."""
    begin, before = time.monotonic(), len(record["done"]) * _CHUNK

    def chunk(first: int) -> tuple[int, subprocess.CompletedProcess[str]]:
        command = [sys.executable, "-m", "tests.accelerator.interleavings", "--seeds", f"{first}:{first + _CHUNK}"]
        return first, subprocess.run(command, cwd=_ROOT, stderr=subprocess.PIPE, text=True)

    with ThreadPoolExecutor(jobs) as threads:
        work = [threads.submit(chunk, first) for first in range(0, count, _CHUNK) if first not in record["done"]]
        for done in as_completed(work):
            first, process = done.result()
            if process.returncode:
                threads.shutdown(cancel_futures=True)
                sys.exit(process.stderr)
            record["done"].append(first)
            _RECORD.write_text(json.dumps(record))
            tried = len(record["done"]) * _CHUNK
            rate = (tried - before) / (time.monotonic() - begin)
            print(f"{tried} orders, all the same bits; {rate:.0f} a second", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=10_000, help="number of orders in all, in thousands")
    parser.add_argument("--again", action="store_true", help="begin with the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was tried to this file")
    parser.add_argument("--seeds", metavar="FIRST:STOP", help="try these seeds here, and record nothing")
    parser.add_argument("--mutant", metavar="NAME", help="with --seeds: a removal of tests.accelerator.mutants")
    arguments = parser.parse_args()
    if arguments.seeds:
        _try(range(*map(int, arguments.seeds.split(":"))), arguments.mutant)
        return
    record: dict[str, Any] = {"source": _source(), "done": []}
    if _RECORD.exists() and not arguments.again:
        before = json.loads(_RECORD.read_text())
        if before["source"] == record["source"]:
            record = before
    _RECORD.parent.mkdir(parents=True, exist_ok=True)
    _run(arguments.count, arguments.jobs, record)
    orders = len(record["done"]) * _CHUNK
    print(f"{orders} orders have been tried with this source, all the same bits")
    if arguments.json:
        from benchmarks.bench_flatten import machine, versions

        content = {"machine": machine(), "versions": versions(), "orders": orders, "wrong": 0, "variants": VARIANTS}
        arguments.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    status: object = 0
    try:
        main()
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread of autograd for a device may abort a process that ends after a backward
    os._exit(status if isinstance(status, int) else int(bool(status)))
