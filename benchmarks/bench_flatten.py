"""What flattening a cache costs: 32 layers, 64 tensors, against a plain list of them and against peers.

    python benchmarks/bench_flatten.py [--json FILE] [--repeat N]

Every row is measured in a separate process, next to the plain list, so that the ratio compares numbers of one
process. Bars: `tree_unflatten` at most 3x the list, `tree_flatten` at most 1.5x, entering and leaving a warm block at
most 300 µs. The exit status states whether ours meet them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import timeit
import warnings
from collections.abc import Callable
from typing import Any

LAYERS, WINDOW, PAST = 32, 512, 24
OPERATIONS = ("tree_flatten", "tree_unflatten", "tree_flatten_with_path")
BARS = {"tree_flatten": 1.5, "tree_unflatten": 3.0}
BLOCK_BAR = 300.0  # µs

# row -> what is registered, which layers
ROWS = {
    "ours, D": ("ours", "D"),
    "ours, D+W": ("ours", "DW"),
    "ours, W": ("ours", "W"),
    "executorch registration, D": ("executorch", "D"),
    "transformers.exporters, D": ("exporters", "D"),
    "transformers.exporters, D+W": ("exporters", "DW"),
    "onnx-diagnostic, D": ("onnx_diagnostic", "D"),
}


def make_cache(layers: str) -> Any:
    import torch
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache()
    for index in range(LAYERS):
        sliding = layers[index % len(layers)] == "W"
        cache.layers.append(DynamicSlidingWindowLayer(WINDOW) if sliding else DynamicLayer())
        cache.update(torch.randn(1, 4, PAST, 16), torch.randn(1, 4, PAST, 16), index)
    if layers != "D":
        cache.layer_class_to_replicate = None
    return cache


def register(how: str) -> None:
    """Register `DynamicCache` for the rest of the process."""
    if how == "ours":
        from yobx_flatten import register_cache_flattening

        register_cache_flattening(patch_transformers=True)
    elif how == "executorch":
        from transformers.integrations import executorch

        executorch.register_dynamic_cache_export_support()
    elif how == "exporters":
        from transformers.cache_utils import DynamicCache
        from transformers.exporters.exporter_dynamo import register_pytree_node

        register_pytree_node(DynamicCache)
    else:
        from onnx_diagnostic.torch_export_patches import register_cache_serialization

        register_cache_serialization(patch_transformers=True)


def once(function: Callable[[], Any], seconds: float = 0.02) -> tuple[timeit.Timer, int]:
    """A timer, and how often it is to call for one sample."""
    timer = timeit.Timer(function)
    timer.timeit(20)  # warm
    return timer, max(1, round(seconds / (timer.timeit(20) / 20)))


def side_by_side(functions: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Median µs per call; the samples alternate, so that a busy moment of the machine hits all alike."""
    timers = {name: once(function) for name, function in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeat):
        for name, (timer, number) in timers.items():
            samples[name].append(1e6 * timer.timeit(number) / number)
    return {name: statistics.median(found) for name, found in samples.items()}


def measure_row(row: str, repeat: int) -> dict[str, Any]:
    """The three operations on a cache, and on a list of the same tensors."""
    from torch.utils import _pytree as pytree

    how, layers = ROWS[row]
    cache = make_cache(layers)
    register(how)
    leaves, spec = pytree.tree_flatten(cache)
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    if len(leaves) < len(tensors):
        raise RuntimeError(f"{len(leaves)} leaves for {len(tensors)} tensors")
    _, list_spec = pytree.tree_flatten(tensors)
    found = side_by_side(
        {
            "tree_flatten": lambda: pytree.tree_flatten(cache),
            "list tree_flatten": lambda: pytree.tree_flatten(tensors),
            "tree_unflatten": lambda: pytree.tree_unflatten(leaves, spec),
            "list tree_unflatten": lambda: pytree.tree_unflatten(tensors, list_spec),
            "tree_flatten_with_path": lambda: pytree.tree_flatten_with_path(cache),
            "list tree_flatten_with_path": lambda: pytree.tree_flatten_with_path(tensors),
        },
        repeat,
    )
    return {"microseconds": found, "ratios": {op: found[op] / found[f"list {op}"] for op in OPERATIONS}}


def measure_block(_: str, repeat: int) -> dict[str, Any]:
    """The first block of a process, with transformers imported, and the later ones."""
    import torch.utils._pytree  # what a user has imported before
    from transformers.cache_utils import DynamicCache  # noqa: F401

    begin = time.perf_counter()
    from yobx_flatten import register_flattening_functions

    imported = time.perf_counter()

    def block() -> None:
        with register_flattening_functions(patch_transformers=True):
            pass

    block()
    first = time.perf_counter()
    warm = side_by_side({"warm": block}, repeat)["warm"]
    import torch.export  # noqa: F401
    from torch.export import _trace  # noqa: F401

    with_export = side_by_side({"warm": block}, repeat)["warm"]
    return {
        "microseconds": {
            "import": 1e6 * (imported - begin),
            "first block": 1e6 * (first - imported),
            "warm block": warm,
            "warm block, torch.export imported": with_export,
        }
    }


def in_a_process(row: str, repeat: int) -> dict[str, Any]:
    """Measure one row in a separate process; a peer that is not installed prints that."""
    command = [sys.executable, __file__, "--row", row, "--repeat", str(repeat)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": lines[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "optree", "onnx-diagnostic"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> str:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.system()}"


def table_of(results: dict[str, Any]) -> list[list[str]]:
    rows = []
    for row in ROWS:
        found = results[row]
        if "error" in found:
            rows.append([row, f"not measured: {found['error'][:90]}", "", ""])
            continue
        cells = [f"{found['microseconds'][op]:7.1f} µs  {found['ratios'][op]:5.2f}x" for op in OPERATIONS]
        rows.append([row, *cells])
    return rows


def show(results: dict[str, Any]) -> None:
    head, rows = ["cache of 32 layers, 64 tensors", *OPERATIONS], table_of(results)
    title = f"median µs, and times the plain list in the same process. {machine()}; " + ", ".join(
        f"{name} {version}" for name, version in versions().items()
    )
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
        for line in [head, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    else:
        table = Table(*head, title=title)
        for line in rows:
            table.add_row(*line)
        Console(width=None if sys.stdout.isatty() else 130).print(table)
    block = results["block"]
    if "error" in block:
        print(f"block: not measured: {block['error']}")
    else:
        print("block: " + ", ".join(f"{name} {value:,.0f} µs" for name, value in block["microseconds"].items()))


def missed_bars(results: dict[str, Any]) -> list[str]:
    missed = []
    for row, (how, _) in ROWS.items():
        if how != "ours":
            continue
        if "error" in results[row]:
            missed.append(f"{row}: {results[row]['error']}")
            continue
        ratios = results[row]["ratios"]
        missed += [f"{row}: {op} {ratios[op]:.2f}x, bar {bar}x" for op, bar in BARS.items() if ratios[op] > bar]
    for name, value in results["block"].get("microseconds", {}).items():
        if name.startswith("warm") and value > BLOCK_BAR:
            missed.append(f"{name}: {value:.0f} µs, bar {BLOCK_BAR:.0f} µs")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--repeat", type=int, default=15, help="samples per number; the median counts")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        warnings.simplefilter("ignore")  # peers' deprecations are not what is measured
        measure = measure_block if options.row == "block" else measure_row
        print(json.dumps(measure(options.row, options.repeat)))
        return 0
    results = {row: in_a_process(row, options.repeat) for row in [*ROWS, "block"]}
    show(results)
    missed = missed_bars(results)
    for line in missed:
        print("missed:", line)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"machine": machine(), "versions": versions(), "results": results, "missed": missed}, file, indent=1
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
