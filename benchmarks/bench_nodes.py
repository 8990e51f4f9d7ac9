"""What one node costs: classes of two fields, registered by torch's `register_dataclass` and by ours, in one process.

    python benchmarks/bench_nodes.py [--json FILE] [--repeat N]

Two numbers per operation, on a list of 32 nodes with 64 tensors. *functions*: the registered function called for each
node, which is what a registration answers for. *whole tree*: torch's own `tree_flatten` and its relatives around it,
which spend most of their time on their own bookkeeping; the row `floor` shows how much, with a flatten function that
returns a constant. Bar: the flatten function at most 3 times torch's, since its code is not generated. The exit status
states whether it is met.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from bench_flatten import machine, once, versions

from yobx_flatten import pytree_dataclass, register_pytree_node, register_pytree_node_class

NODES = 32
BAR = 3.0
OPERATIONS = ("flatten", "flatten with keys", "unflatten")


@dataclasses.dataclass
class Torch:
    a: Any
    b: Any


@pytree_dataclass(backends=("torch",))
class Ours:
    a: Any
    b: Any


@pytree_dataclass(frozen=True, backends=("torch",))
class OursFrozen:
    a: Any
    b: Any


@register_pytree_node_class(backends=("torch",))
@dataclasses.dataclass
class OursByMethods:
    a: Any
    b: Any

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, static: None, children: Any) -> OursByMethods:
        return cls(*children)


@dataclasses.dataclass
class Floor:
    a: Any
    b: Any


CLASSES = {
    "torch.register_dataclass": Torch,
    "pytree_dataclass": Ours,
    "pytree_dataclass, frozen": OursFrozen,
    "register_pytree_node_class": OursByMethods,
    "floor": Floor,
}


def register_the_others() -> None:
    pytree.register_dataclass(Torch, serialized_type_name="bench_nodes.Torch")
    node = Floor(torch.zeros(1), torch.zeros(1))
    children = (node.a, node.b)
    register_pytree_node(Floor, lambda obj: (children, None), lambda static, children: node, backends=("torch",))
    constant = ([node.a, node.b], None)
    pairs = [(pytree.GetAttrKey("a"), node.a), (pytree.GetAttrKey("b"), node.b)]
    # past our own adaptor: nothing can return faster than this
    pytree.SUPPORTED_NODES[Floor] = pytree.NodeDef(
        Floor, lambda obj: constant, lambda children, static: node, lambda obj: (pairs, None)
    )


def functions(cls: type) -> dict[str, Callable[[], Any]]:
    """What torch calls for each node, called for 32."""
    node = pytree.SUPPORTED_NODES[cls]
    nodes = [cls(torch.zeros(1), torch.ones(1)) for _ in range(NODES)]
    children, static = node.flatten_fn(nodes[0])
    flatten, keyed, unflatten = node.flatten_fn, node.flatten_with_keys_fn, node.unflatten_fn
    return {
        # `map`: the loop itself costs next to nothing
        "flatten": lambda: list(map(flatten, nodes)),
        "flatten with keys": lambda: list(map(keyed, nodes)),
        "unflatten": lambda: list(map(unflatten, [children] * NODES, [static] * NODES)),
    }


def whole_tree(cls: type) -> dict[str, Callable[[], Any]]:
    """Call torch's functions on a list of 32 nodes."""
    nodes = [cls(torch.zeros(1), torch.ones(1)) for _ in range(NODES)]
    leaves, spec = pytree.tree_flatten(nodes)
    return {
        "flatten": lambda: pytree.tree_flatten(nodes),
        "flatten with keys": lambda: pytree.tree_flatten_with_path(nodes),
        "unflatten": lambda: pytree.tree_unflatten(leaves, spec),
    }


def fastest(rows: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Fastest µs per call: the calls are short, and a busy machine only ever adds to them. The rows alternate."""
    timers = {row: once(function, seconds=0.002) for row, function in rows.items()}
    found = dict.fromkeys(rows, float("inf"))
    for _ in range(repeat):
        for row, (timer, number) in timers.items():
            found[row] = min(found[row], 1e6 * timer.timeit(number) / number)
    return found


def measure(repeat: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return level -> operation -> row -> µs."""
    register_the_others()
    levels = {
        "functions": {row: functions(cls) for row, cls in CLASSES.items()},
        "whole tree": {row: whole_tree(cls) for row, cls in CLASSES.items()},
    }
    return {
        level: {
            operation: fastest({row: found[operation] for row, found in rows.items()}, repeat)
            for operation in OPERATIONS
        }
        for level, rows in levels.items()
    }


def show(results: dict[str, Any]) -> None:
    print(
        f"{NODES} nodes of two fields, fastest µs and times torch's register_dataclass. {machine()}; "
        + ", ".join(f"{name} {version}" for name, version in versions().items())
    )
    for level, operations in results.items():
        print(f"\n{level:28}" + "".join(f"{operation:>22}" for operation in OPERATIONS))
        for row in CLASSES:
            cells = [
                f"{operations[operation][row]:9.1f} µs {ratio(operations[operation], row):6.2f}x"
                for operation in OPERATIONS
            ]
            print(f"{row:28}" + "".join(f"{cell:>22}" for cell in cells))


def ratio(found: dict[str, float], row: str) -> float:
    return found[row] / found["torch.register_dataclass"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write all numbers to this file")
    parser.add_argument("--repeat", type=int, default=300, help="samples per number; the fastest counts")
    options = parser.parse_args()
    results = measure(options.repeat)
    show(results)
    found = results["functions"]["flatten"]
    missed = [
        f"{row}: flatten {ratio(found, row):.2f}x, bar {BAR:.2f}x"
        for row in ("pytree_dataclass", "pytree_dataclass, frozen")
        if ratio(found, row) > BAR
    ]
    for line in missed:
        print("missed:", line)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine(), "versions": versions(), "results": results, "missed": missed}, file)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
