"""Find objects that hold tensors and that torch does not flatten, with the line to type for each.

::

    {"state": State(caches=[DynamicCache, DynamicCache]), "x": tensor}

    torch sees      a dict -> State, a leaf          -> tensor
    we look inside           State -> list -> two DynamicCache -> 8 tensors
    found           tree['state'], and in it tree['state'].caches[0] and tree['state'].caches[1]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ..core.contents import Layouts, size_in_bytes
from ..errors.messages import format_bytes
from ..private_names.of_torch import get_node_type, pytree
from ..recipe.aliases import PyTree
from ..trees.walk import class_name, torch_leaves
from .remedies import Remedy, registers_what_is_inside, remedy_for


@dataclasses.dataclass(frozen=True, slots=True)
class Unregistered:
    """An object that holds tensors and that torch's pytree does not flatten.

    Attributes:
        path: key path of the object, as Python.
        cls: class of the object.
        tensors: number of tensors (and arrays of NumPy and JAX) it holds. For an object inside a leaf, a tensor that it
            holds twice counts twice.
        nbytes: their size in bytes.
        remedy: the line to type.
        advice: what the line does, in words.
        inside: path of the leaf that holds the object; ``None`` if the object is a leaf itself. Once the holder is
            registered, the object is a leaf.
    """

    path: str
    cls: type
    tensors: int
    nbytes: int
    remedy: str
    advice: str = "Register it first"
    inside: str | None = None

    def __str__(self) -> str:
        """Say what, where, and what to do."""
        remedy = self.remedy.replace("\n", "\n    ")
        where = "" if self.inside is None else f" (inside {self.inside})"
        return (
            f"{self.path}{where} is a {class_name(self.cls)}, which torch does not know how to flatten. It holds "
            f"{format_count(self.tensors)}, {format_bytes(self.nbytes)}. {self.advice}:\n    {remedy}"
        )


def find_unregistered(tree: PyTree, *, name: str = "tree") -> list[Unregistered]:
    """Find every object that holds tensors and that torch does not flatten, in the order of the tree.

    Neither properties nor other code of the objects runs, and nothing is imported: attributes, ``__slots__`` and the
    items of built-in containers are read where Python keeps them. Only the flatten functions of registered classes
    are called. A ``torch.nn.Module`` counts with its parameters; functions are not looked into.

    Args:
        tree: anything: arguments, outputs, a batch.
        name: what ``tree`` is called where you type the line; the paths begin with it. ``"tree"`` by default.

    Returns:
        The leaves, and the objects that become leaves once these are registered: each has ``path``, ``cls``,
        ``tensors``, ``nbytes``, ``remedy`` and ``inside``, and prints them.

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
    seen: dict[int, list[Holder]] = {}
    remedies: dict[int, Remedy] = {}
    covers: dict[int, bool] = {}  # by the id of the class, since a metaclass can hash in its own way

    def is_covering(cls: type) -> bool:
        if id(cls) not in covers:
            covers[id(cls)] = registers_what_is_inside(cls)
        return covers[id(cls)]

    for path, leaf in torch_leaves(tree, name):
        if layouts(type(leaf)).is_closed:
            continue
        if id(leaf) not in seen:
            seen[id(leaf)] = holders_in(leaf, layouts, is_covering)
        for holder in seen[id(leaf)]:
            cls = type(holder.obj)
            if id(cls) not in remedies:
                remedies[id(cls)] = remedy_for(cls, holder.obj, layouts)
            advice, line = remedies[id(cls)]
            inside = None if holder.obj is leaf else path
            found.append(Unregistered(path + holder.path, cls, holder.tensors, holder.nbytes, line, advice, inside))
    return found


def format_count(tensors: int) -> str:
    """Spell a number of tensors."""
    return f"{tensors} tensor{'' if tensors == 1 else 's'}"


# Count the tensors inside one leaf, and list the objects in it that must be registered.


_CONTAINERS = (list, tuple, dict)


@dataclasses.dataclass(slots=True)
class Holder:
    """An object that may have to be registered, with its path from the leaf and its contents."""

    path: str
    obj: Any
    tensors: int = 0
    nbytes: int = 0


@dataclasses.dataclass(slots=True)
class _Frame:
    """An object that the walk is inside of."""

    path: str
    obj: Any
    children: Iterator[tuple[str, Any]]
    holder: Holder | None
    covers: bool  # what is inside is registered together with this one
    tensors: int = 0
    nbytes: int = 0

    def add(self, tensors: int, nbytes: int) -> None:
        self.tensors += tensors
        self.nbytes += nbytes


def holders_in(leaf: object, layouts: Layouts, covers: Callable[[type], bool]) -> list[Holder]:
    """The leaf, if it holds tensors, and the objects inside it that hold some and must also be registered."""
    walk = _Walk(layouts, covers)
    walk.enter("", leaf)
    while walk.frames:
        walk.step()
    first = walk.holders[0]  # of the leaf itself it is known exactly: each tensor once
    first.tensors, first.nbytes = len(walk.tensors), sum(walk.tensors.values())
    return [holder for holder in walk.holders if holder.tensors]


class _Walk:
    """A walk into depth, without recursion.

    What an object holds is added up when the walk leaves it. An object reached a second time adds what it held the
    first time; one that the walk is still inside of adds nothing, so that a child does not hold its parent's tensors.
    Objects are known by their ids: all of them are alive, held by the leaf.
    """

    def __init__(self, layouts: Layouts, covers: Callable[[type], bool]) -> None:
        self.frames: list[_Frame] = []
        self.holders: list[Holder] = []
        self.tensors: dict[int, int] = {}
        self._totals: dict[int, tuple[int, int]] = {}
        self._layouts, self._covers = layouts, covers

    def step(self) -> None:
        """Go through the children of the innermost object, as far as the first that has to be entered."""
        frame = self.frames[-1]
        for step, child in frame.children:
            layout = self._layouts(type(child))
            if layout.is_tensor:
                frame.add(1, self._size(child))
            elif id(child) in self._totals:
                frame.add(*self._totals[id(child)])
            elif not layout.is_closed:
                self.enter(frame.path + step, child)
                return
        self._leave()

    def enter(self, path: str, obj: object) -> None:
        covered = bool(self.frames) and self.frames[-1].covers
        holder = None
        if not covered and type(obj) not in _CONTAINERS:
            covered = self._covers(type(obj))
            if get_node_type(obj) not in pytree.SUPPORTED_NODES:
                holder = Holder(path, obj)
                self.holders.append(holder)
        self._totals[id(obj)] = (0, 0)
        self.frames.append(_Frame(path, obj, iter(self._layouts(type(obj)).children(obj)), holder, covered))

    def _leave(self) -> None:
        frame = self.frames.pop()
        self._totals[id(frame.obj)] = (frame.tensors, frame.nbytes)
        if frame.holder is not None:
            frame.holder.tensors, frame.holder.nbytes = frame.tensors, frame.nbytes
        if self.frames:
            self.frames[-1].add(frame.tensors, frame.nbytes)

    def _size(self, tensor: object) -> int:
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = size_in_bytes(tensor)
        return self.tensors[id(tensor)]
