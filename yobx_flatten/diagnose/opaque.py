"""Find objects with tensors that torch does not flatten, with the line that registers each class, and draw objects."""

# {"state": State(caches=[DynamicCache, DynamicCache]), "x": tensor}
#
# torch sees      a dict -> State, a leaf          -> tensor
# we look inside           State -> list -> two DynamicCache -> 8 tensors
# found           tree['state'], and in it tree['state'].caches[0] and tree['state'].caches[1]

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..core.contents import Layouts, is_known_base, size_in_bytes
from ..core.private_names.of_torch import get_node_type, pytree
from ..errors import InvalidRegistrationError, NotRegisteredError
from ..errors.failures import format_bytes, result_or
from ..registry.claims import REGISTRY
from ..registry.recipe.aliases import PyTree
from ..registry.recipe.attributes import builtin_base
from ..registry.recipe.contract import is_constant_class
from ..registry.recipe.fields import functions_of, is_mapping
from ..trees.walk import children_of, class_name, format_entry, torch_leaves

_DEEPEST = 50
_LONGEST_PERIOD = 8
_FEWEST = 3  # the smallest number of equal siblings that are merged into one row


@dataclasses.dataclass(frozen=True, slots=True)
class Unregistered:
    """An object that holds tensors and that torch's pytree does not flatten.

    Attributes:
        path: key path of the object, as a Python expression.
        cls: class of the object.
        tensors: number of tensors (and arrays of NumPy and JAX) in the object. If the object is a leaf, a tensor that
            occurs several times counts once. If the object is inside a leaf, each occurrence of a tensor counts.
        nbytes: total size of the tensors in bytes.
        remedy: line of code that makes torch flatten the object.
        advice: a sentence that introduces ``remedy``, such as ``"Register it first"``.
        inside: path of the leaf that contains the object; ``None`` if the object is a leaf itself. An object inside a
            leaf becomes a leaf when the class of the outer leaf is registered.
    """

    path: str
    cls: type
    tensors: int
    nbytes: int
    remedy: str
    advice: str = "Register it first"
    inside: str | None = None

    def __str__(self) -> str:
        remedy = self.remedy.replace("\n", "\n    ")
        where = "" if self.inside is None else f" (inside {self.inside})"
        return (
            f"{self.path}{where} is a {class_name(self.cls)}, which torch does not know how to flatten. It holds "
            f"{format_count(self.tensors)}, {format_bytes(self.nbytes)}. {self.advice}:\n    {remedy}"
        )


def find_unregistered(tree: PyTree, *, name: str = "tree") -> list[Unregistered]:
    """Find every object in nested inputs that holds tensors and that torch does not flatten.

    No property or method of the objects runs, and nothing is imported: attributes, ``__slots__`` and the items of
    built-in containers are read directly. The only user code that runs are the flatten functions of registered classes.
    The parameters of a ``torch.nn.Module`` count as its tensors; closure variables of functions are not searched.

    Args:
        tree: any object, such as arguments, outputs or a batch.
        name: the variable name of ``tree`` in your code, with which the paths begin; ``"tree"`` by default.

    Returns:
        One :class:`Unregistered` for each leaf that contains tensors but is not a tensor. If classes of objects inside
        such a leaf must also be registered, one :class:`Unregistered` for each of these objects.

    >>> import torch
    >>> class Memory:
    ...     def __init__(self):
    ...         self.rows = [torch.zeros(2, 3), torch.zeros(4)]
    >>> (found,) = find_unregistered({"x": torch.zeros(1), "m": [Memory()]}, name="kwargs")
    >>> found.path, found.cls.__name__, found.tensors, found.nbytes
    ("kwargs['m'][0]", 'Memory', 2, 40)
    """
    layouts = Layouts()
    found: list[Unregistered] = []
    seen: dict[int, list[_Holder]] = {}
    remedies: dict[int, Remedy] = {}
    covers: dict[int, bool] = {}  # by the id of the class, since a metaclass can hash in its own way

    def is_covering(cls: type) -> bool:
        if id(cls) not in covers:
            covers[id(cls)] = _block(cls) is not None  # the registration of a cache covers its layers
        return covers[id(cls)]

    for path, leaf in torch_leaves(tree, name):
        if layouts(type(leaf)).is_closed:
            continue
        if id(leaf) not in seen:
            seen[id(leaf)] = _holders_in(leaf, layouts, is_covering)
        for holder in seen[id(leaf)]:
            cls = type(holder.obj)
            if id(cls) not in remedies:
                remedies[id(cls)] = remedy_for(cls, holder.obj, layouts)
            advice, line = remedies[id(cls)]
            inside = None if holder.obj is leaf else path
            found.append(Unregistered(path + holder.path, cls, holder.tensors, holder.nbytes, line, advice, inside))
    return found


def format_count(tensors: int) -> str:
    return f"{tensors} tensor{'' if tensors == 1 else 's'}"


@dataclasses.dataclass(slots=True)
class _Holder:
    """An object inside a leaf, or the leaf itself, with the number and total bytes of its tensors."""

    path: str
    obj: Any
    covers: bool  # whether the registration of this object covers its content
    children: Iterator[tuple[str, Any]]  # children that are not counted yet
    tensors: int = 0
    nbytes: int = 0

    def add(self, tensors: int, nbytes: int) -> None:
        self.tensors += tensors
        self.nbytes += nbytes


def _holders_in(leaf: object, layouts: Layouts, covers: Callable[[type], bool]) -> list[_Holder]:
    """Return all objects in a leaf, including the leaf, that hold tensors and whose classes need registration."""
    # A depth-first walk without recursion. An object that the walk reaches again adds the tensors of its first visit.
    # An object that is still visited adds nothing, so that a child does not count its parent's tensors. The `id` of an
    # object identifies it, since the leaf keeps all objects alive.
    holders: list[_Holder] = []
    visiting: list[_Holder] = []
    totals: dict[int, tuple[int, int]] = {}  # number and bytes of the tensors, by object
    sizes: dict[int, int] = {}  # bytes, by tensor

    def enter(path: str, obj: object) -> None:
        covered = bool(visiting) and visiting[-1].covers
        is_own = not covered and type(obj) not in (list, tuple, dict)
        covered = covered or (is_own and covers(type(obj)))
        visiting.append(_Holder(path, obj, covered, iter(layouts(type(obj)).children(obj))))
        if is_own and get_node_type(obj) not in pytree.SUPPORTED_NODES:
            holders.append(visiting[-1])
        totals[id(obj)] = 0, 0

    enter("", leaf)
    while visiting:
        parent = visiting[-1]
        for step, child in parent.children:
            layout = layouts(type(child))
            if layout.is_tensor:
                if id(child) not in sizes:
                    sizes[id(child)] = size_in_bytes(child)
                parent.add(1, sizes[id(child)])
            elif id(child) in totals:
                parent.add(*totals[id(child)])
            elif not layout.is_closed:
                enter(parent.path + step, child)
                break
        else:
            visiting.pop()
            totals[id(parent.obj)] = parent.tensors, parent.nbytes
            if visiting:
                visiting[-1].add(parent.tensors, parent.nbytes)
    # each tensor counts once for the leaf itself
    holders[0].tensors, holders[0].nbytes = len(sizes), sum(sizes.values())
    return [holder for holder in holders if holder.tensors]


class Remedy(NamedTuple):
    advice: str
    line: str


# package of arrays and tables -> the code that converts an array to a tensor
CONVERSIONS = {
    "numpy": "torch.from_numpy({})",
    "pandas": "torch.tensor({}.to_numpy())",
    **dict.fromkeys(("jax", "jaxlib", "tensorflow", "cupy"), "torch.from_dlpack({})"),
}


def remedy_for(cls: type, obj: object, layouts: Layouts, path: str = "x") -> Remedy:
    # path: the path of the object, for lines that convert the object
    convert = CONVERSIONS.get(cls.__module__.partition(".")[0])
    is_number = cls.__module__ == "numpy" and cls.__name__ != "ndarray"
    if is_number or (convert is None and layouts(cls).is_tensor):
        convert = "torch.as_tensor({})"
    if convert is not None:
        return Remedy("Pass a tensor instead", convert.format(path))
    if issubclass(cls, torch.nn.Module):
        return Remedy("A module is not an input: make it a submodule of the one that uses it", "self.part = part")
    constants = (type, slice, range, types.FunctionType, types.BuiltinFunctionType)
    if is_constant_class(cls) or issubclass(cls, constants):
        name = "type" if issubclass(cls, type) else cls.__qualname__.rpartition("<locals>.")[2]
        return Remedy(
            "A program is exported for one value: keep the value in the module, or make it static data of its object",
            f'field: {"torch." * (cls.__module__ == "torch")}{name} = dataclasses.field(metadata={{"static": True}})',
        )
    if cls.__module__.partition(".")[0] in {*sys.stdlib_module_names, "builtins"} - {"__main__"}:
        return Remedy("torch flattens lists, tuples and dicts: pass one of these", "[...]")
    base = REGISTRY.registered_base(cls)
    why = "" if base is None else f" ({base.__qualname__} is registered, which does not count for its subclasses)"
    return Remedy(f"Register it first{why}", _block(cls) or _own(cls, obj, layouts))


def _own(cls: type, obj: object, layouts: Layouts) -> str:
    """Return the line that registers a class for which this package has no flatten functions."""
    name = cls.__qualname__.rpartition("<locals>.")[2]
    of_jax = getattr(sys.modules.get("jax._src.tree_util"), "_registry", ())
    if cls in of_jax and REGISTRY.remedy(cls) is None:  # JAX has no way to remove a registration
        return f"mirror({name})"
    if {"tree_flatten", "tree_unflatten"} <= {attribute for base in cls.__mro__ for attribute in vars(base)}:
        return f"register_pytree_node_class({name})"
    with contextlib.suppress(InvalidRegistrationError):
        functions_of(cls)
        if not isinstance(obj, dict) or not is_mapping(cls) or dataclasses.is_dataclass(cls):
            return f"register({name})"
        # register() would lose attributes that are not items
        if all(dict.get(obj, key) is value for key, value in layouts(cls).names(obj)):
            return f"register({name})"
    layout = layouts(type(obj))
    attributes = [(key, value) for key, value in layout.names(obj) if type(key) is str and key.isidentifier()]
    if layout.items is not None and not attributes and not issubclass(type(obj), dict):
        return f"register_class_flattening({name}, lambda x: (list(x), None), lambda items, _: {name}(items), None)"
    if not attributes or (layout.items is not None and builtin_base(type(obj)) not in (dict, OrderedDict, list, tuple)):
        return f"register_class_flattening({name}, f_flatten, f_unflatten, f_flatten_with_keys)"
    children = [key for key, value in attributes if _may_hold_tensors(value, obj, layouts)]
    static = [key for key, _ in attributes if key not in children]
    return f"register({name}, children={children}{f', static={static}' if static else ''})"


def _block(cls: type) -> str | None:
    """Return the code of a ``with`` statement that registers a transformers or diffusers class, or ``None``."""
    remedy = REGISTRY.remedy(cls)
    if remedy is not None and remedy.startswith("with "):
        return remedy
    if "transformers.cache_utils" in sys.modules and is_known_base(cls, ("transformers",)):
        from ..huggingface.recipes import transformers_recipes

        recipe = transformers_recipes().get(cls)
        return None if recipe is None else recipe.remedy
    if "diffusers.utils.outputs" in sys.modules and is_known_base(cls, ("diffusers",)):
        from ..huggingface.outputs import diffusers_recipes

        return next((recipe.remedy for recipe in diffusers_recipes() if recipe.cls is cls), None)
    return None


def _may_hold_tensors(value: object, owner: object, layouts: Layouts) -> bool:
    """Return whether a value contains a tensor, or may contain a tensor in another call."""
    # tensors that the value reaches only through its owner do not count
    if value is None or (type(value) in (list, tuple, dict) and not value):
        return True  # in another call, the value may contain a tensor
    seen, left = {id(value), id(owner)}, [] if value is owner else [value]
    while left:
        layout = layouts(type(left[-1]))
        if layout.is_tensor:
            return True
        obj = left.pop()
        if not layout.is_closed:
            below = [child for _, child in layout.children(obj) if id(child) not in seen]
            seen.update(map(id, below))
            left += below
    return False


def explain_leaf(inputs: Mapping[str, Any], refusal: str) -> NotRegisteredError | None:
    """Return an error that names the first leaf whose class occurs in torch's error message ``refusal``."""
    layouts = Layouts()
    for name, value in inputs.items():
        for path, leaf in torch_leaves(value, name):
            if str(type(leaf)) in refusal:
                remedy = remedy_for(type(leaf), leaf, layouts, path)
                line = remedy.line.replace("\n", "\n    ")
                return NotRegisteredError(
                    f"{path} is a {class_name(type(leaf))}, which torch does not know how to flatten. "
                    f"{remedy.advice}:\n    {line}"
                )
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class DrawingRow:
    """One line of a drawing that :func:`explain` returns.

    Attributes:
        depth: nesting depth of the line; 0 for the line of the drawn object.
        label: the last key of the path, as Python: ``['a']``, ``[0] … [31]``, ``.hidden``.
        text: description of the object.
        kind: ``"tensor"``, ``"node"`` (an object that torch flattens), ``"opaque"`` (an object that contains tensors,
            and that torch does not flatten) or ``"value"`` (anything else).
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
    """Draw the tree into which torch flattens an object: nodes with static values, and leaves with types and shapes.

    The drawing marks objects that contain tensors but are not flattened. The code that registers their classes follows
    the tree. Three or more equal siblings are drawn as one line, also if they alternate (``key_0, value_0, ...``).

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
