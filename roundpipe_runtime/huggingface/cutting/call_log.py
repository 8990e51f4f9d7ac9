"""Find the layers of a model, and log the calls of the layers; in a log, a `Key` stands for each tensor."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Literal

import torch
from torch import nn

from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.registry.recipe.aliases import PyTree

from ...device.transfer import Static
from .caches import MadeCache
from .stub import Key


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """A nested value, such as the arguments of a layer, in which a :class:`Key` stands for each tensor."""

    spec: pytree.TreeSpec
    # a `Key` for each tensor, a `BoxUse` for each box, an `EmptyCache` or a `MadeCache` for each cache; else the value
    leaves: tuple[Any, ...]

    def keys(self) -> set[Key]:
        boxes = [leaf.content for leaf in self.leaves if isinstance(leaf, BoxUse) and leaf.content is not None]
        caches = [leaf for leaf in self.leaves if isinstance(leaf, MadeCache)]
        keys = {leaf for leaf in self.leaves if isinstance(leaf, Key)}
        return keys.union(*(content.keys() for content in boxes), *(cache.keys() for cache in caches))

    def build(self, values: Mapping[Key, Any], boxes: Mapping[int, Any]) -> PyTree:
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
    """A mutable dictionary or list among the arguments of a layer call, which layers read and write."""

    number: int  # number of the box in its microbatch
    kind: type  # class of the box
    # content that the model's own code has put into the box; `None` if only layers have changed it since
    content: Tree | None


@dataclasses.dataclass(frozen=True, slots=True)
class EmptyCache:
    """An empty KV cache among the arguments of a layer call; each call gets a copy of the cache."""

    empty: Any


@dataclasses.dataclass(frozen=True, slots=True)
class CallSpec:
    """A layer call that the model's own code made, recorded to be run by a later module of the pipeline."""

    arguments: Tree  # arguments of the call, `(args, kwargs)`
    # names of the outputs that hooks capture, each with the number of outputs captured before this call
    collect: tuple[tuple[str, int], ...] = ()

    def boxes(self) -> list[BoxUse]:
        return [leaf for leaf in self.arguments.leaves if isinstance(leaf, BoxUse)]


@dataclasses.dataclass(frozen=True, slots=True)
class Embedded:
    """Describes the output of an embedding layer; only the first module of the pipeline computes this output."""

    key: Key
    shape: torch.Size
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class CallLog(Static):
    """The layer calls of one microbatch so far, with their arguments and results; a `Key` stands for each tensor."""

    calls: Mapping[int, CallSpec] = dataclasses.field(default_factory=dict)  # calls by position in the plan
    needed: frozenset[Key] = frozenset()  # keys of the tensors without which the next phase cannot continue
    last_use: Mapping[Key, int] = dataclasses.field(default_factory=dict)  # last recorded call that takes each tensor
    results: Mapping[int, Tree] = dataclasses.field(default_factory=dict)  # structure of each completed call's output
    captured: Mapping[int, Tree] = dataclasses.field(default_factory=dict)  # and of what hooks captured, by name
    # outputs of each embedding that only phase 0 computes, call by call
    embedded: Mapping[str, Sequence[Embedded]] = dataclasses.field(default_factory=dict)
    # layer outputs that the model returns: `"none"`, `"extras"` (all except hidden states) or `"all"`
    keep: Literal["none", "extras", "all"] = "none"
    # whether layers were called with other rows than the last phase: states of microbatches were joined
    is_of_others: bool = False

    def record(self, calls: Mapping[int, CallSpec], *needed: Key) -> CallLog:
        last_use = dict(self.last_use)
        for place, call in sorted(calls.items()):
            last_use.update(dict.fromkeys(call.arguments.keys(), place))
        return dataclasses.replace(
            self, calls={**self.calls, **calls}, last_use=last_use, needed=self.needed | {*needed}
        )


def is_box(value: Any) -> bool:
    return isinstance(value, (MutableMapping, MutableSequence))


def box_content(box: Any) -> PyTree:
    return dict(box) if isinstance(box, MutableMapping) else list(box)


def fill_box(box: Any, content: Any) -> None:
    box.clear()
    if isinstance(box, MutableMapping):
        box.update(content)
    else:
        box.extend(content)


@dataclasses.dataclass(frozen=True)
class Candidate:
    path: str  # name of the list in the model
    layers: dict[str, nn.Module]  # layers by their name in the model
    size: int  # number of elements of all parameters


def candidates(model: nn.Module) -> list[Candidate]:
    """Return the outermost lists of modules in a model, largest first.

    A list has at least two modules, and each module has parameters. An ``nn.Sequential`` counts as a list only if all
    of its modules have the same class.

    >>> [found.path for found in candidates(nn.ModuleDict({"h": nn.ModuleList([nn.Linear(2, 2)] * 2)}))]
    ['h']
    """
    return sorted(_lists(model, ""), key=lambda candidate: -candidate.size)


def _lists(module: nn.Module, path: str) -> Iterator[Candidate]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        # children() lists a module that occurs several times only once
        held = [one for one in child._modules.values() if one is not None]
        # a Sequential of linear layers and activations is one small network, not a list of layers
        are_alike = len({*map(type, held)}) == 1 and all(list(one.children()) for one in held)
        are_layers = len(held) >= 2 and all(any(True for _ in one.parameters()) for one in held)
        if are_layers and (isinstance(child, nn.ModuleList) or (isinstance(child, nn.Sequential) and are_alike)):
            layers = {f"{inner}.{key}": layer for key, layer in child._modules.items()}
            yield Candidate(inner, layers, sum(p.numel() for p in child.parameters()))
        else:
            yield from _lists(child, inner)


@dataclasses.dataclass(frozen=True)
class Observed:
    """One call of a layer in a forward of the model, with the structure of its output."""

    layer: str  # name of the layer
    spec: pytree.TreeSpec
    # for a tensor, the position of an input tensor with the same shape and dtype, or `-1`; `(value,)` for other leaves
    leaves: tuple[int | tuple[Any], ...]


def observe(layers: dict[str, nn.Module], forward: Callable[[], Any]) -> tuple[list[Observed], Any]:
    seen: list[Observed] = []
    names = {id(layer): name for name, layer in reversed(layers.items())}  # a shared layer has its first name

    def hook(module: nn.Module, args: Any, kwargs: Any, out: PyTree) -> None:
        inputs = tensors_of((args, kwargs))
        leaves, spec = pytree.tree_flatten(out)
        found: list[int | tuple[Any]] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                alike = (i for i, t in enumerate(inputs) if (t.shape, t.dtype) == (leaf.shape, leaf.dtype))
                found.append(next(alike, -1))
            else:
                found.append((leaf,))
        seen.append(Observed(names[id(module)], spec, tuple(found)))

    with contextlib.ExitStack() as hooks:
        for layer in {id(layer): layer for layer in layers.values()}.values():
            hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
        return seen, forward()


def tensors_of(arguments: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments of a call, in order; dictionaries and lists as arguments are skipped."""
    # kwargs itself is not a box; it is compared by its id, because a reference to it would form a cycle
    outside = id(arguments[1])
    leaves = pytree.tree_leaves(arguments, is_leaf=lambda value: is_box(value) and id(value) != outside)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
