"""Join the states of microbatches before the last phase, so that the model's own code runs once for the whole batch.

::

    microbatch 0    layers ... --> state: hidden (2, 8, 16)
                                                             --> state: hidden (3, 8, 16) --> last phase
    microbatch 1    layers ... --> state: hidden (1, 8, 16)

Which axis of a tensor holds the rows is read off two states with different numbers of rows: it is the one whose size
differs. A tensor of the same shape in both belongs to all rows, such as the position bias of T5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs

from ..loss.call_options import split_options
from .call_log import CallLog, Embedded
from .cut_plan import CutState


class CannotJoinError(Exception):
    """States of microbatches cannot be joined; the message states why, for a warning."""


@dataclasses.dataclass(frozen=True)
class RowAxes:
    """The axis of each tensor in a state that holds the rows of the batch."""

    # axis of each tensor among the values and boxes, in the order of their leaves; `None` for one that belongs to all
    # rows
    values: tuple[int | None, ...]
    embedded: Mapping[str, tuple[int | None, ...]]  # axis of each output of an embedding, by the name of the embedding

    @classmethod
    def of(cls, whole: CutState, part: CutState) -> RowAxes:
        """Read the axes off two states of the same call, of which one has more rows."""
        (held, spec), (others, other_spec) = _leaves(whole), _leaves(part)
        if spec != other_spec or not _are_alike(held, others):
            raise CannotJoinError("the layers return different kinds of tensors for different rows")
        values = tuple(
            _axis(one.shape, other.shape) if isinstance(one, torch.Tensor) else None
            for one, other in zip(held, others, strict=True)
        )
        made, also = whole.call_log.embedded, part.call_log.embedded
        embedded = {
            name: tuple(_axis(a.shape, b.shape) for a, b in zip(calls, also.get(name, ()), strict=True))
            for name, calls in made.items()
        }
        return cls(values, embedded)


def join_states(states: Sequence[CutState], axes: RowAxes, args: tuple[Any, ...], kwargs: Kwargs) -> CutState:
    """Return the state of the whole batch."""
    # states: states of the microbatches, in the order of the rows
    flat = [_leaves(state) for state in states]
    _, spec = flat[0]
    logs = [state.call_log for state in states]
    is_alike = all(other == spec and _are_alike(leaves, flat[0][0]) for leaves, other in flat)
    if not is_alike or any(not _is_alike(log, logs[0]) for log in logs):
        raise CannotJoinError("the layers return different kinds of tensors for different rows")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [_joined(column, axis) for column, axis in zip(columns, axes.values, strict=True)]
    values, boxes = pytree.tree_unflatten(joined, spec)
    own, options = split_options(kwargs)
    return CutState((args, own), options, values, boxes, _joined_log(logs, axes), states[0].seed)


def state_leaves(state: CutState) -> list[Any]:
    """Return what layers and phases have put into a state, without the arguments of the call."""
    return _leaves(state)[0]


def _leaves(state: CutState) -> tuple[list[Any], pytree.TreeSpec]:
    leaves, spec = pytree.tree_flatten((dict(sorted(state.values.items())), state.boxes))
    return leaves, spec


def _are_alike(held: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether tensors stand in the same places: a mask may be left out for some rows (Zaya's)."""
    return all(type(one) is type(other) for one, other in zip(held, others, strict=True))


def _axis(whole: Sequence[int], part: Sequence[int]) -> int | None:
    if len(whole) != len(part):
        raise CannotJoinError(f"a tensor has shape {tuple(whole)} for more rows and {tuple(part)} for fewer")
    axes = [axis for axis, (one, other) in enumerate(zip(whole, part, strict=True)) if one != other]
    if len(axes) > 1:
        raise CannotJoinError(f"a tensor has shape {tuple(whole)} for more rows and {tuple(part)} for fewer")
    return axes[0] if axes else None


def _joined(column: Sequence[Any], axis: int | None) -> Any:
    first = column[0]
    if axis is None:
        for other in column[1:]:
            is_same = torch.equal(first, other) if isinstance(first, torch.Tensor) else first == other
            if not is_same:
                raise CannotJoinError("a value for all rows differs between microbatches")
        return first
    if len({(*t.shape[:axis], *t.shape[axis + 1 :]) for t in column}) > 1:
        raise CannotJoinError(f"tensors of shapes {[tuple(t.shape) for t in column]} are not rows of one")
    return torch.cat(list(column), axis)


def _is_alike(log: CallLog, other: CallLog) -> bool:
    """Whether layers were called alike, and returned the same structures."""
    own, others = (
        (one.results, one.captured, one.needed, one.keep, one.calls.keys(), one.embedded.keys()) for one in (log, other)
    )
    return own == others


def _joined_log(logs: Sequence[CallLog], axes: RowAxes) -> CallLog:
    embedded = {}
    for name, calls in logs[0].embedded.items():
        made = []
        for number, (call, axis) in enumerate(zip(calls, axes.embedded[name], strict=True)):
            shape = list(call.shape)
            if axis is not None:
                shape[axis] = sum(log.embedded[name][number].shape[axis] for log in logs)
            made.append(Embedded(call.key, torch.Size(shape), call.dtype))
        embedded[name] = made
    return dataclasses.replace(logs[0], embedded=embedded, is_of_others=True)
