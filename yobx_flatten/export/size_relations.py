"""What a program asserts of the sizes of its inputs: a file for a runtime that drops assertions has to state it.

.. code-block:: text

    add = input_ids.shape[1] + past_key_values.0.key.shape[2]
    eq = add == attention_mask.shape[1]                         ONNX has no assertions, and ExecuTorch removes them:
    _assert_scalar(eq, "Runtime assertion failed ...")          the signature of a file states them
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.export import ExportedProgram

from ..runners.relations import COMPARISONS, FUNCTIONS, Expression, names_in

__all__ = ["as_expression", "relations_of"]

_OPERATORS = {  # classes of sympy, and of torch for it
    "Add": "+",
    "Mul": "*",
    "Max": "max",
    "Min": "min",
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "Equality": "==",
    "Unequality": "!=",
    "LessThan": "<=",
    "StrictLessThan": "<",
}
_TURNED = {"GreaterThan": "<=", "StrictGreaterThan": "<"}


def relations_of(program: ExportedProgram, sizes: Collection[str]) -> tuple[Expression, ...]:
    """Return what a program asserts of sizes, those of its guards among it.

    Args:
        program: the program.
        sizes: the names of the sizes that a call shows; what depends on others is left out.

    Returns:
        Comparisons, each once.
    """
    found = dict.fromkeys(as_expression(expression) for expression in _asserted(program))
    return tuple(
        one for one in found if isinstance(one, tuple) and one[0] in COMPARISONS and set() < names_in(one) <= {*sizes}
    )


def _asserted(program: ExportedProgram) -> Iterator[Any]:
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        asserted = getattr(node.args[0], "meta", {}).get("val")
        if isinstance(asserted, torch.SymBool):
            yield asserted.node.expr
    values = (node.meta.get("val") for node in program.graph.find_nodes(op="placeholder"))
    axes: Iterator[Any] = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    environment: Any = next((size.node.shape_env for size in axes if isinstance(size, torch.SymInt)), None)
    # a trace that was not asked to assert them
    for guard in [] if environment is None or not getattr(program, "_guards_code", None) else environment.guards:
        yield environment.replace(guard.expr)


def as_expression(expression: Any) -> Expression | None:
    """Return an expression of sympy as data; ``None`` for one with other operators than those of sizes.

    Args:
        expression: the expression.

    >>> import sympy
    >>> as_expression(sympy.Eq(sympy.Symbol("a") + 2, sympy.Symbol("b")))
    ('==', ('+', 2, 'a'), 'b')
    """
    if expression.is_Symbol:
        return str(expression)
    if expression.is_Integer:
        return int(expression)
    kind = type(expression).__name__
    name = _OPERATORS.get(kind, _TURNED.get(kind))
    parts = [as_expression(part) for part in expression.args]
    if name is None or any(part is None for part in parts):
        return None
    of_numbers = all(not isinstance(part, tuple) or part[0] in FUNCTIONS for part in parts)
    return (name, *(reversed(parts) if kind in _TURNED else parts)) if of_numbers else None
