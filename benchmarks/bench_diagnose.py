"""What a search for unregistered objects costs, per node: at most 50 µs.

    python benchmarks/bench_diagnose.py [--repeat N]

A node is an object that the search looks into or counts: containers, objects, tensors. Paths grow with the depth, and
so does what an object costs that is a thousand deep; then what `explain` costs, and torch's own walk, which stops
at the first object. The exit status states whether the bar is met.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from yobx_flatten.huggingface.cache_names import installed_name

BAR = 50.0  # µs per node


class Plain:
    """An object with a dictionary."""

    def __init__(self, *children: Any) -> None:
        for number, child in enumerate(children):
            setattr(self, f"child_{number}", child)


class Slotted:
    """An object with slots."""

    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


def trees() -> dict[str, tuple[Any, int]]:
    """Each tree with its number of nodes."""
    import torch
    from transformers import DynamicCache

    x = torch.zeros(2, 3)

    def binary(depth: int, make: Callable[[Any, Any], Any]) -> Any:
        return x if depth == 0 else make(binary(depth - 1, make), binary(depth - 1, make))

    def cache(layers: int) -> Any:
        made = DynamicCache()
        for layer in range(layers):
            made.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), layer)
        return made

    chain: Any = x
    for _ in range(300):
        chain = Plain(chain)
    return {
        "lists and dicts, 2^10 tensors": (binary(10, lambda a, b: {"a": a, "b": [b]}), 2**10 + 2 * (2**10 - 1)),
        "objects, 2^10 tensors": (binary(10, Plain), 2**11 - 1),
        "objects with slots, 2^10 tensors": (binary(10, Slotted), 2**11 - 1),
        "objects, one inside the other, 300": (chain, 301),
        "a list of 10,000 numbers in an object": (Plain([1] * 10_000, x), 10_003),
        # the cache, its list, 32 layers with two tensors each
        "a cache of 32 layers": ({installed_name(): cache(32)}, 3 + 32 + 64),
    }


def microseconds(function: Callable[[], Any], repeat: int) -> float:
    """Median of several calls."""
    samples = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        function()
        samples.append(1e6 * (time.perf_counter() - start))
    return statistics.median(samples[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    import torch
    import torch.utils._pytree as pytree

    from yobx_flatten import explain, find_unregistered

    print(f"torch {torch.__version__}, Python {platform.python_version()}, median of {repeat}, µs")
    print(f"{'tree':<40} {'nodes':>7} {'per node':>9} {'all':>9} {'explain':>9} {'torch':>9}")
    worst = 0.0
    for name, (tree, nodes) in trees().items():
        found = microseconds(lambda tree=tree: find_unregistered(tree), repeat)
        drawn = microseconds(lambda tree=tree: explain(tree), repeat)
        walked = microseconds(lambda tree=tree: pytree.tree_flatten_with_path(tree), repeat)
        worst = max(worst, found / nodes)
        print(f"{name:<40} {nodes:>7} {found / nodes:>9.2f} {found:>9.0f} {drawn:>9.0f} {walked:>9.0f}")
    print(f"worst: {worst:.1f} µs per node, bar {BAR:.0f}")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
