"""Inputs and labels cut into microbatches, and outputs joined again, by the registrations of ``yobx_flatten``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch.utils._pytree as pytree

from .batch_axes import batch_axes, entries_of, refuse_unregistered
from .chunks import Replicate, Rules, TensorChunkSpec, read_rules, sizes
from .errors import SplitError
from .join import join
from .packed import RoundPipePackedData

__all__ = [
    "Microbatch",
    "Replicate",
    "RoundPipePackedData",
    "TensorChunkSpec",
    "infer_batch_size",
    "join",
    "sizes",
    "split",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Microbatch:
    """What one pass through the layers is called with.

    Attributes:
        index: its number, from 0.
        args: positional arguments.
        kwargs: keyword arguments.
        label: labels, for the loss.
        rows: how many rows of the batch it holds; ``None`` if that is not known, which happens only with a split
            function of the user whose parts have no clear batch axis.
    """

    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any
    rows: int | None


def infer_batch_size(*trees: Any) -> int | None:
    """Return how many rows nested inputs have; ``None`` if no tensor has a batch axis.

    Raises:
        SplitError: when several sizes could be it.

    >>> import torch
    >>> infer_batch_size({"x": torch.zeros(8, 3), "mask": torch.zeros(1, 3)}, torch.zeros(8))
    8
    """
    inputs = [entry for index, tree in enumerate(trees) for entry in entries_of(tree, f"trees[{index}]", {})]
    return batch_axes(inputs, [], {}).batch


def split(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    label: Any,
    num_microbatch: int,
    *,
    split_input: Any = None,
    split_label: Any = None,
) -> list[Microbatch]:
    """Cut arguments and labels into microbatches.

    Tensors with the batch axis are cut along it, with the sizes of ``torch.tensor_split``, as views. Everything else
    goes to every microbatch: tensors without axes, tensors of size 1 along axis 0, tensors without an axis of the
    batch's size, numbers, strings, ``None``.

    Args:
        args: positional arguments, nested at will.
        kwargs: keyword arguments, nested at will.
        label: labels, nested at will.
        num_microbatch: number of microbatches to make. There are fewer when there are fewer rows.
        split_input: ``None``; or ``(spec of args, spec of kwargs)``, each ``None`` or a tree of
            :class:`TensorChunkSpec` and :class:`Replicate`, where a mark stands for all that is below it; or a mapping
            from key paths to marks, labels included (``{"kwargs['mask']": Replicate, "label[1]": Replicate}``); or a
            function ``(args, kwargs, num_microbatch) -> (list of args, list of kwargs)``.
        split_label: ``None``, a tree of marks, or a function ``(label, num_microbatch) -> list of labels``.

    Returns:
        The microbatches, in the order of the rows.

    Raises:
        SplitError: when it is not clear what to cut, naming the key paths and the line to type.
        UnregisteredObjectError: when an object holds tensors but does not come apart.

    >>> import torch
    >>> parts = split((torch.arange(5), torch.zeros(1, 3)), {"scale": 2.0}, torch.arange(5), 2)
    >>> [(m.args[0].tolist(), m.args[1].shape[0], m.kwargs, m.label.tolist(), m.rows) for m in parts]
    [([0, 1, 2], 1, {'scale': 2.0}, [0, 1, 2], 3), ([3, 4], 1, {'scale': 2.0}, [3, 4], 2)]
    """
    kwargs = dict(kwargs)
    sizes(1, num_microbatch)  # refuses a wrong number
    rules = _input_rules(split_input) | ({} if _is_function(split_label) else read_rules(split_label, "label"))
    for tree, name in ((args, "args"), (kwargs, "kwargs"), (label, "label")):
        refuse_unregistered(tree, name, rules)
    if _is_function(split_input) or _is_function(split_label):
        return _split_by_functions(args, kwargs, label, num_microbatch, split_input, split_label, rules)
    inputs = [*entries_of(args, "args", rules), *entries_of(kwargs, "kwargs", rules)]
    labels = entries_of(label, "label", rules)
    decided = batch_axes(inputs, labels, rules)
    rows = _rows(inputs, decided.batch, num_microbatch)
    call = _cut((args, kwargs), decided.axes, rows)
    return [
        Microbatch(index, part[0], part[1], part_label, count if decided.batch is not None else 1)
        for index, (part, part_label, count) in enumerate(
            zip(call, _cut(label, decided.label_axes, rows), rows, strict=True)
        )
    ]


def _input_rules(split_input: Any) -> Rules:
    if split_input is None or _is_function(split_input):
        return {}
    if isinstance(split_input, Mapping):
        return read_rules(split_input, "")
    if isinstance(split_input, (tuple, list)) and len(split_input) == 2:
        return read_rules(split_input[0], "args") | read_rules(split_input[1], "kwargs")
    raise SplitError(
        f"split_input must be (spec of args, spec of kwargs), a mapping from key paths or a function, found "
        f"{split_input!r}. For one argument, cut along axis 0:\n"
        "    RoundPipeRunConfig(split_input=((TensorChunkSpec(0),), None))"
    )


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _rows(inputs: Sequence[Any], batch: int | None, num_microbatch: int) -> list[int]:
    """Rows of each microbatch: as an earlier pipeline cut them, else as even as possible."""
    packed = [entry for entry in inputs if isinstance(entry.value, RoundPipePackedData)]
    counts = {entry.path: len(entry.value) for entry in packed}
    if len(set(counts.values())) > 1:
        raise SplitError(f"These were cut into different numbers of microbatches: {counts}.")
    if not packed:
        return sizes(batch if batch is not None else 1, num_microbatch)
    rows = [entry.value.rows for entry in packed if None not in entry.value.rows]
    if any(other != rows[0] for other in rows):
        raise SplitError(f"{', '.join(counts)}: the rows of the microbatches differ, {rows}.")
    if rows:
        return list(rows[0])
    count = len(packed[0].value)
    made = sizes(batch if batch is not None else count, count)
    if len(made) != count:
        raise SplitError(f"{packed[0].path} has {count} microbatches, but there are only {batch} rows.")
    return made


def _cut(tree: Any, axes: Sequence[int | None], rows: Sequence[int]) -> list[Any]:
    """One tree per microbatch: leaves with an axis are cut along it, the others are the same objects in all trees."""
    values, spec = pytree.tree_flatten(tree)
    starts = [0, *itertools.accumulate(rows)]
    return [
        pytree.tree_unflatten([_part(v, a, i, starts) for v, a in zip(values, axes, strict=True)], spec)
        for i in range(len(rows))
    ]


def _part(value: Any, axis: int | None, index: int, starts: Sequence[int]) -> Any:
    if isinstance(value, RoundPipePackedData):
        return value[index]
    if axis is None or len(starts) == 2:
        return value
    return value.narrow(axis, starts[index], starts[index + 1] - starts[index])


# -- functions of the user -------------------------------------------------------------------------------------------


def _split_by_functions(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: Any,
    num_microbatch: int,
    split_input: Any,
    split_label: Any,
    rules: Rules,
) -> list[Microbatch]:
    """One side, or both, is cut by a function; the other side follows its sizes."""
    calls: list[tuple[Any, Any]] | None = None
    labels: list[Any] | None = None
    if _is_function(split_input):
        calls = _checked_calls(split_input(args, kwargs, num_microbatch))
    if _is_function(split_label):
        labels = _checked_labels(split_label(label, len(calls) if calls is not None else num_microbatch))
    cut_by_user: Sequence[Any] = calls if calls is not None else labels or []
    rows = [_rows_of_part(part) for part in cut_by_user]
    if calls is None:
        calls = _follow((args, kwargs), ("args", "kwargs"), rows, rules)
    if labels is None:
        labels = _follow((label,), ("label",), rows, rules, unwrap=True)
    if len(calls) != len(labels):
        raise SplitError(
            f"split_input made {len(calls)} microbatches and split_label {len(labels)}. Both must make the same number."
        )
    return [
        Microbatch(index, tuple(call[0]), dict(call[1]), one, count)
        for index, (call, one, count) in enumerate(zip(calls, labels, rows, strict=True))
    ]


def _follow(
    trees: tuple[Any, ...],
    names: tuple[str, ...],
    rows: Sequence[int | None],
    rules: Rules,
    *,
    unwrap: bool = False,
) -> list[Any]:
    """Cut one side into the sizes that the user's function gave the other."""
    entries = [entry for tree, name in zip(trees, names, strict=True) for entry in entries_of(tree, name, rules)]
    decided = batch_axes(entries, [], {path: rule for path, rule in rules.items() if path.startswith(names)})
    counted = [count for count in rows if count is not None]
    if decided.batch in (None, 1):
        counted = [1] * len(rows)
        decided = dataclasses.replace(decided, axes=[None] * len(entries))
    elif len(counted) != len(rows) or sum(counted) != decided.batch:
        raise SplitError(
            f"{', '.join(names)}: {decided.batch} rows are to follow the sizes {list(rows)} that the split function "
            "made of the other side. Give a function for both sides:\n"
            "    RoundPipeRunConfig(split_input=..., split_label=...)"
        )
    parts = _cut(trees, decided.axes, counted)
    return [part[0] for part in parts] if unwrap else parts


def _rows_of_part(part: Any) -> int | None:
    try:
        return infer_batch_size(part)
    except SplitError:
        return None


def _checked_calls(made: Any) -> list[tuple[Any, Any]]:
    if not (isinstance(made, tuple) and len(made) == 2 and len(made[0]) == len(made[1]) > 0):
        raise SplitError(
            "split_input: the function must return two lists of the same length, one of args and one of kwargs, found "
            f"{type(made).__qualname__}.\n"
            "    return [(x,) for x in chunks], [{} for x in chunks]"
        )
    return list(zip(*made, strict=True))


def _checked_labels(made: Any) -> list[Any]:
    if not isinstance(made, (list, tuple)) or not made:
        raise SplitError(
            f"split_label: the function must return a list with the labels of each microbatch, found {made!r}."
        )
    return list(made)
