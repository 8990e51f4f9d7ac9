"""Store what a program asserts about the sizes of its inputs as data: nested tuples, never executed.

.. code-block:: text

    Eq(s27 + s65, s64)   ──>   ("==", ("+", "s27", "s65"), "s64")   ──>   ["==", ["+", "s27", "s65"], "s64"]
    in the program             here                                       in the metadata of a file
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Expression = int | str | tuple[Any, ...]
"""An expression of tensor sizes: a number, the name of a size, or an operator and its operands."""

COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}
"""Operators that compare two expressions."""

FUNCTIONS: Mapping[str, Callable[[list[int]], int]] = {
    "+": sum,
    "*": math.prod,
    "max": max,
    "min": min,
    "//": lambda values: values[0] // values[1],
    "%": lambda values: values[0] % values[1],
}
"""The operators in expressions of sizes whose result is a number, not true or false."""

_OF_TWO = (*COMPARISONS, "//", "%")


def names_in(found: Expression) -> set[str]:
    """Return the names of the sizes that an expression depends on.

    >>> sorted(names_in(("==", ("+", "s1", "s2"), "s3")))
    ['s1', 's2', 's3']
    """
    if isinstance(found, tuple):
        return {name for part in found[1:] for name in names_in(part)}
    return {found} if isinstance(found, str) else set()


def value_of(found: Expression, sizes: Mapping[str, int]) -> int:
    """Compute an arithmetic expression of sizes, such as a sum, for given sizes."""
    if isinstance(found, tuple):
        return FUNCTIONS[found[0]]([value_of(part, sizes) for part in found[1:]])
    return sizes[found] if isinstance(found, str) else found


def holds(relation: Expression, sizes: Mapping[str, int]) -> bool:
    """Return whether a comparison holds for given sizes.

    >>> holds(("==", ("+", "s1", "s2"), "s3"), {"s1": 2, "s2": 5, "s3": 6})
    False
    """
    assert isinstance(relation, tuple)
    try:
        return COMPARISONS[relation[0]](value_of(relation[1], sizes), value_of(relation[2], sizes))
    except ZeroDivisionError:
        return False


def bound_by_sums(name: str, relations: Iterable[Expression]) -> int:
    """Return the least value of a size that the relations equate with sums of other sizes, each of which is at least 2.

    >>> bound_by_sums("total", [("==", ("+", "past", "new"), "total"), ("<=", 9, "total")])
    4
    """
    found = 2
    for relation in relations:
        if isinstance(relation, tuple) and relation[0] == "==" and name in relation[1:]:
            other = relation[2] if relation[1] == name else relation[1]
            if _grows(other) and name not in names_in(other):
                found = max(found, value_of(other, dict.fromkeys(names_in(other), 2)))
    return found


def _grows(found: Expression) -> bool:
    """Return whether an expression is a sum or product without negative numbers, and so grows with each size."""
    if isinstance(found, tuple):
        return found[0] in ("+", "*") and all(map(_grows, found[1:]))
    return isinstance(found, str) or found >= 0


_PARTS = ("//", "%")
_TRIED = (*range(2, 26), 32, 48, 63, 64, 65, 100, 127, 128)  # without 1: files are right for that size


def decides_by_parts(relation: Expression) -> bool:
    """Return whether a comparison contains ``//`` or ``%`` and is false for some sizes of at least 2.

    >>> decides_by_parts(("<=", ("%", ("+", 4, ("*", -1, ("%", "s1", 4))), 4), 0))
    True
    >>> decides_by_parts(("<=", 2, ("*", "s1", "s2"))), decides_by_parts(("<=", 1, ("//", "s1", 2)))
    (False, False)
    """
    if not (isinstance(relation, tuple) and _has_parts(relation)):
        return False
    names = sorted(names_in(relation))
    for name in names:
        for others in (2, 3, 4, 6, 7, 8, 16, 32):
            sizes = dict.fromkeys(names, others)
            if not all(holds(relation, {**sizes, name: tried}) for tried in _TRIED):
                return True
    return False


def is_of_one_size(relation: Expression) -> bool:
    """Return whether a comparison only excludes one value of a size, as ``s1 != 6`` does; the value is at least 2.

    >>> is_of_one_size(("!=", "s1", 6)), is_of_one_size(("!=", "s1", 1))
    (True, False)
    """
    if not isinstance(relation, tuple) or relation[0] != "!=":
        return False
    return isinstance(relation[1], str) and isinstance(relation[2], int) and relation[2] > 1


def _has_parts(found: Expression) -> bool:
    return isinstance(found, tuple) and (found[0] in _PARTS or any(map(_has_parts, found[1:])))


def format_expression(found: Expression, shown: Mapping[str, Any]) -> str:
    """Return an expression as a line of text.

    >>> format_expression(("==", ("+", "s1", ("*", 2, ("max", 1, "s2"))), "s3"), {"s1": "a", "s2": "b", "s3": 7})
    'a + 2 * max(1, b) == 7'
    """
    if not isinstance(found, tuple):
        return str(shown[found]) if isinstance(found, str) else str(found)
    name, *parts = found
    texts = [format_expression(part, shown) for part in parts]
    if name in ("max", "min"):
        return f"{name}({', '.join(texts)})"
    if name in COMPARISONS or name == "+":
        return f" {name} ".join(texts)
    sums = [isinstance(part, tuple) and part[0] not in ("max", "min") for part in parts]
    return f" {name} ".join(f"({text})" if wide else text for text, wide in zip(texts, sums, strict=True))


def from_lists(found: Any, *, top: bool = True) -> Expression:
    """Convert a comparison from nested lists, as JSON stores it, to nested tuples."""
    # top: whether the result must be a comparison; otherwise it must be a number
    if not top and (type(found) is int or isinstance(found, str)):
        return found
    if not isinstance(found, list) or len(found) < 2 or not isinstance(found[0], str):
        raise ValueError(f"{found!r} is not an expression")
    if found[0] not in (COMPARISONS if top else FUNCTIONS) or (found[0] in _OF_TWO and len(found) != 3):
        raise ValueError(f"{found[0]!r} is not an operator of {len(found) - 1} arguments")
    return (found[0], *(from_lists(part, top=False) for part in found[1:]))
