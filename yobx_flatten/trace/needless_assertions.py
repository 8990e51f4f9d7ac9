"""Remove assertions that hold for all sizes, and the sizes computed only for them.

``torch.export`` asks about the strides of repeated heads, and writes down what it could not answer at once::

    Eq(Min(8*length, 16*length), 8*length)

It is so for every length. OpenVINO has no rule for the minimum of two sizes, and every call of the program would
compute it. Of a number that values decide, such as that of end tokens, it writes down what follows from another
assertion for the 2 rows and more that it traces, and what is not so of one row::

    n // rows >= 1        n >= 2
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram

from ..private_names.of_torch import FloorDiv, Max, Min


def without_needless_assertions(program: ExportedProgram) -> ExportedProgram:
    """Take assertions out of a new program that hold for all sizes."""
    graph = program.graph_module.graph
    assertion = torch.ops.aten._assert_scalar.default
    asserted = {node: _expression(node.args[0]) for node in graph.nodes if node.target is assertion}
    stated = {expression for expression in asserted.values() if expression is not None}
    ranges = program.range_constraints
    needless = {
        node
        for node, one in asserted.items()
        if one is not None and (_always_holds(one) or _follows(one, stated, ranges))
    }
    if not needless:
        return program
    for node in reversed(list(graph.nodes)):  # the sizes that only they read are above them
        if node in needless and not node.users and (node.target is assertion or _is_number(node)):
            needless.update(node.all_input_nodes)
            graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _expression(condition: object) -> sympy.Basic | None:
    value = condition.meta.get("val") if isinstance(condition, torch.fx.Node) else None
    return value.node.expr if isinstance(value, torch.SymBool) else None


def _follows(expression: sympy.Basic, stated: Collection[sympy.Basic], ranges: Mapping[sympy.Symbol, Any]) -> bool:
    """Whether ``n >= bound`` follows from another assertion, ``n // size >= count``, for the sizes of the trace."""
    if not (isinstance(expression, sympy.Ge) and isinstance(expression.lhs, sympy.Symbol)):
        return False
    number, bound = expression.args
    for other in stated:
        if isinstance(other, sympy.Ge) and isinstance(other.lhs, FloorDiv) and other.lhs.args[0] == number:
            size = other.lhs.args[1]
            if size in ranges and other.rhs.is_positive and bound <= other.rhs * ranges[size].lower:
                return True
    return False


def _always_holds(expression: sympy.Basic) -> bool:
    if not expression.has(Min, Max):  # others name sizes that have to be equal
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
