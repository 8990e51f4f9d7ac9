"""What flattening costs for every class of cache layer: 32 layers, against a plain list of the same leaves.

    python benchmarks/bench_layers.py [--json FILE] [--repeat N] [--processes N] [NAME ...]

A row is measured in one process, next to the plain list; the least of many short samples counts, since other processes
only ever add to it. So does the least of several processes: which names fall together in Python's cache of attributes
is chance, and lasts as long as a process.

*Least* is the least that is possible in Python: two functions written for these very layers, registered with torch as
any others. One reads the leaves and checks nothing, the other allocates the layers and assigns what they hold, checks
nothing and finds nothing out::

    def flatten(cache):
        leaves = []
        for o0 in cache.layers:
            leaves.append(o0.keys)
            leaves.append(o0.values)
        return leaves, None

    def unflatten(leaves, context):
        layers = []
        it = iter(leaves)
        for x0, x1 in zip(it, it):
            obj = new(C0)
            obj.keys = x0
            obj.values = x1
            obj.is_initialized = True
            obj.dtype = x0.dtype
            obj.device = x0.device
            layers.append(obj)
        cache = new(Cache)
        cache.layers = layers
        return cache

What is above ten times the list is named; a cache of `DynamicLayer` above ten times makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import timeit
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the makers of all layers are part of the tests

from benchmarks.bench_flatten import machine, versions  # found there only

LAYERS, PAST, AIM = 32, 12, 10.0
OPERATIONS = ("tree_flatten", "tree_unflatten")
MIXED = {
    "D and W in turns": ["DynamicLayer", "DynamicSlidingWindowLayer"],
    "L and D in turns": ["LinearAttentionLayer", "DynamicLayer"],
    "S and X in turns": ["StaticLayer", "StaticSlidingWindowLayer"],
}


def make_cache(names: list[str]) -> Any:
    from transformers.cache_utils import DynamicCache

    from tests.flatten.huggingface.caches.every_cache import layer_of

    cache = DynamicCache()
    cache.layers = [layer_of(names[index % len(names)], PAST) for index in range(LAYERS)]
    return cache


def fastest(functions: dict[str, Callable[[], Any]], repeat: int, seconds: float = 0.0006) -> dict[str, float]:
    """The least µs per call; the samples alternate, so that a busy moment of the machine hits all alike."""
    timers = {name: timeit.Timer(function) for name, function in functions.items()}
    numbers = {name: max(1, round(seconds / (timer.timeit(20) / 20))) for name, timer in timers.items()}
    found = dict.fromkeys(functions, float("inf"))
    for _ in range(repeat):
        for name, timer in timers.items():
            found[name] = min(found[name], 1e6 * timer.timeit(numbers[name]) / numbers[name])
    return found


class Least:
    """The source that a person would write for layers that are known in every detail.

    Args:
        layers: filled ones; the layers of a cache repeat them.
        length: the leaf at the end that states how many tokens were seen; ``None`` if there is none.
    """

    def __init__(self, layers: list[Any], *, length: Any) -> None:
        import torch

        from yobx_flatten.huggingface.caches.state import leaf_paths, lengths_of, read_state

        self.scope: dict[str, Any] = {"new": object.__new__, "full": torch.full, "Cache": type("Cache", (), {})}
        self.layers, self.length = layers, length
        self.templates = [read_state(vars(layer), in_cache=True)[0] for layer in layers]
        self.width = sum(len(leaf_paths(template)) for template in self.templates)
        counted = [(i, name) for i, template in enumerate(self.templates) for name in lengths_of(template)]
        self.counted = "cache.layers[{}].{}".format(*counted[0]) if counted else ""
        self.in_tensor = isinstance(length, torch.Tensor)
        self.read: list[str] = []

    def functions(self) -> tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]]:
        """The class of the cache, its flatten and its unflatten."""
        exec("\n".join([*self._unflatten(), *self._flatten()]), self.scope)
        return self.scope["Cache"], self.scope["flatten"], self.scope["unflatten"]

    def _unflatten(self) -> Iterator[str]:
        yield "def unflatten(leaves, context):"
        yield "    layers = []"
        yield "    it = iter(leaves)"
        yield f"    length = {PAST if self.length is None else 'leaves[-1].item()' if self.in_tensor else 'leaves[-1]'}"
        values = ", ".join(f"x{i}" for i in range(self.width))
        rounds = f"zip({', '.join(['it'] * self.width)})" if self.width else f"range({LAYERS // len(self.layers)})"
        yield f"    for {f'{values},' if self.width else '_'} in {rounds}:"
        for number, (layer, template) in enumerate(zip(self.layers, self.templates, strict=True)):
            first = len(self.read)
            self.scope[f"C{number}"] = type(layer)
            yield f"        obj = new(C{number})"
            late = {name: entry for name, entry in template.items() if entry[0] == "shape"}
            for name, value in vars(layer).items():
                if name not in late:
                    entry = template.get(name, ["fixed"])
                    yield f"        obj.{name} = {self._write(entry, value, f'o{number}.{name}', first)}"
            for leaf in sorted({entry[1] for entry in late.values()}):
                yield f"        shape{leaf} = x{first + leaf}.shape"
            yield from (f"        obj.{name} = shape{leaf}[{axis}]" for name, (_, leaf, axis) in late.items())
            yield "        layers.append(obj)"
        yield "    cache = new(Cache)"
        yield "    cache.layers = layers"
        yield "    return cache"

    def _flatten(self) -> Iterator[str]:
        step, names = len(self.layers), [f"o{i}" for i in range(len(self.layers))]
        turns = ", ".join(f"cache.layers[{i}::{step}]" for i in range(step))
        yield "def flatten(cache):"
        yield "    leaves = []"
        yield f"    for {', '.join(names)} in {f'zip({turns})' if step > 1 else 'cache.layers'}:"
        yield from [f"        leaves.append({place})" for place in self.read] or ["        pass"]
        if self.length is not None:
            yield f"    leaves.append({f'full((), {self.counted})' if self.in_tensor else self.counted})"
        yield "    return leaves, None"

    def _write(self, entry: list[Any], value: Any, place: str, first: int) -> str:
        kind, *rest = entry
        if kind in ("tensor", "number"):
            self.read.append(place)
            return f"x{len(self.read) - 1}"
        if kind == "same":
            return f"x{first + rest[0]}"
        if kind in ("dtype", "device"):
            return f"x{first + rest[0]}.{kind}"
        if kind == "length":
            return "length"
        if type(value) is dict:
            entries = [below for _, below in rest[0]] if kind == "dict" else [["fixed"]] * len(value)
            parts = [
                f"{key!r}: {self._write(below, x, f'{place}[{key!r}]', first)}"
                for (key, x), below in zip(value.items(), entries, strict=True)
            ]
            return f"{{{', '.join(parts)}}}"
        if kind in ("list", "tuple"):
            pairs = enumerate(zip(rest[0], value, strict=True))
            items = "".join(f"{self._write(below, x, f'{place}[{i}]', first)}, " for i, (below, x) in pairs)
            return f"[{items}]" if kind == "list" else f"({items})"
        if isinstance(value, int | str | None):
            return repr(value)
        self.scope[f"K{len(self.scope)}"] = value
        return f"K{len(self.scope) - 1}"


def measure(names: list[str], repeat: int) -> dict[str, Any]:
    from torch.utils import _pytree as pytree

    cache = make_cache(names)
    leaves, spec = pytree.tree_flatten(cache)
    plain = list(leaves)
    _, list_spec = pytree.tree_flatten(plain)
    length = leaves[-1] if spec.context[-1] == "length" else None
    cls, flatten, unflatten = Least(cache.layers[: len(names)], length=length).functions()
    pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"bench_layers.{'+'.join(names)}")
    least_cache = unflatten(leaves, None)
    least_leaves, least_spec = pytree.tree_flatten(least_cache)
    if not same(leaves, least_leaves) or list(map(vars, cache.layers)) != list(map(vars, least_cache.layers)):
        raise AssertionError(f"{names}: what was written by hand does something else")
    found = fastest(
        {
            "tree_flatten": lambda: pytree.tree_flatten(cache),
            "list tree_flatten": lambda: pytree.tree_flatten(plain),
            "least tree_flatten": lambda: pytree.tree_flatten(least_cache),
            "tree_unflatten": lambda: pytree.tree_unflatten(leaves, spec),
            "list tree_unflatten": lambda: pytree.tree_unflatten(plain, list_spec),
            "least tree_unflatten": lambda: pytree.tree_unflatten(leaves, least_spec),
        },
        repeat,
    )
    return {"leaves": len(leaves), "microseconds": found, "ratios": ratios_of(found)}


def ratios_of(found: dict[str, float]) -> dict[str, float]:
    return {
        f"{prefix}{operation}": found[f"{prefix}{operation}"] / found[f"list {operation}"]
        for operation in OPERATIONS
        for prefix in ("", "least ")
    }


def measure_all(rows: dict[str, list[str]], repeat: int) -> dict[str, Any]:
    from yobx_flatten import register_cache_flattening, unregister_cache_flattening

    for names in rows.values():
        make_cache(names)  # models import other models: before the registration
    undo = register_cache_flattening(patch_transformers=True)
    results = {name: measure(names, repeat) for name, names in rows.items()}
    unregister_cache_flattening(undo)
    return results


def measure_apart(names: Iterable[str], repeat: int) -> dict[str, Any]:
    """Measure in another process."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        options = ["--processes", "1", "--repeat", str(repeat), "--json", file.name]
        subprocess.run([sys.executable, __file__, *options, *names], stdout=subprocess.DEVNULL, check=False)
        results: dict[str, Any] = json.load(file)["results"]
    return results


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Keep the least of each number."""
    results = {}
    for name, first in runs[0].items():
        times = [run[name]["microseconds"] for run in runs]
        found = {key: min(time[key] for time in times) for key in times[0]}
        results[name] = {**first, "microseconds": found, "ratios": ratios_of(found)}
    return results


def same(leaves: list[Any], others: list[Any]) -> bool:
    import torch

    return len(leaves) == len(others) and all(
        a is b or (a.dim() == 0 and torch.equal(a, b)) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(leaves, others, strict=True)
    )


def rows_of(results: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, found in results.items():
        cells = [name, str(found["leaves"])]
        for operation in OPERATIONS:
            ours, plain = (found["microseconds"][f"{prefix}{operation}"] for prefix in ("", "list "))
            ratios = (found["ratios"][f"{prefix}{operation}"] for prefix in ("", "least "))
            cells.append(f"{ours:6.1f} µs, list {plain:5.1f}")
            cells += [f"{ratio:.2f}x" if found["leaves"] else "no leaf" for ratio in ratios]
        rows.append(cells)
    return rows


def above(results: dict[str, Any], bar: float) -> list[str]:
    return [
        f"{name}: {operation} {found['ratios'][operation]:.2f}x, least {found['ratios'][f'least {operation}']:.2f}x"
        for name, found in results.items()
        for operation in OPERATIONS
        if found["leaves"] and found["ratios"][operation] > bar
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="the rows to measure; all of them by default")
    parser.add_argument("--json", metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--repeat", type=int, default=250, help="samples per number; the least counts")
    parser.add_argument("--processes", type=int, default=5, help="how many to measure in; the least counts")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # what is measured is time
    from tests.flatten.huggingface.caches.every_cache import LAYERS as CLASSES

    rows = {**{name: [name] for name in CLASSES}, **MIXED}
    rows = {name: rows[name] for name in options.names or rows}
    if options.processes == 1:
        results = measure_all(rows, options.repeat)
    else:
        results = merged([measure_apart(rows, options.repeat) for _ in range(options.processes)])
    head = ["32 layers", "leaves", "flatten", "times the list", "least", "unflatten", "times the list", "least"]
    table = [head, *rows_of(results)]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    missed = above(results, AIM)
    for line in missed:
        print(f"above {AIM}x:", line)
    if options.json:
        content = {"machine": machine(), "versions": versions(), "results": results, "above 10x": missed}
        Path(options.json).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if above({name: row for name, row in results.items() if name == "DynamicLayer"}, AIM) else 0


if __name__ == "__main__":
    sys.exit(main())
