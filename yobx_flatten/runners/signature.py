"""Check names, dtypes and sizes of inputs, and relations between sizes, for runtimes that check nothing.

Compiled code reads memory by the sizes and strides that it was compiled for, so inputs are checked before each call. A
program's assertions about the sizes of its inputs are stored as nested tuples, which are never run as code.
"""

# input_ids               int64    (batch a, tokens b)
# past_key_values.0.key   float32  (batch a, 2, tokens c, 16)     the first use of a, b and c sets their values,
# attention_mask          int64    (batch a, tokens b + c)        and all other sizes must agree
#
# Eq(s27 + s65, s64)   ──>   ("==", ("+", "s27", "s65"), "s64")   ──>   ["==", ["+", "s27", "s65"], "s64"]
# in the program             here                                       in the metadata of a file

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..core.files.document import parse_document
from ..errors import DamagedFileError, FlattenError, ForeignFileError
from .ports import Port

KEY = "yobx_flatten.signature"
"""Metadata key under which an exported file stores the names, dtypes and sizes of its inputs and outputs."""

MISFIT = "The sizes of the inputs do not fit each other"
"""Start of the error message for inputs whose sizes break a relation, such as two lengths that must be equal."""

_FORMAT = 1

Size = int | Mapping[str, int] | None
"""A size: a number; a sum, as factors by names of dynamic sizes, a constant under ``""``; or ``None`` for any size."""


@dataclasses.dataclass(frozen=True)
class Signature:
    # name, type of the elements and sizes of every input, in order
    inputs: Sequence[tuple[str, torch.dtype, tuple[Size, ...]]]
    outputs: Sequence[str]  # names of the outputs, in order
    # the largest value of each dynamic size that has an upper bound
    largest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # the smallest value of a dynamic size, if it is larger than 2, or 1 if the program refuses 0
    smallest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # versions of the libraries that made the file, by name
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # for an input with indices into a table, such as tokens: the number of rows of the table. OpenVINO returns numbers
    # for rows that do not exist.
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # for a cache input of a sliding window: the largest number of tokens, along axis 2. The number of tokens seen is
    # that of the columns of `attention_mask` without those of `input_ids`.
    kept: Mapping[str, int] = dataclasses.field(default_factory=dict)
    relations: Sequence[Expression] = ()

    @property
    def ports(self) -> dict[str, Port]:
        shapes = {name: [n if isinstance(n, int) else None for n in sizes] for name, _, sizes in self.inputs}
        return {name: Port(name, tuple(shapes[name]), dtype) for name, dtype, _ in self.inputs}

    def bind(
        self,
        values: Mapping[str, Any],
        failure: type[FlattenError],
        where: str,
        held: Mapping[str, tuple[int, ...]] | None = None,
    ) -> list[torch.Tensor]:
        """Check dtypes and sizes of inputs, and return contiguous tensors in the order of the file's inputs."""
        # held: shapes of inputs in the library's own memory, which the result does not contain
        held = held or {}
        taken = [(name, dtype) for name, dtype, _ in self.inputs if name not in held]
        found = [as_tensor(name, dtype, values.get(name), failure, where) for name, dtype in taken]
        for (name, _), tensor in zip(taken, found, strict=True):
            if name in self.rows and tensor.numel():
                low, high = int(tensor.min()), int(tensor.max())
                if low < 0 or high >= self.rows[name]:
                    wrong = low if low < 0 else high
                    raise failure(f"{name} contains {wrong}, but {where} takes 0 to {self.rows[name] - 1}.")
        shapes = {name: tuple(tensor.shape) for (name, _), tensor in zip(taken, found, strict=True)}
        self.check_sizes({**shapes, **held}, failure, where)
        return found

    def check_sizes(self, shapes: Mapping[str, tuple[int, ...]], failure: type[FlattenError], where: str) -> None:
        for name, _, sizes in self.inputs:
            if len(sizes) != len(shapes[name]):
                raise failure(f"{where} takes {name} with {len(sizes)} axes, found the shape {shapes[name]}.")
        places = place_of_sizes(self)
        bound = {size: shapes[name][axis] for size, (name, axis) in places.items()}
        for alone, (name, axis) in places.items():
            given = bound[alone]
            least, most = self.smallest.get(alone, given), self.largest.get(alone, given)
            if not least <= given <= most:
                bound_by = f"at most {most}" if given > most else f"{least} or more"
                remedy = " Export the model with another bound." if (given, least) != (0, 1) else ""
                raise failure(f"{name} has size {given} in axis {axis}, but {where} was made for {bound_by}.{remedy}")
        for name, _, sizes in self.inputs:
            for axis, (size, given) in enumerate(zip(sizes, shapes[name], strict=True)):
                expected = size if isinstance(size, int) else None
                if isinstance(size, Mapping) and {*size} <= {"", *bound}:
                    expected = sum(factor * (bound[part] if part else 1) for part, factor in size.items())
                if expected is not None and expected != given:
                    why = "" if isinstance(size, int) else ", since it depends on the sizes of other inputs"
                    raise failure(f"{name} has size {given} in axis {axis}, and {where} takes {expected} there{why}.")
        for relation in self.relations:
            if names_in(relation) <= bound.keys() and not holds(relation, bound):
                shown = {size: f"{name}.shape[{axis}]" for size, (name, axis) in places.items()}
                stated = format_expression(relation, shown)
                raise failure(f"{MISFIT}: {where} needs {stated}, but found {format_expression(relation, bound)}.")
        for name, most in self.kept.items():
            seen = shapes["attention_mask"][1] - shapes["input_ids"][1]
            if shapes[name][2] != min(seen, most):
                raise failure(
                    f"{name} holds {shapes[name][2]} tokens, but {where} needs {min(seen, most)} tokens, since "
                    f"attention_mask has {seen} columns more than input_ids."
                )

    def to_json(self) -> str:
        rows = [[name, str(dtype).removeprefix("torch."), list(sizes)] for name, dtype, sizes in self.inputs]
        about: dict[str, Any] = {"format": _FORMAT, "inputs": rows, "outputs": [*self.outputs]}
        about |= {"largest": dict(self.largest), "smallest": dict(self.smallest), "rows": dict(self.rows)}
        about |= {"kept": dict(self.kept)} if self.kept else {}
        about |= {"relations": list(self.relations)} if self.relations else {}
        return json.dumps({**about, "versions": dict(self.versions)})

    @classmethod
    def from_json(cls, text: str, where: str) -> Signature:
        """Make a signature from the JSON text that :meth:`to_json` returned; nothing in the text is evaluated."""
        found = parse_document(text, dict[str, Any], f"The signature in {where}", failure=DamagedFileError)
        try:
            if found["format"] > _FORMAT:
                raise ForeignFileError(f"{where} is for a newer yobx-flatten:\n    pip install --upgrade yobx-flatten")
            inputs = []
            for name, dtype, sizes in found["inputs"]:
                kind = getattr(torch, dtype)
                if not isinstance(kind, torch.dtype):
                    raise TypeError(dtype)
                checked = tuple(
                    size if size is None or type(size) is int else {str(k): int(v) for k, v in size.items()}
                    for size in sizes
                )
                inputs.append((str(name), kind, checked))
            numbers = (found["largest"], found["smallest"], found["rows"], found.get("kept", {}))
            largest, smallest, rows, kept = ({str(k): int(v) for k, v in one.items()} for one in numbers)
            outputs, relations = [*map(str, found["outputs"])], tuple(map(from_lists, found.get("relations", ())))
            return cls(inputs, outputs, largest, smallest, dict(found["versions"]), rows, kept, relations)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, ForeignFileError):
                raise
            raise DamagedFileError(f"{where} is damaged: its signature is wrong ({type(error).__name__}).") from None


def as_tensor(name: str, dtype: torch.dtype, value: Any, failure: type[FlattenError], where: str) -> torch.Tensor:
    if value is None:
        raise failure(f"{where} needs {name}, which is missing.")
    if isinstance(value, (bool, int, float)):  # a number has no type of its own
        return torch.tensor(value, dtype=dtype)
    tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    if tensor.dtype != dtype:
        kinds = [str(kind).removeprefix("torch.") for kind in (dtype, tensor.dtype)]
        raise failure(f"{where} needs {name} as {kinds[0]}, but it is {kinds[1]}.")
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _alone(size: Size) -> str | None:
    """Return the name of the variable if a size is a single variable; ``None`` for a number or a sum."""
    return next(iter(size)) if isinstance(size, Mapping) and list(size.values()) == [1] and "" not in size else None


def place_of_sizes(signature: Signature) -> dict[str, tuple[str, int]]:
    """Return, by name of each dynamic size, where the size is found: the name of an input, and the index of an axis."""
    found: dict[str, tuple[str, int]] = {}
    for name, _, sizes in signature.inputs:
        for axis, size in enumerate(sizes):
            alone = _alone(size)
            if alone is not None:
                found.setdefault(alone, (name, axis))
    return found


# Relations between sizes


Expression = int | str | tuple[Any, ...]
"""An expression of tensor sizes: a number, the name of a size, or an operator and its operands."""

_Comparison = Callable[[int, int], bool]
COMPARISONS: Mapping[str, _Comparison] = {"==": operator.eq, "!=": operator.ne, "<=": operator.le, "<": operator.lt}
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


def names_in(found: Expression) -> set[str]:
    """Return the names of the sizes that an expression depends on.

    >>> sorted(names_in(("==", ("+", "s1", "s2"), "s3")))
    ['s1', 's2', 's3']
    """
    if isinstance(found, tuple):
        return {name for part in found[1:] for name in names_in(part)}
    return {found} if isinstance(found, str) else set()


def value_of(found: Expression, sizes: Mapping[str, int]) -> int:
    if isinstance(found, tuple):
        return FUNCTIONS[found[0]]([value_of(part, sizes) for part in found[1:]])
    return sizes[found] if isinstance(found, str) else found


def holds(relation: Expression, sizes: Mapping[str, int]) -> bool:
    """Return whether a comparison between sizes is true for given values of the sizes.

    >>> holds(("==", ("+", "s1", "s2"), "s3"), {"s1": 2, "s2": 5, "s3": 6})
    False
    """
    assert isinstance(relation, tuple)
    try:
        return COMPARISONS[relation[0]](value_of(relation[1], sizes), value_of(relation[2], sizes))
    except ZeroDivisionError:
        return False


def bound_by_sums(name: str, relations: Iterable[Expression]) -> int:
    """Return a lower bound of the size ``name``, computed from equations, if every other size is at least 2.

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
    """Return whether an expression contains only sums, products, names of sizes, and numbers that are not negative."""
    if isinstance(found, tuple):
        return found[0] in ("+", "*") and all(map(_grows, found[1:]))
    return isinstance(found, str) or found >= 0


def decides_by_parts(relation: Expression) -> bool:
    """Return whether a comparison contains ``//`` or ``%``, and some sizes of at least 2 make it false.

    >>> decides_by_parts(("<=", ("%", ("+", 4, ("*", -1, ("%", "s1", 4))), 4), 0))
    True
    >>> decides_by_parts(("<=", 2, ("*", "s1", "s2"))), decides_by_parts(("<=", 1, ("//", "s1", 2)))
    (False, False)
    """
    if not (isinstance(relation, tuple) and _has_parts(relation)):
        return False
    names, tried = names_in(relation), (*range(2, 26), 32, 48, 63, 64, 65, 100, 127, 128)  # files are right for 1
    tests = ((dict.fromkeys(names, others), name) for name in names for others in (2, 3, 4, 6, 7, 8, 16, 32))
    return not all(holds(relation, {**sizes, name: size}) for sizes, name in tests for size in tried)


def is_of_one_size(relation: Expression) -> bool:
    """Return whether a comparison excludes a single size of at least 2, such as ``s1 != 6``.

    >>> is_of_one_size(("!=", "s1", 6)), is_of_one_size(("!=", "s1", 1))
    (True, False)
    """
    if not isinstance(relation, tuple) or relation[0] != "!=":
        return False
    return isinstance(relation[1], str) and isinstance(relation[2], int) and relation[2] > 1


def _has_parts(found: Expression) -> bool:
    return isinstance(found, tuple) and (found[0] in ("//", "%") or any(map(_has_parts, found[1:])))


def format_expression(found: Expression, shown: Mapping[str, Any]) -> str:
    """Format an expression of sizes as one line of text.

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
    """Convert a comparison of sizes from nested lists, as read from JSON, to nested tuples."""
    # top: whether the result must be a comparison; otherwise it must be a number
    if not top and (type(found) is int or isinstance(found, str)):
        return found
    if not isinstance(found, list) or len(found) < 2 or not isinstance(found[0], str):
        raise ValueError(f"{found!r} is not an expression")
    is_wrong = found[0] in (*COMPARISONS, "//", "%") and len(found) != 3
    if found[0] not in (COMPARISONS if top else FUNCTIONS) or is_wrong:
        raise ValueError(f"{found[0]!r} is not an operator of {len(found) - 1} arguments")
    return (found[0], *(from_lists(part, top=False) for part in found[1:]))
