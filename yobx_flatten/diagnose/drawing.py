"""Draw a nested object as a tree of text: :func:`explain`."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch

from ..core.contents import Layouts
from ..core.private_names.of_torch import get_node_type, pytree
from ..errors.failures import format_bytes, result_or
from ..registry.recipe.aliases import PyTree
from ..trees.walk import children_of, class_name, format_entry
from .opaque import Unregistered, find_unregistered, format_count

_DEEPEST = 50
_LONGEST_PERIOD = 8
_FEWEST = 3  # the smallest number of equal siblings that are merged into one row


@dataclasses.dataclass(frozen=True, slots=True)
class DrawingRow:
    """One line of a drawing that :func:`explain` returns.

    Attributes:
        depth: nesting depth of the line; 0 for the line of the drawn object.
        label: the last key of the path, as Python: ``['a']``, ``[0] … [31]``, ``.hidden``.
        text: description of the object.
        kind: one of ``"node"`` (is flattened), ``"tensor"``, ``"value"`` (any other leaf) and ``"opaque"`` (a leaf that
            holds tensors).
        branch: the characters that draw the tree before the label, such as ``├─``.
    """

    depth: int
    label: str
    text: str
    kind: str
    branch: str

    def __str__(self) -> str:
        return f"{self.branch}{self.label}: {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Drawing:
    """The result of :func:`explain`: a tree, which ``print`` shows as text.

    Attributes:
        rows: the lines of the drawing from top to bottom.
        unregistered: the objects that :func:`~yobx_flatten.find_unregistered` finds.
        width: largest number of characters in a line; 80 by default.
    """

    rows: tuple[DrawingRow, ...]
    unregistered: tuple[Unregistered, ...]
    width: int = 80

    def __str__(self) -> str:
        shown = map(str, self.rows)
        lines = [line if len(line) <= self.width else line[: self.width - 1] + "…" for line in shown]
        remedies = dict.fromkeys((found.advice, found.remedy) for found in self.unregistered)
        for advice in dict.fromkeys(advice for advice, _ in remedies):
            lines += ["", f"✗ {advice}:"]
            lines += [f"    {line}" for a, remedy in remedies if a == advice for line in remedy.split("\n")]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def explain(tree: PyTree, *, name: str = "tree", width: int = 80) -> Drawing:
    """Draw an object as torch flattens it: nodes, leaves with their types and shapes, static parts.

    An object that contains tensors but is not flattened is marked, and the code that registers its class follows the
    tree. Three or more equal siblings are drawn as one line, also if they alternate (``key_0, value_0, ...``).

    Args:
        tree: any object.
        name: the name of the object in the drawing; ``"tree"`` by default.
        width: largest number of characters in a line, 80 by default; longer lines are cut.

    Returns:
        A :class:`Drawing`: ``print`` shows the drawing as text, and its attribute ``rows`` contains the lines as data.

    >>> print(explain({"x": torch.zeros(2, 3), "layers": [torch.zeros(4)] * 24, "flag": True}, name="kwargs"))
    kwargs: dict of 3
    ├─ ['x']: float32[2, 3]
    ├─ ['layers']: list of 24
    │  └─ [0] … [23]: 24 × float32[4]
    └─ ['flag']: True
    """
    unregistered = find_unregistered(tree, name=name)
    opaque, layouts, inside = {found.path: found for found in unregistered}, Layouts(), list[int]()

    def part(label: str, path: str, obj: object, depth: int) -> _Part:
        # the children first, since equal children are merged
        node = pytree.SUPPORTED_NODES.get(get_node_type(obj))
        if node is not None:
            if id(obj) in inside or depth > _DEEPEST:
                return _Part(label, "… (the same object again)" if depth <= _DEEPEST else "…", "value")
            children = children_of(node, obj, path)
            inside.append(id(obj))
            below = [part(format_entry(key), path + format_entry(key), one, depth + 1) for key, one in children]
            inside.pop()
            cls, names = type(obj), [getattr(key, "key", getattr(key, "name", None)) for key, _ in children]
            text, static = _short_name(cls), None
            if cls.__module__ in ("builtins", "collections"):
                text = f"{text} of {len(names)}"
            elif get_node_type(obj) is cls:
                static = node.flatten_fn(obj)[1]
            if type(static) is list and len(static) in (2, 3) and type(static[0]) is list and names:
                # this package writes a list: the names of children, the values of static fields, other keys
                own = len(static[0])
                if static[0] == names[:own] and [names[own:]] == static[2:] + [[]] * (3 - len(static)):
                    static = static[1] or None
            if static is not None and not (type(static) is list and static == names):
                text = f"{text}, static {_one_line(static)}"
            return _Part(label, text, "node", tuple(_merged(below)))
        if path in opaque:
            found = opaque[path]
            holds = f"{format_count(found.tensors)}, {format_bytes(found.nbytes)}"
            return _Part(label, f"✗ {_short_name(found.cls)}, not registered: {holds}", "opaque")
        if layouts(type(obj)).is_tensor:
            tensor: Any = obj
            device = getattr(tensor, "device", None)
            where = "" if not isinstance(device, torch.device) or device.type == "cpu" else f" on {device}"
            array = "" if isinstance(tensor, torch.Tensor) else f"{type(tensor).__module__.partition('.')[0]} "
            dtype = str(tensor.dtype).removeprefix("torch.")
            return _Part(label, f"{array}{dtype}{_sizes(tensor)}{where}", "tensor")
        closed = layouts(type(obj)).is_closed and not issubclass(type(obj), type)
        return _Part(label, _one_line(obj) if closed else f"{class_name(type(obj))}, a leaf without tensors", "value")

    root = part(name, name, tree, 0)
    rows = [DrawingRow(0, root.label, root.text, root.kind, "")]
    _draw(root, 1, "", rows)
    return Drawing(tuple(rows), tuple(unregistered), width)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A node of the drawn tree, with its children; nodes that differ only in their labels are equal."""

    label: str = dataclasses.field(compare=False)
    text: str
    kind: str
    below: tuple[_Part, ...] = ()


def _sizes(tensor: Any) -> str:
    if not getattr(tensor, "is_nested", False):
        return str(list(tensor.shape))
    found = []
    for axis in range(tensor.dim()):
        try:
            found.append(str(tensor.size(axis)))
        except RuntimeError:  # the rows have different lengths
            found.append("…")
    return f"[{', '.join(found)}], nested"


def _short_name(cls: type) -> str:
    return class_name(cls).rpartition("<locals>.")[2].rpartition(".")[2]


def _one_line(value: object) -> str:
    return result_or(
        lambda: " ".join(repr(value).split()),
        lambda error: f"<{type(value).__qualname__}: its __repr__ raised {type(error).__name__}>",
    )


def _merged(parts: list[_Part]) -> list[_Part]:
    """Merge equal siblings into one line, and alternating siblings, such as keys and values, into several lines."""
    merged: list[_Part] = []
    patterns = [(re.sub(r"\d+", "#", part.label), part) for part in parts]
    start = 0
    while start < len(parts):
        period, times = 1, 1  # length and count of the longest repeated group of siblings from `start`
        for length in range(1, _LONGEST_PERIOD + 1):
            end = start + length
            while end < len(patterns) and patterns[end] == patterns[end - length]:
                end += 1
            count = (end - start) // length
            if count >= _FEWEST and count * length > period * times:
                period, times = length, count
        for first in range(start, start + period):
            part, last = parts[first], parts[first + period * (times - 1)]
            if times > 1:
                part = dataclasses.replace(part, label=f"{part.label} … {last.label}", text=f"{times} × {part.text}")
            merged.append(part)
        start += period * times
    return merged


def _draw(part: _Part, depth: int, indent: str, rows: list[DrawingRow]) -> None:
    for number, child in enumerate(part.below, 1):
        is_last = number == len(part.below)
        rows.append(DrawingRow(depth, child.label, child.text, child.kind, indent + ("└─ " if is_last else "├─ ")))
        _draw(child, depth + 1, indent + ("   " if is_last else "│  "), rows)
