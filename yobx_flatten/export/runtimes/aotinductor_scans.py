"""Pass a scan the sizes of its results, which AOTInductor allocates before the loop starts.

torch's own front end lifts sizes into loops, and ``torch.export`` without ``strict`` does not; without them
``torch._inductor.fx_passes.post_grad.decompose_scan_to_while_loop`` raises ``KeyError`` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node


def lift_sizes(module: GraphModule) -> None:
    """Hand every scan of a graph the sizes of its outputs."""
    # module: the graph; its scans and their bodies are changed
    changed = False
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
        body, start, given, others = node.args
        symbols = {
            symbol
            for value in node.meta["val"]
            for size in (*value.shape, *value.stride())
            if isinstance(size, torch.SymInt)
            for symbol in size.node.expr.free_symbols
        }
        step: Any = getattr(module, body.target)
        lifted = []
        for source, axis, size in _sizes((*start, *given)):
            if size.node.expr not in symbols:
                continue
            symbols.discard(size.node.expr)
            with module.graph.inserting_before(node):
                found = module.graph.call_function(torch.ops.aten.sym_size.int, (source, axis))
            found.meta["val"] = size
            lifted.append(found)
            with step.graph.inserting_before(_after_placeholders(step)):
                step.graph.placeholder(f"size_{len(lifted)}").meta["val"] = size
        if lifted:
            node.args = (body, start, given, (*others, *lifted))
            step.recompile()
            changed = True
    if changed:
        module.recompile()


def _sizes(tensors: tuple[Node, ...]) -> list[tuple[Node, int, torch.SymInt]]:
    return [
        (tensor, axis, size)
        for tensor in tensors
        for axis, size in enumerate(tensor.meta["val"].shape)
        if isinstance(size, torch.SymInt)
    ]


def _after_placeholders(module: GraphModule) -> Node:
    nodes: Iterable[Node] = module.graph.nodes
    return next(node for node in nodes if node.op != "placeholder")
