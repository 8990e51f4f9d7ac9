"""Remove assertions that hold for all sizes, and the sizes computed only for them.

``torch.export`` asks about the strides of repeated heads, and writes down what it could not answer at once::

    Eq(Min(8*length, 16*length), 8*length)

It is so for every length. OpenVINO has no rule for the minimum of two sizes, and every call of the program would
compute it.
"""

from __future__ import annotations

import sympy
import torch
from torch.export import ExportedProgram

from ..private_names.of_torch import Max, Min

__all__ = ["without_needless_assertions"]


def without_needless_assertions(program: ExportedProgram) -> ExportedProgram:
    """Take assertions out of a new program that hold for all sizes."""
    graph = program.graph_module.graph
    assertion = torch.ops.aten._assert_scalar.default
    needless = {node for node in graph.nodes if node.target is assertion and _always_holds(node.args[0])}
    if not needless:
        return program
    for node in reversed(list(graph.nodes)):  # the sizes that only they read are above them
        if node in needless and not node.users and (node.target is assertion or _is_number(node)):
            needless.update(node.all_input_nodes)
            graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _always_holds(condition: object) -> bool:
    value = condition.meta.get("val") if isinstance(condition, torch.fx.Node) else None
    expression = value.node.expr if isinstance(value, torch.SymBool) else None
    if expression is None or not expression.has(Min, Max):  # others name sizes that have to be equal
        return False
    return bool(expression.replace(lambda part: isinstance(part, (Min, Max)), _in_order) == sympy.true)


def _in_order(extreme: sympy.Expr) -> sympy.Expr:
    """The least, or greatest, of several sizes, where all sizes agree which one that is."""
    for one in extreme.args:
        differences = [sympy.expand(other - one) for other in extreme.args]
        if all(d.is_nonnegative if isinstance(extreme, Min) else d.is_nonpositive for d in differences):
            return one
    return extreme


def _is_number(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, (torch.SymInt, torch.SymBool, bool, int))
