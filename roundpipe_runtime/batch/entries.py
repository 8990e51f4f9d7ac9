"""Flatten the inputs and labels of a batch; find each tensor's batch axis and the row count of each microbatch."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from yobx_flatten import Leaf, find_unregistered, leaves
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.registry.recipe.aliases import PyTree

from ..device.transfer import HeldMask, held, is_block_mask, leaf_test
from ..errors import ConfigError, SplitError, UnregisteredObjectError
from .spec import RoundPipePackedData, Rule, is_below, rule_for

# Leaves of these types contain no further leaves. Most batches have only such leaves.
_CLOSED = frozenset(
    {torch.Tensor, torch.nn.Parameter, int, float, complex, bool, str, bytes, type(None), RoundPipePackedData, HeldMask}
)

# Batch axis of arguments of transformers, by the number of axes of the tensor. `position_ids` of models with several
# kinds of tokens are (3, batch, length). `cache_position` has the length, and `cu_seq_lens_*` have the offsets of texts
# in a single row, so none of these has a batch axis.
_NO_AXIS = ("cache_position", "cu_seq_lens_q", "cu_seq_lens_k")
_KNOWN_ARGUMENTS: dict[str, dict[int, int]] = {"position_ids": {2: 0, 3: 1}, **{key: {} for key in _NO_AXIS}}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    path: str
    value: Any
    rule: Rule | None
    axis: int | None  # batch axis from the user's rule, the registration or the name of the argument
    is_known: bool  # whether one of these three sources decided; the leaf is not split if `axis` is then `None`

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor, or ``(batch, heads)`` for a ``BlockMask``; ``()`` for all other values."""
        return tuple(self.value.shape) if isinstance(self.value, torch.Tensor | HeldMask) else ()

    @property
    def stated(self) -> tuple[int, ...] | None:
        """The number of rows of each microbatch that a ``RoundPipePackedData`` stores, or ``None``."""
        if not isinstance(self.value, RoundPipePackedData):
            return None
        rows = tuple(count for count in self.value.rows if count is not None)
        # rows are unknown if the caller has changed the length of the list
        return rows if len(rows) == len(self.value.rows) == len(self.value) else None

    @property
    def counted(self) -> tuple[int, ...] | None:
        """The number of rows of each microbatch, counted from the tensors of a ``RoundPipePackedData``, or ``None``."""
        if not isinstance(self.value, RoundPipePackedData) or self.stated is not None:
            return None
        # packed data is split by its entries, also with a rule that passes it whole
        axis = 0 if self.rule is None or self.rule.dim is None else self.rule.dim
        tensors = [one for one in self.value if isinstance(one, torch.Tensor) and -one.dim() <= axis < one.dim()]
        return tuple(tensor.shape[axis] for tensor in tensors) if len(tensors) == len(self.value) else None


def entries_of(trees: Mapping[str, PyTree], rules: Mapping[str, Rule]) -> list[Entry]:
    return [entry for name, tree in trees.items() for entry in entries_of_flat(FlatTree.of(tree, name), rules)]


def entries_of_flat(flat: FlatTree, rules: Mapping[str, Rule]) -> list[Entry]:
    return [_entry(leaf.path, leaf.value, leaf.axes, rule_for(leaf.path, rules)) for leaf in flat.leaves]


def check_registered(batch: FlatBatch, rules: Mapping[str, Rule]) -> None:
    """Raise an error if an object with tensors has a class that is not registered for flattening."""
    for flat in batch:
        if all(type(leaf.value) in _CLOSED for leaf in flat.leaves):
            continue
        ours = [leaf.path for leaf in flat.leaves if isinstance(leaf.value, RoundPipePackedData | HeldMask)]
        allowed = [*ours, *(path for path, rule in rules.items() if rule.dim is None)]  # rules pass them unsplit
        # objects inside an unregistered leaf are reported once the leaf is registered
        found = [
            str(one)
            for one in find_unregistered(held(flat.tree), name=flat.name)
            if one.inside is None and not any(is_below(one.path, path) for path in allowed)
        ]
        found += [
            f"{leaf.path} is a {type(leaf.value).__qualname__} that is not registered. Every microbatch would write "
            "into the same object. Register it first:\n"
            "    with register_flattening_functions(patch_transformers=True): ..."
            for leaf in flat.leaves
            if is_cache(leaf.value) and not any(text.startswith(f"{leaf.path} is ") for text in found)
        ]
        if found:
            raise UnregisteredObjectError("\n".join(found))
        for leaf in flat.leaves:
            if isinstance(leaf.value, Iterator) and not any(is_below(leaf.path, path) for path in allowed):
                raise SplitError(
                    f"{leaf.path} is a {type(leaf.value).__qualname__}, which can be read only once, but every "
                    "microbatch reads it. Pass a list:\n    list(iterator)"
                )


def _entry(path: str, value: Any, axes: dict[int, str] | None, rule: Rule | None) -> Entry:
    if isinstance(value, HeldMask):
        if rule is not None and rule.dim not in (None, 0):
            raise SplitError(
                f"{path}: the rule is TensorChunkSpec({rule.dim}), but a BlockMask is split along its batch, axis 0, "
                "or passed whole to every microbatch. Use one of these rules:\n    TensorChunkSpec(0)\n    Replicate"
            )
        axis = 0 if rule is None else rule.dim
        # a mask with a single row broadcasts over the batch
        return Entry(path, value, rule, axis if value.shape[0] > 1 else None, True)
    if not isinstance(value, torch.Tensor):
        return Entry(path, value, rule, None, True)
    if rule is not None:
        if rule.dim is None or value.dim() == 0:
            return Entry(path, value, rule, None, True)
        if not -value.dim() <= rule.dim < value.dim():
            raise SplitError(
                f"{path}: the rule is TensorChunkSpec({rule.dim}), but this tensor has shape {tuple(value.shape)}, "
                f"with axes {list(range(value.dim()))}."
            )
        return Entry(path, value, rule, rule.dim % value.dim(), True)
    if axes is not None:
        # an empty placeholder may have fewer axes than the registration declares
        declared = [axis for axis, meaning in axes.items() if meaning == "batch" and axis < value.dim()]
        return Entry(path, value, None, declared[0] if declared else None, True)
    name = re.fullmatch(r"kwargs\['(\w+)'\]", path)
    if name is not None and name[1] in _KNOWN_ARGUMENTS:
        axis = _KNOWN_ARGUMENTS[name[1]].get(value.dim())
        # positions with a single row broadcast over the batch
        return Entry(path, value, None, None if axis is None or value.shape[axis] == 1 else axis, True)
    return Entry(path, value, None, None, value.dim() == 0)


def is_cache(value: Any) -> bool:
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


# A batch is flattened once per call, for the checks, the search for the batch axis, and the split.
#
#     args, kwargs     args[0]['x']  args[0]['mask']  kwargs['scale']   and the structure of (args, kwargs)
#     label            label[0]  label[1]                               and the structure of the labels


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTree:
    """A nested value and the list of its pytree leaves."""

    name: str  # name of the value in key paths
    tree: Any
    leaves: list[Leaf]  # a `BlockMask` of flex attention is one leaf

    @classmethod
    def of(cls, tree: Any, name: str) -> FlatTree:
        found = leaves(_with_held_masks(tree), name=name)
        found = [leaf._replace(value=HeldMask(leaf.value)) if is_block_mask(leaf.value) else leaf for leaf in found]
        return cls(name, tree, found)


class FlatBatch(NamedTuple):
    args: FlatTree
    kwargs: FlatTree
    label: FlatTree

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], label: Any) -> FlatBatch:
        return cls(FlatTree.of(args, "args"), FlatTree.of(dict(kwargs), "kwargs"), FlatTree.of(label, "label"))

    def specs(self) -> tuple[pytree.TreeSpec, pytree.TreeSpec]:
        call = _with_held_masks((self.args.tree, self.kwargs.tree))
        return pytree.tree_structure(call), pytree.tree_structure(_with_held_masks(self.label.tree))


@dataclasses.dataclass(frozen=True, slots=True)
class FlatMicrobatch:
    inputs: list[Any]
    spec: pytree.TreeSpec  # structure of `(args, kwargs)`
    labels: list[Any]
    label_spec: pytree.TreeSpec
    rows: int | None  # number of rows, as in `Microbatch`


def _with_held_masks(tree: PyTree) -> PyTree:
    # a registered class would be flattened into tensors that cannot be split; `held` flattens the tree once more
    return tree if leaf_test() is None else held(tree)


def check_call(input_args: Any, input_kwargs: Any, loss_fn: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(input_args, (tuple, list)) or isinstance(input_args, RoundPipePackedData):
        raise ConfigError(
            "input_args must be a tuple with the positional arguments of the model, found "
            f"{type(input_args).__qualname__}. For one argument, write:\n"
            "    forward_backward((x,), label=labels, loss_fn=loss_fn)"
        )
    if input_kwargs is not None and not isinstance(input_kwargs, Mapping):
        raise ConfigError(
            f"input_kwargs must be a mapping from names to arguments, found {type(input_kwargs).__qualname__}:\n"
            "    forward_backward(input_kwargs={'mask': mask}, label=labels, loss_fn=loss_fn)"
        )
    args, kwargs = tuple(input_args), dict(input_kwargs or {})
    if not callable(loss_fn) or isinstance(loss_fn, type):
        way = f"{loss_fn.__name__}()" if isinstance(loss_fn, type) else "no loss_fn if the outputs are the loss"
        raise ConfigError(
            f"loss_fn must be a function of the outputs and labels of a microbatch, found {loss_fn!r}. Pass {way}."
        )
    return args, kwargs


def check_labels(label: FlatTree) -> None:
    for leaf in label.leaves:
        is_packed = isinstance(leaf.value, RoundPipePackedData)
        tensors = leaf.value if is_packed else [leaf.value]
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            detached = "forward_backward(..., label=label.detach())"
            line = "with torch.no_grad(): label = teacher(x)" if is_packed else detached
            raise ConfigError(
                f"{leaf.path} requires a gradient, but labels never get gradients. If no gradient is needed, as for a "
                f"teacher's outputs, write:\n    {line}\n"
                "Otherwise pass the tensor to the model as an argument, and let the last layer return it."
            )


Rows = tuple[int, ...]


# Rows of each microbatch:
#
#     packed by a pipeline       rows [3, 2, 2]        other leaves are split at the same rows
#     packed by hand             (2, 8), (1, 8)        rows 2 and 1, counted from the tensors
#     parts of a function        x: (1, 4), (2, 4)     rows 1 and 2
#                                table: (5, 6)         the same object in both parts, so it was not split


def check_packed_rows(entries: Sequence[Entry], rows: Sequence[int | None], whose: str) -> None:
    # rows: rows of each part that the split function returned
    for entry in entries:
        if not isinstance(entry.value, RoundPipePackedData):
            continue
        if len(entry.value) != len(rows):
            raise SplitError(
                f"{entry.path} has {len(entry.value)} microbatches, but {whose} made {len(rows)}. Make both equal."
            )
        own = entry.stated or entry.counted
        if own is None or None in rows or own == tuple(rows):
            continue
        if entry.stated is not None or sum(own) == sum(count or 0 for count in rows):
            raise SplitError(
                f"{entry.path} has microbatches of {list(own)} rows, but {whose} made microbatches of {list(rows)}. "
                "Inputs and labels must be split at the same rows."
            )


def rows_of_parts(
    parts: Sequence[Mapping[str, Any]], whole: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()
) -> list[int | None]:
    """Count the rows of each microbatch that a user's split function returned."""
    # Rows are counted along the batch axes of split tensors; a tensor that is the same object in all microbatches is
    # ignored. If tensors have different row counts, a tensor is used only if its row counts add up to its size before
    # the split. If the rows cannot be counted, the result is `None` for each microbatch.
    # parts: trees by name, one mapping per microbatch
    # others: parts of the labels, if a function split the labels and the inputs
    known, seen = _columns(parts)
    if not known and len(seen) > 1:
        before = {entry.path: entry.shape[entry.axis or 0] for entry in entries_of(whole, {}) if entry.shape}
        cut = [rows for rows, paths in seen.items() if any(before.get(path) == sum(rows) for path in paths)]
        seen = {rows: seen[rows] for rows in cut or seen}
    found = known or set(seen)
    if len(found) != 1 and others:
        known, seen = _columns(others)
        found = {rows for rows in known or set(seen) if not found or rows in found}
    return list(*found) if len(found) == 1 else [None] * len(parts)


def _columns(parts: Sequence[Mapping[str, Any]]) -> tuple[set[Rows], dict[Rows, list[str]]]:
    # returns: row counts of tensors with a known batch axis; for tensors without, key paths by the sizes of axis 0
    tables = [{entry.path: entry for entry in entries_of(part, {})} for part in parts]
    known: set[Rows] = set()
    seen: dict[Rows, list[str]] = {}
    for path in [path for path in tables[0] if all(path in table for table in tables)]:
        column = [table[path] for table in tables]
        first = column[0]
        if isinstance(first.value, RoundPipePackedData):
            if len(first.value) == len(parts) and first.stated is not None:
                known.add(first.stated)
            elif len(first.value) == len(parts) and first.counted is not None:
                seen.setdefault(first.counted, []).append(path)
        elif all(entry.shape and (entry.axis is not None or not entry.is_known) for entry in column):
            rows = tuple(entry.shape[entry.axis or 0] for entry in column)
            if len(parts) > 1 and all(entry.value is first.value for entry in column):
                continue
            if first.is_known:
                known.add(rows)
            else:
                seen.setdefault(rows, []).append(path)
    return known, seen
