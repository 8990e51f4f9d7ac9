"""Check the expressions of a stored program, which torch evaluates as Python: sizes and guards.

    Add(Mul(Integer(16), Symbol('s15', positive=True, integer=True)), Integer(1))       parsed by sympy, by `eval`
    (L['x'].size()[0] % 2) == 0                                                         compiled to a function

A program of a stranger may have what torch itself writes there and nothing else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

__all__ = ["is_guard", "is_size"]

_LONGEST = 20_000
# no other line, comment or escape: torch and sympy put the text together with their own before Python reads it
_CHARACTERS = re.compile(r"""[\w .,()\[\]'"+*/%<>=!-]*""", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z_]*\d{0,6}")  # a counter is raised to the number of a symbol
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?|[+-]?inf|nan")
_LARGEST = 2**64
_STEEPEST = 64  # of an exponent or a shift

# Classes of sympy that torch's sizes are made of, and those of torch.utils._sympy.functions.
_CLASSES = re.compile(
    "Add|Mul|Pow|Integer|Float|Rational|Symbol|Max|Min|Mod|Abs|floor|ceiling|Piecewise|ExprCondPair|Tuple|And|Or|Not"
    "|Equality|Unequality|Eq|Ne|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan|Lt|Le|Gt|Ge"
    "|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural"
    "|FloatPow|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat|TruncToInt|RoundToInt"
    "|RoundDecimal|ToFloat|Identity"
)
_STEEP = {"Pow", "LShift", "RShift", "PowByNatural", "FloatPow"}
_WITH_TEXT = {"Symbol": _NAME, "Float": _NUMBER, "Integer": _NUMBER}
_CONSTANTS = {"true", "false", "oo", "int_oo", "nan", "zoo"}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.UAdd, ast.USub, ast.Not, ast.And, ast.Or)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_OF_TENSORS = {"size", "stride", "storage_offset", "dim", "item"}
_OF_MATH = {"ceil", "floor", "trunc", "sqrt", "isnan", "inf"}
_OF_TORCH = {"sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sum"}


def is_size(text: str) -> bool:
    """Whether a text is a size, or a condition on sizes, as torch writes it into a program.

    >>> is_size("FloorDiv(Symbol('s7', positive=True, integer=True), Integer(2))")
    True
    >>> is_size("__import__('os').system('true') or Integer(2)"), is_size("Pow(Integer(9), Integer(9999999))")
    (False, False)
    """
    return _fits(text, lambda tree: _is_size(tree, 0))


def is_guard(text: str) -> bool:
    """Whether a text is a condition on inputs, as torch writes it into a program.

    >>> is_guard("(L['x'].size()[0] % 2) == 0"), is_guard("print(L['x'])")
    (True, False)
    """
    return _fits(text, _is_guard)


def _fits(text: str, check: Callable[[ast.expr], bool]) -> bool:
    if len(text) > _LONGEST or _CHARACTERS.fullmatch(text) is None:
        return False
    try:
        return check(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_size(node: ast.expr, steep: int) -> bool:
    """Whether the value of a node is computed from symbols and numbers by classes of the table, quickly."""
    if isinstance(node, ast.Constant):
        return _is_number(node, _LARGEST)
    if isinstance(node, ast.Name):
        return node.id in _CONSTANTS or (_NAME.fullmatch(node.id) is not None and node.id[-1].isdigit())
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, _OPERATORS) and _is_size(node.operand, steep)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _OPERATORS) and _is_size(node.left, steep) and _is_size(node.right, steep)
    if isinstance(node, ast.Compare):
        parts = (node.left, *node.comparators)
        return all(isinstance(op, _COMPARISONS) for op in node.ops) and all(_is_size(part, steep) for part in parts)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not _CLASSES.fullmatch(node.func.id):
        return False
    if not all(keyword.arg and _is_number(keyword.value, 1000) for keyword in node.keywords):
        return False
    name = node.func.id
    if name in _WITH_TEXT:
        return len(node.args) == 1 and _is_made_of(name, node.args[0])
    if name in _STEEP:
        steep += 1
        exponent = _number_in(node.args[1]) if len(node.args) == 2 else None
        # of two that stand in each other the second may be as large as the first comes to
        if steep > 2 or (exponent is not None and abs(exponent) > _STEEPEST):
            return False
    return all(_is_size(argument, steep) for argument in node.args)


def _is_made_of(name: str, node: ast.expr) -> bool:
    """Whether a symbol has a name, and a number a value, written as one or as a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _WITH_TEXT[name].fullmatch(node.value) is not None and len(node.value) < 100
    return name != "Symbol" and _is_number(node, _LARGEST)


def _number_in(node: ast.expr) -> float | None:
    """The number that ``Integer(2)`` or ``2`` is; without one, the exponent is a symbol, and nothing is computed."""
    if isinstance(node, ast.UnaryOp):
        return _number_in(node.operand)
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return _number_in(node.args[0])
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    return float(_LARGEST) if isinstance(node, (ast.Call, ast.BinOp)) and not _has_symbol(node) else None


def _has_symbol(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "Symbol" for part in ast.walk(node))


def _is_number(node: ast.expr, most: float) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _is_number(node.operand, most)
    return isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)) and abs(node.value) <= most


def _is_guard(node: ast.expr) -> bool:
    """Whether a node computes with sizes of inputs, which it reads from ``L``."""
    if isinstance(node, ast.Constant):
        is_text = isinstance(node.value, str) and re.fullmatch(r"[\w. -]*", node.value) is not None
        return is_text or node.value is None or _is_number(node, _LARGEST)
    if isinstance(node, ast.Name):
        return node.id == "L"
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, _OPERATORS) and _is_guard(node.operand)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow):
            return _is_guard(node.left) and _is_number(node.right, _STEEPEST)
        return isinstance(node.op, _OPERATORS) and _is_guard(node.left) and _is_guard(node.right)
    if isinstance(node, ast.BoolOp):
        return all(map(_is_guard, node.values))
    if isinstance(node, ast.Compare):
        is_known = all(isinstance(op, (*_COMPARISONS, ast.Is, ast.IsNot)) for op in node.ops)
        return is_known and all(map(_is_guard, (node.left, *node.comparators)))
    if isinstance(node, ast.Subscript):
        return _is_guard(node.value) and _is_guard(node.slice)
    if isinstance(node, ast.Attribute):  # a field of a registered class
        return not node.attr.startswith("_") and _is_guard(node.value)
    return isinstance(node, ast.Call) and not node.keywords and _is_called(node.func) and all(map(_is_guard, node.args))


def _is_called(function: ast.expr) -> bool:
    """Whether what a guard calls reads a size, or computes with numbers."""
    if isinstance(function, ast.Name):
        return function.id in ("max", "min", "float", "int", "round", "cast_symbool_to_symint_guardless")
    if not isinstance(function, ast.Attribute):
        return False
    if isinstance(function.value, ast.Name) and function.value.id != "L":
        return function.attr in {"math": _OF_MATH, "torch": _OF_TORCH}.get(function.value.id, set())
    return function.attr in _OF_TENSORS and _is_guard(function.value)
