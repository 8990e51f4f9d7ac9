"""Compare two tree specs or the outputs of two calls, and define the base class of comparison reports."""

from __future__ import annotations

import abc
import ast
import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.export import ExportedProgram

from ..core.compare import describe_leaf, largest_difference
from ..core.private_names.of_torch import pytree
from ..errors import InvalidArgumentError, ReplayError, describe_class, without_cause
from ..registry.recipe.aliases import PyTree, Static
from ..registry.recipe.fields import is_mapping_like


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One position at which the structures of two nested objects differ.

    Attributes:
        path: key path of the position, as a Python expression.
        first: description of the structure at the position in the first of the two compared objects.
        second: description of the structure at the position in the second object.
        names: names of the two structures in the printed text.
    """

    path: str
    first: str
    second: str
    names: tuple[str, str] = ("first", "second")

    def __str__(self) -> str:
        width = max(map(len, self.names)) + 1
        sides = zip(self.names, (self.first, self.second), strict=True)
        return "\n".join([self.path, *(f"    {f'{name}:':<{width}} {value}" for name, value in sides)])


def compare_specs(
    first: object, second: object, *, name: str = "tree", names: tuple[str, str] = ("first", "second")
) -> list[Difference]:
    """List the positions at which the structures (specs) of two nested objects differ.

    Args:
        first: a ``TreeSpec`` of ``torch.utils._pytree``, an ``ExportedProgram`` (its inputs are compared), or any other
            object. To compare the inputs of a call with a program, pass the tuple ``(args, kwargs)``.
        second: the structure to compare with: a ``TreeSpec``, an ``ExportedProgram`` or any other object.
        name: the name with which the paths begin, ``"tree"`` by default. Paths in the inputs of a call or a program
            begin with ``args`` or ``kwargs`` instead.
        names: the names of the two structures in the printed text; ``("first", "second")`` by default.

    Returns:
        One :class:`Difference` for each position that differs; children of such a position are not compared. If no
        position differs, a program that was exported for the first structure accepts inputs of the second structure.

    Raises:
        InvalidArgumentError: when ``names`` is not a pair.

    >>> for difference in compare_specs({"x": 1, "y": [2, 3]}, {"x": 1, "y": [2]}, names=("exported", "called")):
    ...     print(difference)
    tree['y']
        exported: list of 2
        called:   list of 1
    """
    if len(names) != 2:
        raise InvalidArgumentError(f'compare_specs: names must be a pair like ("first", "second"), found {names!r}.')
    specs = []
    for obj in (first, second):
        spec = obj if isinstance(obj, pytree.TreeSpec) else None
        if spec is None:
            spec = obj.call_spec.in_spec if isinstance(obj, ExportedProgram) else pytree.tree_structure(obj)
        if spec is None:
            raise InvalidArgumentError(
                f"compare_specs: {describe_class(obj)} does not contain the structure of its inputs. Export "
                "the module again:\n    torch.export.export(module, args, kwargs)"
            )
        specs.append(_view(spec))
    left, right = specs
    return list(_compare(left, right, name, names))


def compare_spec_texts(first: str, second: str, names: tuple[str, str]) -> list[Difference] | None:
    try:
        left, right = _parse(first), _parse(second)
    except (ValueError, IndexError):
        return None
    return list(_compare(left, right, "tree", names))


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    cls: str
    static: str  # the static part without the names of the children
    children: dict[str, _View]  # by the last part of their path, such as `[0]`, `['x']` or `.x`
    is_leaf: bool = False

    @property
    def text(self) -> str:
        if self.is_leaf:
            return "a leaf"
        if not self.children or all(re.fullmatch(r"\[\d+\]", step) for step in self.children):
            return f"{self.cls} of {len(self.children)}"
        return f"{self.cls} with {', '.join(self.children)}"


_LEAF = _View("", "", {}, is_leaf=True)


def _view(spec: pytree.TreeSpec) -> _View:
    if spec.is_leaf():
        return _LEAF
    children = [_view(child) for child in spec.children()]
    if spec.type is collections.namedtuple:  # covers all named tuples; the static part names the class
        return _node(spec.context.__qualname__, list(spec.context._fields), children, True)
    return _node(spec.type.__qualname__, spec.context, children, _has_fields(spec.type))


def _has_fields(cls: Any) -> bool:
    return dataclasses.is_dataclass(cls) and not is_mapping_like(cast("type", cls))


def _node(cls: str, context: Static, children: list[_View], by_attribute: bool) -> _View:
    # the static part can contain the names of the children: as a list, or as the first element of a pair
    names, static = None, context
    if _names_fit(context, children):
        names, static = context, None
    elif isinstance(context, (list, tuple)) and len(context) == 2 and _names_fit(context[0], children):
        names, static = context
    steps = [f"[{index}]" for index in range(len(children))]
    if names is not None:
        steps = [f".{name}" if by_attribute else f"[{name!r}]" for name in names]
    shown = "" if static is None or static == [] else " ".join(repr(static).split())
    return _View(cls, shown, dict(zip(steps, children, strict=True)))


def _names_fit(names: object, children: list[_View]) -> bool:
    return (
        isinstance(names, list)
        and len(names) == len(children) > 0
        and all(isinstance(name, (str, int)) for name in names)
        and len(set(names)) == len(names)
    )


def _parse(text: str) -> _View:
    """Parse a spec such as ``TreeSpec(dict, ['a', 'b'], [*, TreeSpec(list, None, [*])])``."""
    text = text.strip()
    if text == "*":
        return _LEAF
    if not (text.startswith("TreeSpec(") and text.endswith(")")):
        raise ValueError(text)
    cls, *context, below = _split(text.removeprefix("TreeSpec(")[:-1])
    if not (below.startswith("[") and below.endswith("]")):
        raise ValueError(below)
    children = [_parse(child) for child in _split(below[1:-1])]
    spelled = ", ".join(context)
    try:
        static = ast.literal_eval(spelled)
    except (ValueError, SyntaxError):
        return _View(cls, spelled, {f"[{index}]": child for index, child in enumerate(children)})
    classes = [kind for kind in pytree.SUPPORTED_NODES.copy() if getattr(kind, "__name__", "") == cls]
    return _node(cls, static, children, len(classes) == 1 and _has_fields(classes[0]))


def _split(text: str) -> list[str]:
    """Split a text at the commas that are neither in brackets nor in quotes."""
    parts, depth, quote, start, skip = [], 0, "", 0, False
    for position, sign in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = sign == "\\"
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{<":
            depth += 1
        elif sign in ")]}>":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    rest = text[start:].strip()
    return [*parts, rest] if rest else parts


def _compare(left: _View, right: _View, path: str, names: tuple[str, str]) -> Iterator[Difference]:
    sides = (left, right)
    if all(side.cls == "tuple" and [one.cls for one in side.children.values()] == ["tuple", "dict"] for side in sides):
        for step, part in (("[0]", "args"), ("[1]", "kwargs")):  # the structures are those of calls
            yield from _compare(left.children[step], right.children[step], part, names)
        return
    if left.is_leaf and right.is_leaf:
        return
    positions = [step for step in left.children if step.startswith("[") and step[1:-1].isdigit()]
    other_count = len(left.children) != len(right.children)
    if left.cls != right.cls or (other_count and len(positions) == len(left.children)):
        yield Difference(path, left.text, right.text, names)
        return
    if left.static != right.static:
        yield Difference(path, f"static {left.static or None}", f"static {right.static or None}", names)
    common = [step for step in left.children if step in right.children]
    if common != [step for step in right.children if step in left.children]:
        yield Difference(path, f"in the order {', '.join(left.children)}", ", ".join(right.children), names)
    for step in dict.fromkeys([*left.children, *right.children]):
        if step in common:
            yield from _compare(left.children[step], right.children[step], path + step, names)
        else:
            found = [side.children[step].text if step in side.children else "not there" for side in sides]
            yield Difference(path + step, found[0], found[1], names)


def compare_outputs(expected: PyTree, found: PyTree, names: Sequence[str]) -> dict[str, float]:
    """Return the largest difference of each output; raise ReplayError if structures, or values such as text, differ."""
    leaves, spec = pytree.tree_flatten(expected)
    other_leaves, other_spec = pytree.tree_flatten(found)
    if spec != other_spec:
        places = compare_specs(spec, other_spec, name="output", names=("expected", "found"))
        first = " ".join(str(places[0]).split()) if places else f"expected {spec}, found {other_spec}"
        raise ReplayError(f"the outputs have a different structure: {first}")
    differences = {}
    for name, one, other in zip(names, leaves, other_leaves, strict=True):
        try:
            kinds = [torch.Tensor if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in (one, other)]
            if kinds[0] is not kinds[1]:
                raise ReplayError(f"expected {describe_leaf(one)}, found {describe_leaf(other)}")
            difference = largest_difference(one, other)
        except ReplayError as error:
            raise ReplayError(f"output {name!r}: {without_cause(error)}") from None
        if isinstance(one, (torch.Tensor, bool, int, float, complex)):
            differences[name] = difference
    return differences


class Report(abc.ABC):
    """Base class of comparison reports, which ``print`` shows as a table.

    Attributes:
        tolerance: largest absolute difference allowed.
    """

    tolerance: float

    @abc.abstractmethod
    def differences(self) -> Iterable[float]:
        """Return the largest difference in every comparison; infinite if a call failed or cannot be compared."""

    @abc.abstractmethod
    def nan_shares(self) -> Iterable[Mapping[str, float]]:
        """Return, for each test case, the share of NaN elements in each output, by output name."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """Return the report as a table."""

    @property
    def max_difference(self) -> float:
        """The largest difference in all comparisons; infinite if a call failed or cannot be compared."""
        return max(self.differences(), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether all differences are within the tolerance, and every output has a finite number in some test case."""
        return self.max_difference <= self.tolerance and not self.without_number()

    def without_number(self) -> list[str]:
        """Return the names of outputs that have no finite element in any test case: comparing them shows nothing."""
        least: dict[str, float] = {}
        for shares in self.nan_shares():
            least |= {name: min(share, least.get(name, 1.0)) for name, share in shares.items()}
        return [name for name, share in least.items() if share == 1.0]

    def nan_notes(self) -> list[str]:
        """Return a note on outputs without a finite number, and a note on outputs that contain some NaN."""
        notes, nothing = [], self.without_number()
        if nothing:
            notes.append(
                f"the model itself returns only NaN or infinite values in {', '.join(nothing)}, so nothing was "
                "compared. Look for NaN in the model's weights and inputs."
            )
        most: dict[str, float] = {}
        for shares in self.nan_shares():
            most |= {name: max(share, most.get(name, 0.0)) for name, share in shares.items() if name not in nothing}
        parts = [f"{share:.1%} of {name}" for name, share in most.items() if share]
        if parts:
            notes.append(f"values that are NaN in the model itself were not compared: up to {', '.join(parts)}.")
        return notes
