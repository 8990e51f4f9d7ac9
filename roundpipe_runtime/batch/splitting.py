"""Split inputs and labels, which may be nested objects, into microbatches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from yobx_flatten.core.private_names.of_torch import pytree

from ..device.transfer import HeldMask, cut_mask, held, leaf_test
from ..errors import SplitError
from .entries import (
    Entry,
    FlatBatch,
    FlatMicrobatch,
    check_packed_rows,
    check_registered,
    entries_of,
    entries_of_flat,
    rows_of_parts,
)
from .spec import RoundPipePackedData, Rules, format_value, is_below, read_rules, sizes


@dataclasses.dataclass(frozen=True, slots=True)
class Microbatch:
    """Arguments and labels of one microbatch.

    Attributes:
        index: number of the microbatch, from 0.
        args: positional arguments.
        kwargs: keyword arguments.
        label: labels for the loss.
        rows: number of rows of the microbatch, or ``None`` if it is unknown. The number is unknown, for example, if a
            split function returned tensors without a clear batch axis.
    """

    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any
    rows: int | None


def infer_batch_size(*trees: Any) -> int | None:
    """Return the batch size of nested inputs; ``None`` if no tensor has a batch axis.

    Args:
        *trees: nested inputs and labels, all of the same batch.

    Raises:
        SplitError: several sizes could be the batch size.

    >>> import torch
    >>> infer_batch_size({"x": torch.zeros(8, 3), "mask": torch.zeros(1, 3)}, torch.zeros(8))
    8
    """
    inputs = entries_of({f"trees[{index}]": tree for index, tree in enumerate(trees)}, {})
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
    """Split arguments and labels into microbatches.

    Tensors are split along their batch axis into views, with the sizes of ``torch.tensor_split``. Numbers, strings,
    ``None``, tensors of size 1 along axis 0, and tensors that have no axis of the batch size are passed unsplit to
    every microbatch.

    Args:
        args: positional arguments, of any nesting.
        kwargs: keyword arguments, of any nesting.
        label: labels, of any nesting.
        num_microbatch: number of microbatches; a batch with fewer rows gets one microbatch per row.
        split_input: how to split the arguments. ``None`` splits them as described above. A function ``(args, kwargs,
            num_microbatch) -> (list of args, list of kwargs)`` returns the split arguments. Rules are passed as a pair
            of trees ``(rules of args, rules of kwargs)``, or as a mapping from key paths of arguments and labels, as in
            ``{"kwargs['mask']": Replicate}``. A rule is a :class:`TensorChunkSpec` or :class:`Replicate`. The rule of a
            container applies to all values in the container.
        split_label: ``None``, a tree of rules for labels, or a function ``(label, num_microbatch) -> list of labels``.

    Returns:
        The microbatches, in the order of the rows.

    Raises:
        SplitError: the axis to split cannot be determined; the message names the key paths and the argument to add.
        UnregisteredObjectError: an object contains tensors, but its class is not registered for flattening.

    >>> import torch
    >>> parts = split((torch.arange(5), torch.zeros(1, 3)), {"scale": 2.0}, torch.arange(5), 2)
    >>> [(m.args[0].tolist(), m.args[1].shape[0], m.kwargs, m.label.tolist(), m.rows) for m in parts]
    [([0, 1, 2], 1, {'scale': 2.0}, [0, 1, 2], 3), ([3, 4], 1, {'scale': 2.0}, [3, 4], 2)]
    """
    rules = _rules(num_microbatch, split_input, split_label)
    batch = FlatBatch.of(args, kwargs, label)
    check_registered(batch, rules)
    if _is_function(split_input) or _is_function(split_label):
        return _split_by_functions(batch, num_microbatch, split_input, split_label, rules)
    return [_unflattened(index, part) for index, part in enumerate(_split_leaves(batch, num_microbatch, rules))]


def split_flat(
    batch: FlatBatch, num_microbatch: int, *, split_input: Any = None, split_label: Any = None
) -> list[FlatMicrobatch]:
    rules = _rules(num_microbatch, split_input, split_label)
    check_registered(batch, rules)
    if _is_function(split_input) or _is_function(split_label):
        made = _split_by_functions(batch, num_microbatch, split_input, split_label, rules)
        return [_flattened(microbatch) for microbatch in made]
    parts = _split_leaves(batch, num_microbatch, rules)
    if any(isinstance(leaf.value, RoundPipePackedData) for flat in batch for leaf in flat.leaves):
        # an entry of packed data can be nested
        return [_flattened(_unflattened(index, part)) for index, part in enumerate(parts)]
    return parts


def _rules(num_microbatch: int, split_input: Any, split_label: Any) -> Rules:
    sizes(1, num_microbatch)  # raises an error for an invalid number
    rules: Rules = {}
    if split_input is None or _is_function(split_input):
        pass
    elif isinstance(split_input, Mapping):
        rules = read_rules(split_input, "")
    elif isinstance(split_input, (tuple, list)) and len(split_input) == 2:
        rules = read_rules(split_input[0], "args") | read_rules(split_input[1], "kwargs")
    else:
        raise SplitError(
            "split_input must be (rules of args, rules of kwargs), a mapping from key paths or a function, found "
            f"{format_value(split_input)}. For one argument, split along axis 0:\n"
            "    RoundPipeRunConfig(split_input=((TensorChunkSpec(0),), None))"
        )
    return rules if _is_function(split_label) else rules | read_rules(split_label, "label")


def _split_leaves(batch: FlatBatch, num_microbatch: int, rules: Rules) -> list[FlatMicrobatch]:
    inputs = [*entries_of_flat(batch.args, rules), *entries_of_flat(batch.kwargs, rules)]
    labels = entries_of_flat(batch.label, rules)
    packed = {e.path: len(e.value) for e in [*inputs, *labels] if isinstance(e.value, RoundPipePackedData)}
    if len(set(packed.values())) > 1:
        counted = ", ".join(f"{path} into {count}" for path, count in packed.items())
        raise SplitError(f"These arguments were split into different numbers of microbatches: {counted}.")
    decided = batch_axes(inputs, labels, rules)
    rows = _rows(inputs, labels, decided, num_microbatch)
    spec, label_spec = batch.specs()
    calls = _cut_leaves(inputs, decided.axes, rows)
    cut_labels = _cut_leaves(labels, decided.label_axes, rows)
    return [
        FlatMicrobatch(call, spec, label, label_spec, count)
        for call, label, count in zip(calls, cut_labels, rows, strict=True)
    ]


def _unflattened(index: int, part: FlatMicrobatch) -> Microbatch:
    args, kwargs = pytree.tree_unflatten(part.inputs, part.spec)
    return Microbatch(index, args, kwargs, pytree.tree_unflatten(part.labels, part.label_spec), part.rows)


def _flattened(microbatch: Microbatch) -> FlatMicrobatch:
    inputs, spec = pytree.tree_flatten((microbatch.args, microbatch.kwargs), is_leaf=leaf_test())
    labels, label_spec = pytree.tree_flatten(microbatch.label, is_leaf=leaf_test())
    return FlatMicrobatch(inputs, spec, labels, label_spec, microbatch.rows)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _rows(
    inputs: Sequence[Entry], labels: Sequence[Entry], decided: BatchAxes, num_microbatch: int
) -> list[int | None]:
    entries, batch, apart = [*inputs, *labels], decided.batch, decided.apart
    axes = zip(entries, [*decided.axes, *decided.label_axes], strict=True)
    cut = {entry.path: entry.shape[axis] for entry, axis in axes if axis is not None}
    packed = [entry for entry in entries if isinstance(entry.value, RoundPipePackedData)]
    if not packed:
        if apart and batch is None:
            return [None] * min(num_microbatch, *cut.values())
        return list(sizes(batch if batch is not None else 1, num_microbatch))
    paths, count = ", ".join(entry.path for entry in packed), len(packed[0].value)
    found = {entry.stated for entry in packed if entry.stated is not None}
    found |= {entry.counted for entry in packed if entry.counted and sum(entry.counted) == batch}
    rows: list[int | None]
    if len(found) == 1:
        rows = list(found.pop())
    elif found and not apart:
        several = [list(one) for one in sorted(found)]
        raise SplitError(f"{paths} have different numbers of rows per microbatch: {several}. Make all of them equal.")
    elif count == 1:
        rows = [batch]
    elif apart and batch is not None:
        rows = list(sizes(batch, count))
    elif apart or not cut:
        rows = [None] * count
    else:
        raise SplitError(
            f"{paths}: the number of rows in each of the {count} microbatches is unknown, but {', '.join(cut)} must be "
            "split at the same rows. Give the row counts with the data, or split by a function:\n"
            "    RoundPipePackedData(values, rows=[...])\n    RoundPipeRunConfig(split_input=...)"
        )
    for path, size in cut.items():
        if size < len(rows):
            raise SplitError(f"{path} has {size} rows, too few for the {len(rows)} microbatches of {paths}.")
    return rows


def _cut_leaves(entries: Sequence[Entry], axes: Sequence[int | None], rows: Sequence[int | None]) -> list[list[Any]]:
    columns = [_parts(entry.value, axis, rows) for entry, axis in zip(entries, axes, strict=True)]
    return [[column[index] for column in columns] for index in range(len(rows))]


def _parts(value: Any, axis: int | None, rows: Sequence[int | None]) -> Sequence[Any]:
    if isinstance(value, RoundPipePackedData):
        return value
    whole = value.mask if isinstance(value, HeldMask) else value
    if axis is None or len(rows) == 1:
        return [whole] * len(rows)
    size = value.shape[axis]
    counts = [count for count in rows if count is not None]
    if len(counts) != len(rows) or sum(counts) != size:
        counts = sizes(size, len(rows))  # a rule splits this leaf by its own size
    stops = list(itertools.accumulate(counts))
    if isinstance(value, HeldMask):
        return [cut_mask(whole, stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
    return [value.narrow(axis, stop - count, count) for stop, count in zip(stops, counts, strict=True)]


def _split_by_functions(
    batch: FlatBatch, num_microbatch: int, split_input: Any, split_label: Any, rules: Rules
) -> list[Microbatch]:
    calls: list[tuple[Any, Any]] | None = None
    labels: list[Any] | None = None
    args, kwargs, label = (flat.tree for flat in batch)
    given, given_label = {"args": args, "kwargs": kwargs}, {"label": label}
    # a rule that does not fit raises before a function of the user is called
    inputs = [entry.value for flat in (batch.args, batch.kwargs) for entry in entries_of_flat(flat, rules)]
    packed = [value for value in inputs if isinstance(value, RoundPipePackedData)]
    if _is_function(split_input):
        made = split_input(args, kwargs, num_microbatch)
        if not (isinstance(made, tuple) and len(made) == 2 and len(made[0]) == len(made[1]) > 0):
            raise SplitError(
                "split_input: the function must return two lists of the same length, one of args and one of kwargs, "
                f"found {type(made).__qualname__}.\n"
                "    return [(x,) for x in chunks], [{} for x in chunks]"
            )
        calls = list(zip(*made, strict=True))
    elif packed:
        num_microbatch = len(packed[0])
    if _is_function(split_label):
        made = split_label(label, num_microbatch if calls is None else len(calls))
        if not isinstance(made, (list, tuple)) or not made:
            raise SplitError(
                "split_label: the function must return a list with the labels of each microbatch, found "
                f"{format_value(made)}."
            )
        labels = list(made)
    if calls is not None and labels is not None and len(calls) != len(labels):
        raise SplitError(
            f"split_input made {len(calls)} microbatches, split_label made {len(labels)}. Both numbers must be equal."
        )
    named_calls = [{"args": call[0], "kwargs": call[1]} for call in calls or []]
    named_labels = [{"label": one} for one in labels or []]
    if calls is None:
        rows = rows_of_parts(named_labels, given_label)
        calls = _follow(given, rows, rules, "split_label")
    else:
        rows = rows_of_parts(named_calls, given, named_labels)
    if labels is None:
        labels = _follow(given_label, rows, rules, "split_input")
    parts = [
        _entry_by_entry((tuple(call[0]), dict(call[1]), one), index, len(rows))
        for index, (call, one) in enumerate(zip(calls, labels, strict=True))
    ]
    return [Microbatch(index, *part, count) for index, (part, count) in enumerate(zip(parts, rows, strict=True))]


def _follow(trees: Mapping[str, Any], rows: list[int | None], rules: Rules, whose: str) -> list[Any]:
    """Split labels at the same rows as the arguments, or arguments at the same rows as the labels."""
    entries = entries_of(trees, rules)
    stated = next((entry.stated for entry in entries if entry.stated is not None), None)
    if None in rows and stated is not None and len(stated) == len(rows):
        rows[:] = stated
    check_packed_rows(entries, rows, whose)
    decided = batch_axes(entries, [], {path: rule for path, rule in rules.items() if path.startswith(tuple(trees))})
    axes = decided.axes
    if decided.batch in (None, 1) and not decided.apart:
        axes = [None] * len(entries)
    elif not decided.apart and (None in rows or sum(count or 0 for count in rows) != decided.batch):
        raise SplitError(
            f"The {decided.batch} rows of {' and '.join(trees)} cannot be split like the microbatches that {whose} "
            f"returned, {'whose rows cannot be counted' if None in rows else f'which have {rows} rows'}. Pass split "
            "functions for both inputs and labels:\n    RoundPipeRunConfig(split_input=..., split_label=...)"
        )
    spec = pytree.tree_structure(held(tuple(trees.values())))
    parts = [pytree.tree_unflatten(leaves, spec) for leaves in _cut_leaves(entries, axes, rows)]
    return parts if len(trees) > 1 else [part[0] for part in parts]


def _entry_by_entry(
    part: tuple[tuple[Any, ...], dict[str, Any], Any], index: int, count: int
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Replace each ``RoundPipePackedData`` in arguments and labels by its entry for microbatch ``index``."""

    def entry(value: Any) -> Any:
        if not isinstance(value, RoundPipePackedData):
            return value
        if len(value) != count:
            raise SplitError(
                f"The split function made {count} microbatches, but a RoundPipePackedData has {len(value)} entries. "
                f"Make {len(value)} microbatches, or return RoundPipePackedData with {count} entries."
            )
        return value[index]

    if not any(isinstance(leaf, RoundPipePackedData) for leaf in pytree.tree_leaves(part)):
        return part  # the same objects that the function returned
    call: tuple[tuple[Any, ...], dict[str, Any], Any] = pytree.tree_map(entry, part)
    return call


@dataclasses.dataclass(frozen=True, slots=True)
class BatchAxes:
    batch: int | None  # batch size; `None` if no leaf has a batch axis
    axes: list[int | None]  # axis of each input leaf, `None` for leaves that every microbatch gets whole
    label_axes: list[int | None]  # axis of each leaf of the labels
    # whether leaves have different numbers of rows, and rules split each leaf separately. `batch` is then the number of
    # rows that all labels have; `None` if the labels differ.
    apart: bool = False


def batch_axes(inputs: Sequence[Entry], labels: Sequence[Entry], rules: Rules) -> BatchAxes:
    entries = [*inputs, *labels]
    for path, rule in rules.items():
        below = [entry for entry in entries if is_below(entry.path, path)]
        if not below:
            raise SplitError(
                f"split_input: {path!r} is not among the inputs. The key paths of inputs are:\n"
                f"    {[entry.path for entry in entries]}"
            )
        if rule.reduce is not None:
            raise SplitError(
                f"{path}: split_input has a rule that reduces outputs, but this is an input. Use one of these rules:\n"
                "    TensorChunkSpec(dim)\n"
                "    Replicate"
            )
        leaf = below[0]
        if rule.dim is not None and leaf.path == path and not _has_rows(leaf):
            raise SplitError(
                f"{path}: TensorChunkSpec({rule.dim}) cannot split {format_value(leaf.value)}. Pass it whole:\n"
                f"    RoundPipeRunConfig(split_input={{{path!r}: Replicate}})"
            )
    has_rules = all(entry.rule is not None for entry in entries if _has_rows(entry))
    cut, cut_labels = ([e for e in some if e.rule is not None and e.axis is not None] for some in (entries, labels))
    if has_rules and len({*_sizes(cut)} - {1}) > 1:  # each leaf is split by its own rule
        rows = set(_sizes(cut_labels))
        axes = [e.axis if e.axis is not None and e.shape[e.axis] > 1 else None for e in entries]
        batch = rows.pop() if len(rows) == 1 else None
        return BatchAxes(batch, axes[: len(inputs)], axes[len(inputs) :], apart=True)
    batch = _batch_size(inputs, labels)
    return BatchAxes(batch, [_axis(e, batch) for e in inputs], [_axis(e, batch) for e in labels])


def _batch_size(inputs: Sequence[Entry], labels: Sequence[Entry]) -> int | None:
    entries = [*inputs, *labels]
    known = _sizes([e for e in entries if e.is_known and e.axis is not None])
    for entry in entries:
        if entry.stated is not None:
            known.setdefault(sum(entry.stated), []).append(entry.path)
    if len(known) > 1:
        known.pop(1, None)
    if len(known) > 1:
        without = [entry.path for entry in entries if _has_rows(entry) and entry.rule is None]
        raise SplitError(
            f"Tensors with a batch axis have different numbers of rows: {_format_sizes(known)}. Slice or repeat these "
            "tensors to the same number of rows before the call. To split each tensor by its own number of rows, every "
            f"tensor needs a rule: in split_input or split_label, pass TensorChunkSpec(axis) for {', '.join(without)}."
        )
    of_inputs = _sizes([e for e in inputs if not e.is_known])
    of_labels = _sizes([e for e in labels if not e.is_known])
    known = known or _counted(entries, {*of_inputs, *of_labels})
    if known:
        for entry in labels:
            if entry.counted:
                of_labels.setdefault(sum(entry.counted), []).append(entry.path)
        batch = next(iter(known))
        has_axis = any(entry.is_known and entry.axis is not None for entry in labels)
        # labels with other numbers of rows are more likely a mistake than intended
        if batch > 1 and max(of_labels, default=1) > 1 and batch not in of_labels and not has_axis:
            raise _unlike(known, of_labels)
        return batch
    # the only size of axis 0 except 1, or the only size that inputs and labels share
    both = {size: [*of_inputs.get(size, []), *of_labels.get(size, [])] for size in {**of_inputs, **of_labels}}
    candidates = {size: paths for size, paths in both.items() if size != 1}
    shared = [size for size in candidates if size in of_inputs and size in of_labels]
    if not both or len(shared) == 1:
        return shared[0] if shared else None
    # One row is one microbatch, in which nothing is split. This is right also if the batch has more rows.
    if not candidates or set(of_inputs) == {1} or (1 in of_inputs and 1 in of_labels and not shared):
        return 1
    if len(candidates) == 1:
        return next(iter(candidates))
    raise _unlike(of_inputs, of_labels) if len(of_inputs) == len(of_labels) == 1 else _ambiguous(candidates)


def _counted(entries: Sequence[Entry], others: set[int]) -> dict[int, list[str]]:
    # returns: batch size of `RoundPipePackedData` inputs, with their key paths; of several sizes, the one in `others`
    found: dict[int, list[str]] = {}
    for entry in entries:
        if entry.counted:
            found.setdefault(sum(entry.counted), []).append(entry.path)
    shared = {size: paths for size, paths in found.items() if size in others}
    if len(found) > 1 and len(shared) != 1:
        raise _ambiguous(found)
    return found if len(found) == 1 else shared


def _sizes(entries: Sequence[Entry]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for entry in entries:
        found.setdefault(entry.shape[entry.axis or 0], []).append(entry.path)
    return found


def _has_rows(entry: Entry) -> bool:
    return bool(entry.shape) or isinstance(entry.value, RoundPipePackedData)


def _axis(entry: Entry, batch: int | None) -> int | None:
    shape = entry.shape
    if batch is None:
        return None
    if entry.is_known:
        of_array = getattr(entry.value, "shape", None) if not shape and batch > 1 else None
        is_array = isinstance(of_array, tuple) and of_array and of_array[0] == batch
        is_passed_whole = isinstance(entry.value, torch.Tensor) or (entry.rule is not None and entry.rule.dim is None)
        if is_array and not is_passed_whole:
            line = "torch.tensor(table.to_numpy())" if hasattr(entry.value, "to_numpy") else "torch.as_tensor(array)"
            raise SplitError(
                f"{entry.path} is a {type(entry.value).__module__}.{type(entry.value).__qualname__} with {batch} rows, "
                f"but only tensors are split. Pass a tensor:\n    {line}"
            )
        # size 1 broadcasts over a larger batch
        return entry.axis if entry.axis is not None and shape[entry.axis] == batch else None
    if shape[0] == batch:
        return 0
    if batch > 1 and shape[0] != 1 and batch in shape:
        axis = shape.index(batch)
        raise SplitError(
            f"{entry.path} has shape {shape}: the {batch} rows of the batch are not on axis 0, but axis {axis} has "
            f"that size. Split the tensor along axis {axis}, or pass it whole to every microbatch. Write one of:\n"
            f"    RoundPipeRunConfig(split_input={{{entry.path!r}: TensorChunkSpec({axis})}})\n"
            f"    RoundPipeRunConfig(split_input={{{entry.path!r}: Replicate}})"
        )
    return None


def _ambiguous(found: dict[int, list[str]]) -> SplitError:
    largest = max(found)
    other = next(paths[0] for size, paths in found.items() if size != largest)
    return SplitError(
        f"It is not clear how many rows the batch has. The sizes of axis 0: {_format_sizes(found)}. Name the tensors "
        "that every microbatch gets whole:\n"
        f"    RoundPipeRunConfig(split_input={{{other!r}: Replicate}})"
    )


def _unlike(of_inputs: dict[int, list[str]], of_labels: dict[int, list[str]]) -> SplitError:
    path = next(iter(of_labels.values()))[0]
    return SplitError(
        f"Labels and inputs have different numbers of rows: {_format_sizes(of_inputs)}; "
        f"{_format_sizes(of_labels)}. Labels are split with the inputs, row by row, so both need the same number of "
        f"rows. To pass labels whole to every microbatch:\n    RoundPipeRunConfig(split_input={{{path!r}: Replicate}})"
    )


def _format_sizes(found: dict[int, list[str]]) -> str:
    return "; ".join(f"{size} in {', '.join(found[size])}" for size in sorted(found))
