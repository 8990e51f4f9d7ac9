"""The plan of a split model, and the values that pass between its modules, for a microbatch or the whole batch."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten import pytree_dataclass
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ..loss.call_options import CallOptions, split_options
from .caches import Entry
from .call_log import CallLog, Embedded, Observed, Tree
from .capture import asked_for
from .stub import Key


@dataclasses.dataclass(frozen=True)
class CutPlan:
    """The order of the modules of a split model: layer calls, and phases, which run code outside of the layers."""

    calls: Sequence[Observed]  # calls of layers, in order
    ends: Sequence[int]  # position after the last call that each phase records
    keep: frozenset[Key] = frozenset()  # outputs of layers that phases read
    used: Sequence[frozenset[str] | None] = ()  # names of the parameters that each phase reads; `None` if not known yet
    # names of the embeddings that only phase 0 computes; later phases pass placeholders of them to completed layers
    embeddings: frozenset[str] = frozenset()
    # entries that each call reads from caches that the model created; `None` if not known yet
    cache_reads: Mapping[int, frozenset[Entry]] | None = None

    def is_extra(self, place: int, leaf: int) -> bool:
        """Report whether a layer output is not the hidden state (the first output that has the shape of an input)."""
        leaves = self.calls[place].leaves
        return leaf != next((i for i, like in enumerate(leaves) if isinstance(like, int) and like >= 0), None)

    def returned_others(self, results: Mapping[int, Tree]) -> bool:
        """Report whether layers returned tensors at other positions of their outputs than for the example."""
        pairs = [(self.calls[place].leaves, result.leaves) for place, result in results.items()]
        return any(
            any(isinstance(like, tuple) is isinstance(leaf, Key) for like, leaf in zip(expected, found, strict=True))
            for expected, found in pairs
            if len(expected) == len(found)
        )

    def names(self) -> list[str]:
        """Return the names of the modules of the split model, in order.

        >>> CutPlan([], [0, 0]).names()
        ['phase 0', 'phase 1']
        """
        found, start = list[str](), 0
        for phase, end in enumerate(self.ends):
            found.append(f"phase {phase}")
            found += [call.layer for call in self.calls[start:end]]
            start = max(start, end)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class CutState:
    """The values that a module of a split model passes to the next module, for one microbatch.

    The engine flattens a `CutState` between two modules, to copy its tensors to the next device. A module never changes
    the values of its `CutState` in place, because the engine passes the same values again for recomputation.
    """

    call: tuple[tuple[Any, ...], Kwargs]  # arguments of the model, `(args, kwargs)`
    options: CallOptions | None  # `None` if the last phase returns the model's output unchanged
    values: dict[Key, torch.Tensor]  # arguments and outputs of layers, while they are needed
    # contents of dictionaries and lists that layers read and write, such as the shared keys and values of Gemma
    boxes: dict[int, Any]
    call_log: CallLog
    seed: int  # seed of the random numbers that the model draws outside of its layers

    def restart_noise(self) -> None:
        """Seed the random generators of device and CPU, so that repeated code of the model draws the same numbers."""
        # transformers draws on the CPU which layers to drop, also if the model is on another device
        torch.default_generator.manual_seed(self.seed)
        _generator(self.call).manual_seed(self.seed)


pytree_dataclass(CutState, backends="torch")


def begin(args: tuple[Any, ...], kwargs: Kwargs, model: nn.Module) -> CutState:
    kwargs, options = split_options(kwargs)
    # if layers may be dropped, the code after the layers may read the output of any layer
    keep = "all" if model.training and drops_layers(model) else asked_for(model, kwargs)
    seed = _generator((args, kwargs)).initial_seed()
    return CutState((args, kwargs), options, values={}, boxes={}, call_log=CallLog(keep=keep), seed=seed)


def drops_layers(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return any(getattr(config, f"{part}layerdrop", 0) for part in ("", "encoder_", "decoder_"))


def device_of(tree: PyTree) -> torch.device:
    found = (leaf.device for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return next(found, torch.device("cpu"))


def _generator(call: Any) -> Any:
    """Return the object that seeds a device: torch's CPU generator, or a module such as ``torch.cuda``."""
    device = device_of(call)
    return torch.default_generator if device.type in ("cpu", "meta") else torch.get_device_module(device)


# The states of microbatches are joined before the last phase, so that the phase runs once for the whole batch:
#
#     microbatch 0    layers ... --> state: hidden (2, 8, 16)
#                                                              --> state: hidden (3, 8, 16) --> last phase
#     microbatch 1    layers ... --> state: hidden (1, 8, 16)
#
# The row axis of a tensor is the axis whose size differs between two states with different numbers of rows. A tensor of
# the same shape in both states belongs to all rows, such as the position bias of T5.


class CannotJoinError(Exception):
    """The layers' outputs of several microbatches cannot be joined; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class RowAxes:
    """The batch axis of each tensor that passes between the modules of a split model."""

    # axis of each leaf of values and boxes; `None` for a tensor that belongs to all rows
    values: tuple[int | None, ...]
    embedded: Mapping[str, tuple[int | None, ...]]  # axis of each output of an embedding, by the embedding's name

    @classmethod
    def of(cls, whole: CutState, part: CutState) -> RowAxes:
        """Find the batch axes of passed tensors by comparing their shapes for two batches of different sizes."""
        (held, spec), (others, other_spec) = state_leaves(whole), state_leaves(part)
        if spec != other_spec or not _are_alike(held, others):
            raise CannotJoinError("layers return different structures for different rows")
        pairs, also = zip(held, others, strict=True), part.call_log.embedded
        values = tuple(_axis(a.shape, b.shape) if isinstance(a, torch.Tensor) else None for a, b in pairs)
        embedded = {
            name: tuple(_axis(a.shape, b.shape) for a, b in zip(calls, also.get(name, ()), strict=True))
            for name, calls in whole.call_log.embedded.items()
        }
        return cls(values, embedded)


def join_states(states: Sequence[CutState], axes: RowAxes, args: tuple[Any, ...], kwargs: Kwargs) -> CutState:
    flat, logs = [state_leaves(state) for state in states], [state.call_log for state in states]
    first, spec = flat[0]
    is_alike = all(other == spec and _are_alike(leaves, first) for leaves, other in flat)
    # the same layers were called, and returned the same structures
    made = [(one.results, one.captured, one.needed, one.keep, one.calls.keys(), one.embedded.keys()) for one in logs]
    if not is_alike or any(one != made[0] for one in made):
        raise CannotJoinError("layers return different structures for different rows")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [_joined(column, axis) for column, axis in zip(columns, axes.values, strict=True)]
    values, boxes = pytree.tree_unflatten(joined, spec)
    embedded: dict[str, list[Embedded]] = {}
    for name, calls in logs[0].embedded.items():
        embedded[name] = []
        for number, (call, axis) in enumerate(zip(calls, axes.embedded[name], strict=True)):
            shape = list(call.shape)
            if axis is not None:
                shape[axis] = sum(log.embedded[name][number].shape[axis] for log in logs)
            embedded[name].append(Embedded(call.key, torch.Size(shape), call.dtype))
    own, options = split_options(kwargs)
    call_log = dataclasses.replace(logs[0], embedded=embedded, is_of_others=True)
    return CutState((args, own), options, values, boxes, call_log, states[0].seed)


def state_leaves(state: CutState) -> tuple[list[Any], pytree.TreeSpec]:
    """Flatten the values that pass between two modules, except the arguments of the model."""
    leaves, spec = pytree.tree_flatten((dict(sorted(state.values.items())), state.boxes))
    return leaves, spec


def _are_alike(held: Sequence[Any], others: Sequence[Any]) -> bool:
    # not alike: one list has a mask where the other has `None`, because a model omits the mask for unpadded rows
    return all(type(one) is type(other) for one, other in zip(held, others, strict=True))


def _axis(whole: Sequence[int], part: Sequence[int]) -> int | None:
    if len(whole) != len(part):
        raise CannotJoinError(f"a tensor between layers has {len(whole)} axes, but {len(part)} axes for fewer rows")
    axes = [axis for axis, (one, other) in enumerate(zip(whole, part, strict=True)) if one != other]
    if len(axes) > 1:
        raise CannotJoinError(f"several axes of a tensor depend on the number of rows: {tuple(whole)}, {tuple(part)}")
    return axes[0] if axes else None


def _joined(column: Sequence[Any], axis: int | None) -> Any:
    first = column[0]
    if axis is None:
        is_same = torch.equal if isinstance(first, torch.Tensor) else operator.eq
        if not all(is_same(first, other) for other in column[1:]):
            raise CannotJoinError("a value without a batch axis differs between microbatches")
        return first
    if len({(*t.shape[:axis], *t.shape[axis + 1 :]) for t in column}) > 1:
        raise CannotJoinError(f"shapes {[tuple(t.shape) for t in column]} cannot be concatenated along axis {axis}")
    return torch.cat(list(column), axis)
