"""Insert casts where types differ, without computing every value again as the exporter does.

The pass interprets the graph: it runs each operator on fake tensors, a third of what a trace costs, to know the types
of its arguments. They are in the graph already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def without_running(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``_TypePromotionInterpreter.run_node`` that takes the value of a node from the graph, where it is there.

    A node whose arguments are cast is run by the pass, which stores the new value.
    """
    from ..private_names.of_torch import type_promotion_rule

    @functools.wraps(original)
    def run_node(self: Any, n: torch.fx.Node) -> Any:
        if n.op != "call_function" or "val" not in n.meta:
            return original(self, n)
        rule = type_promotion_rule(n, self.type_promotion_table)
        if rule:
            with self._set_current_node(n):
                self._maybe_promote_node(n, rule)
        return n.meta["val"]

    return run_node
