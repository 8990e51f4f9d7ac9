"""The calls of layers in one microbatch of a cut model, without tensors: their arguments and results by key."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from ...device.transfer import Static
from .placeholder import Key

__all__ = [
    "BoxUse",
    "CallLog",
    "CallSpec",
    "Embedded",
    "EmptyCache",
    "Tree",
    "box_content",
    "fill_box",
    "is_box",
    "live",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """A nested value whose tensors are named by keys.

    Attributes:
        spec: the structure.
        leaves: a `Key` for each tensor, a `BoxUse` for each box, the value itself for all else.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def keys(self) -> set[Key]:
        """Return the keys of the tensors that it needs, including those in its boxes."""
        found = {leaf for leaf in self.leaves if isinstance(leaf, Key)}
        for leaf in self.leaves:
            if isinstance(leaf, BoxUse) and leaf.content is not None:
                found |= leaf.content.keys()
        return found

    def build(self, values: Mapping[Key, Any], boxes: Mapping[int, Any]) -> Any:
        """Return the value, with these tensors and boxes in it."""
        found = []
        for leaf in self.leaves:
            if isinstance(leaf, Key):
                found.append(values[leaf])
            elif isinstance(leaf, BoxUse):
                found.append(boxes[leaf.number])
            elif isinstance(leaf, EmptyCache):
                found.append(copy.deepcopy(leaf.empty))
            else:
                found.append(leaf)
        return pytree.tree_unflatten(found, self.spec)


@dataclasses.dataclass(frozen=True, slots=True)
class BoxUse:
    """A box among the arguments of a call.

    Attributes:
        number: which one.
        kind: its class.
        content: what the model itself put into it before this call; ``None``, if it is as the layers left it.
    """

    number: int
    kind: type
    content: Tree | None


@dataclasses.dataclass(frozen=True, slots=True)
class EmptyCache:
    """An empty cache, of which each call has a copy: what a layer puts into it, no other layer reads.

    Attributes:
        empty: it.
    """

    empty: Any


@dataclasses.dataclass(frozen=True, slots=True)
class CallSpec:
    """One call of a layer.

    Attributes:
        arguments: ``(args, kwargs)``.
        collect: the outputs that the model captures by hooks inside of layers, and how many it has of each already.
    """

    arguments: Tree
    collect: tuple[tuple[str, int], ...] = ()

    def boxes(self) -> list[BoxUse]:
        """Return the boxes among the arguments."""
        return [leaf for leaf in self.arguments.leaves if isinstance(leaf, BoxUse)]


@dataclasses.dataclass(frozen=True, slots=True)
class Embedded:
    """The output of an embedding in phase 0.

    Attributes:
        key: key of the tensor.
        shape: shape of the tensor.
        dtype: dtype of the tensor.
    """

    key: Key
    shape: torch.Size
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class CallLog(Static):
    """The calls of a microbatch.

    Attributes:
        calls: those that were recorded, by their place in the program.
        needed: tensors that the next phase reads first; it is what the phase before could not go on without.
        last_use: of each tensor, the place of the last recorded call that takes it.
        results: of the calls that were made, the structure of what came out.
        captured: of the calls that were made, what hooks captured: ``{name: list}``.
        embedded: of each embedding that only phase 0 computes, what it returned, call by call.
        keep: which outputs of layers are kept to the end, as the model hands them out: ``"extras"`` are all but
            hidden states.
    """

    calls: Mapping[int, CallSpec] = dataclasses.field(default_factory=dict)
    needed: frozenset[Key] = frozenset()
    last_use: Mapping[Key, int] = dataclasses.field(default_factory=dict)
    results: Mapping[int, Tree] = dataclasses.field(default_factory=dict)
    captured: Mapping[int, Tree] = dataclasses.field(default_factory=dict)
    embedded: Mapping[str, Sequence[Embedded]] = dataclasses.field(default_factory=dict)
    keep: Literal["none", "extras", "all"] = "none"

    def record(self, calls: Mapping[int, CallSpec], *needed: Key) -> CallLog:
        """Return the call log with more calls in it, and with the tensors that the phase after them needs."""
        last_use = dict(self.last_use)
        for place, call in sorted(calls.items()):
            last_use.update(dict.fromkeys(call.arguments.keys(), place))
        return dataclasses.replace(
            self, calls={**self.calls, **calls}, last_use=last_use, needed=self.needed | {*needed}
        )

    def made(self, place: int, result: Tree, captured: Tree | None) -> CallLog:
        """Return the call log after a call."""
        held = self.captured if captured is None else {**self.captured, place: captured}
        return dataclasses.replace(self, results={**self.results, place: result}, captured=held)


def live(
    values: Mapping[Key, torch.Tensor], call_log: CallLog, place: int, kept: frozenset[Key]
) -> dict[Key, torch.Tensor]:
    """Return those values that are needed after the call at a place.

    Args:
        values: all of them.
        call_log: knows the calls to come, and what hooks captured.
        place: of the call that was just made.
        kept: what phases need, by the program.
    """
    captured = set().union(*(tree.keys() for tree in call_log.captured.values())) if call_log.captured else frozenset()
    return {
        key: value
        for key, value in values.items()
        if call_log.last_use.get(key, -1) > place or key in kept or key in captured or key in call_log.needed
    }


def is_box(value: Any) -> bool:
    """Report whether a layer could write into this argument."""
    return isinstance(value, (MutableMapping, MutableSequence))


def box_content(box: Any) -> Any:
    """Return what is in a box, as a plain dictionary or list."""
    return dict(box) if isinstance(box, MutableMapping) else list(box)


def fill_box(box: Any, content: Any) -> None:
    """Make this the content of a box."""
    box.clear()
    if isinstance(box, MutableMapping):
        box.update(content)
    else:
        box.extend(content)
