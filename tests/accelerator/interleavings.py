"""Train in many random orders and compare every bit: ``python -m tests.accelerator.interleavings 10000``.

It continues where it stopped: seeds that were tried are in ``build/accelerator/interleavings.json``, for this source.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

_ROOT = Path(__file__).parents[2]
_RECORD = _ROOT / "build" / "accelerator" / "interleavings.json"

# Which training, on how many devices; seed after seed takes the next one.
VARIANTS = [
    *({"grain": grain, "devices": devices} for grain in ("stage", "layer") for devices in (1, 2, 4)),
    *({"classic": True, "devices": devices} for devices in (1, 2, 3)),
    *({"is_async": True, "devices": devices} for devices in (1, 2, 4)),
    *({"checkpoints": True, "devices": devices} for devices in (1, 2)),
    *({"pin": "off", "devices": devices} for devices in (1, 2)),
]


def _source() -> str:
    key = hashlib.sha256()
    for folder in ("roundpipe_runtime", "tests/accelerator"):
        for file in sorted((_ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".h", ".cpp"):
                key.update(file.read_bytes())
    return key.hexdigest()


def _run(seeds: range, record: dict[str, object]) -> None:
    from tests.accelerator import late
    from tests.accelerator.training import expected, late_devices, train
    from tests.runtime.small import same_bits

    right = [expected(**{key: value for key, value in variant.items() if key != "devices"}) for variant in VARIANTS]
    begin = told = time.monotonic()
    for seed in seeds:
        number = seed % len(VARIANTS)
        options = dict(VARIANTS[number])
        late.set_order("random", seed)
        if not same_bits(train(late_devices(options.pop("devices")), **options), right[number]):
            sys.exit(f"seed {seed}: wrong numbers with {VARIANTS[number]}")
        record["done"] = seed + 1
        if time.monotonic() - told > 10 or seed == seeds[-1]:
            told = time.monotonic()
            _RECORD.write_text(json.dumps(record))
            rate = (seed + 1 - seeds[0]) / (told - begin)
            print(f"{seed + 1} of {seeds.stop} orders, all the same bits; {rate:.0f} a second", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=10_000, help="number of orders in all")
    parser.add_argument("--again", action="store_true", help="begin with the first seed")
    arguments = parser.parse_args()
    record: dict[str, object] = {"source": _source(), "done": 0}
    if _RECORD.exists() and not arguments.again:
        before = json.loads(_RECORD.read_text())
        if before["source"] == record["source"]:
            record = before
    seeds = range(int(str(record["done"])), arguments.count)
    if not seeds:
        print(f"{record['done']} orders have been tried with this source, all the same bits")
        return
    _RECORD.parent.mkdir(parents=True, exist_ok=True)
    _run(seeds, record)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a thread of autograd for a device may abort a process that ends after a backward
