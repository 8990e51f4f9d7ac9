"""The calls of layers in one microbatch of a cut model, without tensors: their arguments and results by key."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Literal

import torch

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import PyTree

from ...device.transfer import Static
from .made_caches import MadeCache
from .placeholder import Key


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """A nested value in which keys stand for tensors."""

    spec: pytree.TreeSpec  # structure
    # A `Key` for each tensor, a `BoxUse` for each box, an `EmptyCache` or a `MadeCache` for each cache; else the value
    # itself
    leaves: tuple[Any, ...]

    def keys(self) -> set[Key]:
        """Return the keys of its tensors, including those in its boxes."""
        found = {leaf for leaf in self.leaves if isinstance(leaf, Key)}
        for leaf in self.leaves:
            if isinstance(leaf, BoxUse) and leaf.content is not None:
                found |= leaf.content.keys()
            elif isinstance(leaf, MadeCache):
                found |= leaf.keys()
        return found

    def build(self, values: Mapping[Key, Any], boxes: Mapping[int, Any]) -> PyTree:
        """Return the nested value with its tensors and boxes."""
        found = []
        for leaf in self.leaves:
            if isinstance(leaf, Key):
                found.append(values[leaf])
            elif isinstance(leaf, BoxUse):
                found.append(boxes[leaf.number])
            elif isinstance(leaf, EmptyCache):
                found.append(copy.deepcopy(leaf.empty))
            elif isinstance(leaf, MadeCache):
                found.append(leaf.build(values))
            else:
                found.append(leaf)
        return pytree.tree_unflatten(found, self.spec)


@dataclasses.dataclass(frozen=True, slots=True)
class BoxUse:
    """A box among the arguments of a call: a dictionary or list that layers read and write."""

    number: int  # number of the box in its microbatch
    kind: type  # class of the box
    # content that the model's own code put into it before this call; `None` if it is as the layers left it
    content: Tree | None


@dataclasses.dataclass(frozen=True, slots=True)
class EmptyCache:
    """An empty cache among the arguments of a call. Each call gets a copy, as no other layer reads what it writes."""

    empty: Any  # cache to copy


@dataclasses.dataclass(frozen=True, slots=True)
class CallSpec:
    """A recorded call of a layer."""

    arguments: Tree  # arguments of the call, `(args, kwargs)`
    # names of the outputs that the model captures by hooks inside of layers, each with the number that was captured
    # before this call
    collect: tuple[tuple[str, int], ...] = ()

    def boxes(self) -> list[BoxUse]:
        """Return the boxes among the arguments."""
        return [leaf for leaf in self.arguments.leaves if isinstance(leaf, BoxUse)]

    def caches(self) -> list[EmptyCache | MadeCache]:
        """Return the caches among the arguments that the model made."""
        return [leaf for leaf in self.arguments.leaves if isinstance(leaf, (EmptyCache, MadeCache))]


@dataclasses.dataclass(frozen=True, slots=True)
class Embedded:
    """The output of an embedding in phase 0."""

    key: Key  # key of the tensor
    shape: torch.Size  # shape of the tensor
    dtype: torch.dtype  # dtype of the tensor


@dataclasses.dataclass(frozen=True)
class CallLog(Static):
    """The calls of a microbatch."""

    calls: Mapping[int, CallSpec] = dataclasses.field(default_factory=dict)  # recorded calls by their place in the plan
    # keys of the tensors without which a phase could not continue, and which the next phase reads
    needed: frozenset[Key] = frozenset()
    # place of the last recorded call that takes each tensor
    last_use: Mapping[Key, int] = dataclasses.field(default_factory=dict)
    # structure of the output of each completed call
    results: Mapping[int, Tree] = dataclasses.field(default_factory=dict)
    # structure of the outputs that hooks captured in each completed call, `{name: list}`
    captured: Mapping[int, Tree] = dataclasses.field(default_factory=dict)
    # outputs of each embedding that only phase 0 computes, call by call
    embedded: Mapping[str, Sequence[Embedded]] = dataclasses.field(default_factory=dict)
    # outputs of layers that are kept to the end because the model returns them: `"none"` (default), `"extras"` (all but
    # hidden states) or `"all"`
    keep: Literal["none", "extras", "all"] = "none"
    # whether layers were called with other rows, or other masks of them, than the last phase is: for some rows a mask
    # is left out, for example. Default: `False`.
    is_of_others: bool = False

    def record(self, calls: Mapping[int, CallSpec], *needed: Key) -> CallLog:
        """Return the call log with more calls."""
        last_use = dict(self.last_use)
        for place, call in sorted(calls.items()):
            last_use.update(dict.fromkeys(call.arguments.keys(), place))
        return dataclasses.replace(
            self, calls={**self.calls, **calls}, last_use=last_use, needed=self.needed | {*needed}
        )

    def made(self, place: int, result: Tree, captured: Tree | None) -> CallLog:
        """Return the call log after a call."""
        # captured: structure of the outputs that hooks captured; `None` without any
        held = self.captured if captured is None else {**self.captured, place: captured}
        return dataclasses.replace(self, results={**self.results, place: result}, captured=held)


def live(
    values: Mapping[Key, torch.Tensor], call_log: CallLog, place: int, kept: frozenset[Key]
) -> dict[Key, torch.Tensor]:
    """Return the values that are needed after a call."""
    # What is dropped here is neither copied to the next device nor kept for its backward.
    captured = set().union(*(tree.keys() for tree in call_log.captured.values())) if call_log.captured else frozenset()
    return {
        key: value
        for key, value in values.items()
        if call_log.last_use.get(key, -1) > place or key in kept or key in captured or key in call_log.needed
    }


def is_box(value: Any) -> bool:
    """Report whether a layer could write into this argument."""
    return isinstance(value, (MutableMapping, MutableSequence))


def box_content(box: Any) -> PyTree:
    """Return what is in a box, as a plain dictionary or list."""
    return dict(box) if isinstance(box, MutableMapping) else list(box)


def fill_box(box: Any, content: Any) -> None:
    """Replace the content of a box."""
    box.clear()
    if isinstance(box, MutableMapping):
        box.update(content)
    else:
        box.extend(content)
