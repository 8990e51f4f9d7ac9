"""What storing nested inputs costs: seconds, and memory above that of the inputs, next to `torch.save`.

    python benchmarks/bench_store.py [--json FILE] [--gigabytes N] [--repeat N] [--folder DIR]

Each number comes from a separate process, which makes the inputs (or reads them) and notes the peak of its resident
memory. `torch.save` pickles; it is there for scale. Bars: what is read is
what was written, bit by bit; the peak is at most the inputs, one tensor and 200 MB above that of a process that has
imported torch and this package. The exit status states whether they are met.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from bench_flatten import machine, versions

from yobx_flatten import leaves, load_nested, pytree_dataclass, save_nested

ALLOWED = 200e6  # bytes
ROWS = ("save_nested", "torch.save", "load_nested", "torch.load")


@pytree_dataclass(backends=("torch",))
@dataclasses.dataclass
class State:
    keys: Any
    values: Any


def make(gigabytes: float) -> dict[str, Any]:
    """Ten layers; one tensor in ten is not contiguous. The largest tensor is a tenth of the whole."""
    torch.manual_seed(0)
    size = int(gigabytes * 1e9) // 80
    layers = []
    for _ in range(5):
        wide = torch.empty(8, size // 4, dtype=torch.bfloat16).normal_()
        tall = torch.empty(size // 4, 4, dtype=torch.float32).normal_().t()
        counts = torch.empty(size // 2, dtype=torch.int64).random_()
        layers.append(State([wide, counts], {"tall": tall, "ids": torch.empty(4 * size, dtype=torch.uint8).random_()}))
    return {"layers": layers, "mask": torch.ones(3, 4, dtype=torch.bool), "scale": 0.5, "nothing": None}


def memory(field: str) -> float:
    """Bytes of this process, as Linux counts them: `VmRSS` now, `VmHWM` at the peak."""
    lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def digest(values: Any) -> str:
    found = hashlib.blake2b()
    for leaf in leaves(values):
        found.update(repr((leaf.path, getattr(leaf.value, "dtype", leaf.value))).encode())
        if isinstance(leaf.value, torch.Tensor):
            found.update(leaf.value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def child(row: str, path: str, gigabytes: float) -> dict[str, Any]:
    """One measurement, in this process."""
    torch.set_num_threads(1)
    start = memory("VmRSS")
    values = make(gigabytes) if "save" in row else None
    before = time.perf_counter()
    if row == "save_nested":
        save_nested(path, values)
    elif row == "load_nested":
        values = load_nested(path)
    elif row == "torch.save":
        torch.save(values, path)
    else:
        values = torch.load(path, weights_only=False)
    seconds, peak = time.perf_counter() - before, memory("VmHWM")
    tensors = [leaf.value for leaf in leaves(values) if isinstance(leaf.value, torch.Tensor)]
    sizes = [tensor.nbytes for tensor in tensors]
    return {
        "seconds": seconds,
        "inputs": sum(sizes),
        "largest": max(sizes),
        "above": peak - start - sum(sizes),
        "digest": digest(values),
    }


def measure(gigabytes: float, repeat: int, folder: str) -> dict[str, dict[str, Any]]:
    """Return row -> its measurement with the fewest seconds, and the largest peak."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=folder) as made:
        for _ in range(repeat):
            for row in ROWS:
                path = str(pathlib.Path(made) / ("ours.onnx" if "nested" in row else "torchs.pt"))
                command = [sys.executable, __file__, "--child", row, path, "--gigabytes", str(gigabytes)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                last = results.setdefault(row, found)
                last["seconds"] = min(last["seconds"], found["seconds"])
                last["above"] = max(last["above"], found["above"])
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--gigabytes", type=float, default=2.5, help="of nested inputs")
    parser.add_argument("--repeat", type=int, default=2, help="runs per number; the fastest and the largest count")
    parser.add_argument("--folder", default=".", help="where the files are written, and removed again")
    parser.add_argument("--child", nargs=2, metavar=("ROW", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child, options.gigabytes)))
        return 0
    results = measure(options.gigabytes, options.repeat, options.folder)
    print(
        f"{options.gigabytes} GB of nested inputs, {options.repeat} runs each. {machine()}; "
        + ", ".join(f"{name} {version}" for name, version in versions().items())
    )
    print(f"\n{'':14}{'seconds':>10}{'GB/s':>8}{'MB above the inputs':>22}")
    for row, found in results.items():
        speed = found["inputs"] / 1e9 / found["seconds"]
        print(f"{row:14}{found['seconds']:10.2f}{speed:8.2f}{found['above'] / 1e6:22.0f}")
    missed = []
    for row in ("save_nested", "load_nested"):
        found = results[row]
        if found["above"] > found["largest"] + ALLOWED:
            missed.append(f"{row}: {found['above'] / 1e6:.0f} MB above, largest tensor {found['largest'] / 1e6:.0f} MB")
    if results["load_nested"]["digest"] != results["save_nested"]["digest"]:
        missed.append("load_nested: what was read is not what was written")
    for line in missed:
        print("missed:", line)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine(), "versions": versions(), "results": results, "missed": missed}, file)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
