"""Check inputs for runtimes that do not check them: names, types, sizes, and relations between sizes.

Compiled code reads memory by the sizes and strides that it was compiled for, so inputs are checked before each call:

.. code-block:: text

    input_ids               int64    (batch a, tokens b)
    past_key_values.0.key   float32  (batch a, 2, tokens c, 16)     the first use of a, b and c sets their values,
    attention_mask          int64    (batch a, tokens b + c)        and all other sizes must agree
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import DamagedFileError, FlattenError, ForeignFileError
from ..files.document import parse_document
from .ports import Port
from .relations import Expression, format_expression, from_lists, holds, names_in

KEY = "yobx_flatten.signature"
"""Metadata key under which an exported file stores the names, dtypes and sizes of its inputs and outputs."""

MISFIT = "The sizes of the inputs do not fit each other"
"""Start of the error message for inputs whose sizes break a relation, such as two lengths that must be equal."""

_FORMAT = 1

Size = int | Mapping[str, int] | None
"""A size: a number; a sum, as factors by names of dynamic sizes, a constant under ``""``; or ``None`` for any size."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a file, with their types and sizes."""

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
        """The inputs of the file, by name."""
        return {
            name: Port(name, tuple(size if isinstance(size, int) else None for size in sizes), dtype)
            for name, dtype, sizes in self.inputs
        }

    def bind(
        self,
        values: Mapping[str, Any],
        failure: type[FlattenError],
        where: str,
        held: Mapping[str, tuple[int, ...]] | None = None,
    ) -> list[torch.Tensor]:
        """Check the dtypes and sizes of inputs, and return the inputs in order as contiguous tensors."""
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
        """Raise an error if the shapes of the inputs do not fit the file, or do not fit each other."""
        for name, _, sizes in self.inputs:
            if len(sizes) != len(shapes[name]):
                raise failure(f"{where} takes {name} with {len(sizes)} axes, found the shape {shapes[name]}.")
        places = [
            (name, axis, size, given)
            for name, _, sizes in self.inputs
            for axis, (size, given) in enumerate(zip(sizes, shapes[name], strict=True))
        ]
        bound: dict[str, int] = {}
        for name, axis, size, given in places:
            alone = _alone(size)
            if alone is not None and alone not in bound:
                bound[alone] = given
                least, most = self.smallest.get(alone, given), self.largest.get(alone, given)
                if not least <= given <= most:
                    bound_by = f"at most {most}" if given > most else f"{least} or more"
                    remedy = " Export the model with another bound." if (given, least) != (0, 1) else ""
                    raise failure(
                        f"{name} has size {given} in axis {axis}, but {where} was made for {bound_by}.{remedy}"
                    )
        for name, axis, size, given in places:
            expected = _value(size, bound)
            if expected is not None and expected != given:
                why = "" if isinstance(size, int) else ", since it depends on the sizes of other inputs"
                raise failure(f"{name} has size {given} in axis {axis}, and {where} takes {expected} there{why}.")
        for relation in self.relations:
            if names_in(relation) <= bound.keys() and not holds(relation, bound):
                shown = {size: f"{name}.shape[{axis}]" for size, (name, axis) in place_of_sizes(self).items()}
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
        """Return the signature as JSON text, which :meth:`from_json` reads."""
        rows = [[name, str(dtype).removeprefix("torch."), list(sizes)] for name, dtype, sizes in self.inputs]
        about = {"inputs": rows, "outputs": [*self.outputs]}
        bounds = {"largest": dict(self.largest), "smallest": dict(self.smallest), "rows": dict(self.rows)}
        bounds |= {"kept": dict(self.kept)} if self.kept else {}
        related = {"relations": list(self.relations)} if self.relations else {}
        return json.dumps({"format": _FORMAT, **about, **bounds, **related, "versions": dict(self.versions)})

    @classmethod
    def from_json(cls, text: str, where: str) -> Signature:
        """Make a signature from the JSON text that :meth:`to_json` returned; nothing in the text is evaluated."""
        found = parse_document(text, dict[str, Any], f"The signature in {where}", failure=DamagedFileError)
        try:
            if found["format"] > _FORMAT:
                raise ForeignFileError(f"{where} is of a newer version:\n    pip install --upgrade yobx-flatten")
            inputs = [(str(name), _dtype(dtype), tuple(map(_size, sizes))) for name, dtype, sizes in found["inputs"]]
            largest, smallest, rows = (
                {str(k): int(v) for k, v in found[name].items()} for name in ("largest", "smallest", "rows")
            )
            outputs = [str(name) for name in found["outputs"]]
            kept = {str(k): int(v) for k, v in found.get("kept", {}).items()}
            relations = tuple(map(from_lists, found.get("relations", ())))
            return cls(inputs, outputs, largest, smallest, dict(found["versions"]), rows, kept, relations)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, ForeignFileError):
                raise
            raise DamagedFileError(f"The signature in {where} cannot be read ({type(error).__name__}).") from None


def as_tensor(name: str, dtype: torch.dtype, value: Any, failure: type[FlattenError], where: str) -> torch.Tensor:
    """Return an input as a contiguous tensor on the CPU."""
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
    """Return the name of a size that is a single name."""
    return next(iter(size)) if isinstance(size, Mapping) and list(size.values()) == [1] and "" not in size else None


def place_of_sizes(signature: Signature) -> dict[str, tuple[str, int]]:
    """Return the first input and axis that have each dynamic size, by the name of the size."""
    found: dict[str, tuple[str, int]] = {}
    for name, _, sizes in signature.inputs:
        for axis, size in enumerate(sizes):
            alone = _alone(size)
            if alone is not None:
                found.setdefault(alone, (name, axis))
    return found


def _value(size: Size, bound: Mapping[str, int]) -> int | None:
    if size is None or isinstance(size, int):
        return size
    if any(name and name not in bound for name in size):
        return None
    return sum(factor * (bound[name] if name else 1) for name, factor in size.items())


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(name)
    return found


def _size(found: Any) -> Size:
    if found is None or type(found) is int:
        return found
    return {str(name): int(factor) for name, factor in found.items()}
