"""What flattening costs for every class of cache layer: 32 layers, against a plain list of the same leaves.

    python benchmarks/bench_layers.py [--json FILE] [--repeat N] [NAME ...]

All rows are measured in one process, each next to the plain list; the least of many short samples counts, since other
processes only ever add to it. The last column is the floor: what Python needs to allocate 32 objects of the class and
assign their attributes, without finding out which, beside what torch needs for the leaves.

What is above twice the list is named; above four times, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the makers of all layers are part of the tests

from benchmarks.bench_flatten import machine, versions  # found there only

LAYERS, PAST, AIM, LIMIT = 32, 12, 2.0, 4.0
MIXED = {
    "D and W in turns": ["DynamicLayer", "DynamicSlidingWindowLayer"],
    "L and D in turns": ["LinearAttentionLayer", "DynamicLayer"],
    "S and X in turns": ["StaticLayer", "StaticSlidingWindowLayer"],
}


def make_cache(names: list[str]) -> Any:
    from transformers.cache_utils import DynamicCache

    from tests.flatten.every_cache import layer_of

    cache = DynamicCache()
    cache.layers = [layer_of(names[index % len(names)], PAST) for index in range(LAYERS)]
    return cache


def least(functions: dict[str, Callable[[], Any]], repeat: int, seconds: float = 0.0006) -> dict[str, float]:
    """The least µs per call; the samples alternate, so that a busy moment of the machine hits all alike."""
    timers = {name: timeit.Timer(function) for name, function in functions.items()}
    numbers = {name: max(1, round(seconds / (timer.timeit(20) / 20))) for name, timer in timers.items()}
    found = dict.fromkeys(functions, float("inf"))
    for _ in range(repeat):
        for name, timer in timers.items():
            found[name] = min(found[name], 1e6 * timer.timeit(numbers[name]) / numbers[name])
    return found


def floor_of(cache: Any) -> Callable[[], Any]:
    """The source that a person would write for these very layers, to allocate them and assign what they hold."""
    import torch

    from yobx_flatten.huggingface.state import SIZES

    names = [list(vars(layer)) for layer in cache.layers]
    scope: dict[str, Any] = {"new": object.__new__}
    lines = ["def build():", "    objects = []"]
    groups: dict[Any, list[Any]] = {}
    for layer, attributes in zip(cache.layers, names, strict=True):
        groups.setdefault((type(layer), tuple(attributes)), []).append(layer)
    for number, ((cls, attributes), layers) in enumerate(groups.items()):
        scope[f"cls{number}"] = cls
        scope[f"rows{number}"] = [tuple(vars(layer).values()) for layer in layers]
        lines.append(f"    for {', '.join(f'v{i}' for i in range(len(attributes)))}, in rows{number}:")
        lines.append(f"        obj = new(cls{number})")
        for i, (name, value) in enumerate(vars(layers[0]).items()):
            written = f"v{i}"
            if isinstance(value, torch.dtype | torch.device):
                leaf = next((j for j, x in enumerate(vars(layers[0]).values()) if isinstance(x, torch.Tensor)), None)
                kind = "dtype" if isinstance(value, torch.dtype) else "device"
                written = written if leaf is None else f"v{leaf}.{kind}"
            elif name in SIZES:
                part, axis = SIZES[name]
                written = f"v{attributes.index(part)}.shape[{axis}]"
            elif isinstance(value, dict):
                written = "{" + ", ".join(f"{key!r}: v{i}[{key!r}]" for key in value) + "}"
            lines.append(f"        obj.{name} = {written}")
        lines.append("        objects.append(obj)")
    lines.append("    return objects")
    exec("\n".join(lines), scope)
    build: Callable[[], Any] = scope["build"]
    return build


def measure(names: list[str], repeat: int) -> dict[str, Any]:
    from torch.utils import _pytree as pytree

    cache = make_cache(names)
    leaves, spec = pytree.tree_flatten(cache)
    plain = list(leaves)
    _, list_spec = pytree.tree_flatten(plain)
    found = least(
        {
            "tree_flatten": lambda: pytree.tree_flatten(cache),
            "list tree_flatten": lambda: pytree.tree_flatten(plain),
            "tree_unflatten": lambda: pytree.tree_unflatten(leaves, spec),
            "list tree_unflatten": lambda: pytree.tree_unflatten(plain, list_spec),
            "allocate and assign": floor_of(cache),
        },
        repeat,
    )
    below = found["list tree_unflatten"]
    ratios = {
        operation: found[operation] / found[f"list {operation}"] for operation in ("tree_flatten", "tree_unflatten")
    }
    ratios["floor of tree_unflatten"] = (below + found["allocate and assign"]) / below
    return {"leaves": len(leaves), "microseconds": found, "ratios": ratios}


def rows_of(results: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, found in results.items():
        times, ratios = found["microseconds"], found["ratios"]
        cells = [
            f"{times[operation]:6.1f} µs, list {times[f'list {operation}']:5.1f}" for operation in list(ratios)[:2]
        ]
        numbers = [f"{ratio:.2f}x" if found["leaves"] else "no leaf" for ratio in ratios.values()]
        rows.append([name, str(found["leaves"]), cells[0], numbers[0], cells[1], numbers[1], numbers[2]])
    return rows


def above(results: dict[str, Any], bar: float) -> list[str]:
    return [
        f"{name}: {operation} {found['ratios'][operation]:.2f}x"
        for name, found in results.items()
        for operation in ("tree_flatten", "tree_unflatten")
        if found["leaves"] and found["ratios"][operation] > bar
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="the rows to measure; all of them by default")
    parser.add_argument("--json", metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--repeat", type=int, default=250, help="samples per number; the least counts")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # what is measured is time
    from tests.flatten.every_cache import LAYERS as CLASSES
    from yobx_flatten import register_cache_flattening, unregister_cache_flattening

    rows = {**{name: [name] for name in CLASSES}, **MIXED}
    caches = {name: rows[name] for name in options.names or rows}
    for names in caches.values():
        make_cache(names)  # models import other models: before the registration
    undo = register_cache_flattening(patch_transformers=True)
    results = {name: measure(names, options.repeat) for name, names in caches.items()}
    unregister_cache_flattening(undo)
    head = ["32 layers", "leaves", "flatten", "times the list", "unflatten", "times the list", "floor"]
    lines = [head, *rows_of(results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    missed = above(results, AIM)
    for line in missed:
        print(f"above {AIM}x:", line)
    if options.json:
        content = {"machine": machine(), "versions": versions(), "results": results, "above 2x": missed}
        Path(options.json).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if above(results, LIMIT) else 0


if __name__ == "__main__":
    sys.exit(main())
