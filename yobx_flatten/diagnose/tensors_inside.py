"""Count the tensors inside one leaf, and list the objects in it that must be registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ..core.contents import Layouts, size_in_bytes
from ..private_names.of_torch import get_node_type, pytree

_CONTAINERS = (list, tuple, dict)


@dataclasses.dataclass(slots=True)
class Holder:
    """An object that may have to be registered, with the way to it from the leaf and what it holds."""

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
