"""Find the batch axis of each leaf and the batch size, from all inputs.

::

    input_ids    (8, 128)     8 rows: cut along axis 0
    labels       (8, 128)     8 rows: cut along axis 0
    mask         (1, 128)     size 1 broadcasts: whole
    weight       (3,)         no axis of 8: whole
    a cache      (8, 4, 9, 16) its registration states {0: "batch", 2: "length"}: cut along axis 0
    positions    (3, 8, 128)  8 stands elsewhere: an error, unless a rule states what to do
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from ..errors import SplitError
from .entries import Entry
from .packed import RoundPipePackedData
from .spec import Rules, format_value, is_below


@dataclasses.dataclass(frozen=True, slots=True)
class BatchAxes:
    """The batch size and the batch axis of each leaf."""

    batch: int | None  # batch size; `None` if no leaf has a batch axis
    axes: list[int | None]  # axis of each input leaf, `None` for leaves that go whole to every microbatch
    label_axes: list[int | None]  # axis of each leaf of the labels
    # whether leaves have different numbers of rows, and each is cut separately by its rule. `batch` is then that of the
    # labels, if they have one.
    apart: bool = False


def batch_axes(inputs: Sequence[Entry], labels: Sequence[Entry], rules: Rules) -> BatchAxes:
    """Decide how many rows the batch has, and which axis of each leaf is the batch axis."""
    _check_paths([*inputs, *labels], rules)
    if _are_apart([*inputs, *labels]):
        rows = set(_sizes(_cut_by_rule(labels)))
        return BatchAxes(
            rows.pop() if len(rows) == 1 else None,
            [_axis_apart(e) for e in inputs],
            [_axis_apart(e) for e in labels],
            apart=True,
        )
    batch = _batch_size(inputs, labels)
    return BatchAxes(batch, [_axis(e, batch) for e in inputs], [_axis(e, batch) for e in labels])


# -- how many rows ---------------------------------------------------------------------------------------------------


def _batch_size(inputs: Sequence[Entry], labels: Sequence[Entry]) -> int | None:
    entries = [*inputs, *labels]
    known = _sizes([e for e in entries if e.is_known and e.axis is not None])
    for entry in entries:
        if entry.stated is not None:
            known.setdefault(sum(entry.stated), []).append(entry.path)
    if len(known) > 1:
        known.pop(1, None)
    if len(known) > 1:
        raise _contradicting(known, entries)
    of_inputs = _sizes([e for e in inputs if not e.is_known])
    of_labels = _sizes([e for e in labels if not e.is_known])
    known = known or _counted(entries, {*of_inputs, *of_labels})
    if known:
        for entry in labels:
            if entry.counted:
                of_labels.setdefault(sum(entry.counted), []).append(entry.path)
        batch = next(iter(known))
        # labels none of which has the rows are more likely wrong than meant
        if batch > 1 and max(of_labels, default=1) > 1 and batch not in of_labels and not _has_axis(labels):
            raise _unlike(known, of_labels)
        return batch
    return _batch_size_by_axis_0(of_inputs, of_labels)


def _counted(entries: Sequence[Entry], others: set[int]) -> dict[int, list[str]]:
    """The rows of packed data that does not report them; of several sizes, the one that another leaf also has."""
    found: dict[int, list[str]] = {}
    for entry in entries:
        if entry.counted:
            found.setdefault(sum(entry.counted), []).append(entry.path)
    shared = {size: paths for size, paths in found.items() if size in others}
    if len(found) > 1 and len(shared) != 1:
        raise _ambiguous(found)
    return found if len(found) == 1 else shared


def _batch_size_by_axis_0(of_inputs: dict[int, list[str]], of_labels: dict[int, list[str]]) -> int | None:
    """The size that axis 0 has everywhere, or the one size that inputs and labels share."""
    both = {size: [*of_inputs.get(size, []), *of_labels.get(size, [])] for size in {**of_inputs, **of_labels}}
    candidates = {size: paths for size, paths in both.items() if size != 1}
    shared = [size for size in candidates if size in of_inputs and size in of_labels]
    if not both or len(shared) == 1:
        return shared[0] if shared else None
    # One row is one microbatch, in which nothing is cut: that is right even if it is more than one row after all.
    if not candidates or set(of_inputs) == {1} or (1 in of_inputs and 1 in of_labels and not shared):
        return 1
    if len(candidates) == 1:
        return next(iter(candidates))
    if len(of_inputs) == 1 and len(of_labels) == 1:
        raise _unlike(of_inputs, of_labels)
    raise _ambiguous(candidates)


def _has_axis(entries: Sequence[Entry]) -> bool:
    return any(entry.is_known and entry.axis is not None for entry in entries)


def _sizes(entries: Sequence[Entry]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for entry in entries:
        found.setdefault(entry.shape[entry.axis or 0], []).append(entry.path)
    return found


# -- a rule for each leaf ----------------------------------------------------------------------------------------------


def _are_apart(entries: Sequence[Entry]) -> bool:
    """Whether rules cut leaves of different numbers of rows, and there is no leaf without a rule to be guessed at."""
    has_rules = all(entry.rule is not None for entry in entries if _has_rows(entry))
    return has_rules and len({*_sizes(_cut_by_rule(entries))} - {1}) > 1


def _cut_by_rule(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.rule is not None and entry.axis is not None]


def _has_rows(entry: Entry) -> bool:
    return bool(entry.shape) or isinstance(entry.value, RoundPipePackedData)


def _axis_apart(entry: Entry) -> int | None:
    return entry.axis if entry.axis is not None and entry.shape[entry.axis] > 1 else None


# -- which axis ------------------------------------------------------------------------------------------------------


def _axis(entry: Entry, batch: int | None) -> int | None:
    shape = entry.shape
    if batch is None:
        return None
    if entry.is_known:
        if not shape and batch > 1:
            _check_not_array(entry, batch)
        # size 1 next to a larger batch broadcasts
        return entry.axis if entry.axis is not None and shape[entry.axis] == batch else None
    if shape[0] == batch:
        return 0
    if batch > 1 and shape[0] != 1 and batch in shape:
        axis = shape.index(batch)
        raise SplitError(
            f"{entry.path} has shape {shape}: the {batch} rows of the batch are not on axis 0, but axis {axis} has "
            "that size. Say whether it is cut there or goes whole to every microbatch, one of\n"
            f"    RoundPipeRunConfig(split_input={{{entry.path!r}: TensorChunkSpec({axis})}})\n"
            f"    RoundPipeRunConfig(split_input={{{entry.path!r}: Replicate}})"
        )
    return None


def _check_not_array(entry: Entry, batch: int) -> None:
    shape = getattr(entry.value, "shape", None)
    if isinstance(shape, tuple) and shape and shape[0] == batch and not isinstance(entry.value, torch.Tensor):
        if entry.rule is not None and entry.rule.dim is None:
            return
        raise SplitError(
            f"{entry.path} is a {type(entry.value).__module__}.{type(entry.value).__qualname__} with {batch} rows, but "
            "only tensors are cut. Pass a tensor:\n"
            "    torch.as_tensor(array)"
        )


def _check_paths(entries: Sequence[Entry], rules: Rules) -> None:
    for path, rule in rules.items():
        below = [entry for entry in entries if is_below(entry.path, path)]
        if not below:
            raise SplitError(
                f"split_input: {path!r} is not among the inputs. Their key paths are:\n"
                f"    {[entry.path for entry in entries]}"
            )
        if rule.reduce is not None:
            raise SplitError(
                f"{path}: found a rule that reduces, which is for outputs. An input takes one of\n"
                "    TensorChunkSpec(dim)\n"
                "    Replicate"
            )
        if rule.dim is not None and below[0].path == path and not _has_rows(below[0]):
            raise SplitError(
                f"{path}: the rule is TensorChunkSpec({rule.dim}), but there is no axis to cut in "
                f"{format_value(below[0].value)}."
            )


def _contradicting(found: dict[int, list[str]], entries: Sequence[Entry]) -> SplitError:
    without = [entry.path for entry in entries if _has_rows(entry) and entry.rule is None]
    return SplitError(
        f"These have a batch axis, but not the same number of rows: {_format_sizes(found)}. Cut or repeat them to "
        "the same number before the call; or, to cut each for itself, also give a rule to each of the others: "
        f"{', '.join(without)}."
    )


def _ambiguous(found: dict[int, list[str]]) -> SplitError:
    largest = max(found)
    other = next(paths[0] for size, paths in found.items() if size != largest)
    return SplitError(
        f"It is not clear how many rows the batch has: axis 0 has {_format_sizes(found)}. Say which of them go whole "
        "to every microbatch:\n"
        f"    RoundPipeRunConfig(split_input={{{other!r}: Replicate}})"
    )


def _unlike(of_inputs: dict[int, list[str]], of_labels: dict[int, list[str]]) -> SplitError:
    path = next(iter(of_labels.values()))[0]
    return SplitError(
        f"The labels have other rows than the inputs: axis 0 has {_format_sizes(of_inputs)}; "
        f"{_format_sizes(of_labels)}. Labels are cut along with the inputs, row by row: give them as many. If they go "
        "whole to every microbatch:\n"
        f"    RoundPipeRunConfig(split_input={{{path!r}: Replicate}})"
    )


def _format_sizes(found: dict[int, list[str]]) -> str:
    return "; ".join(f"{size} in {', '.join(found[size])}" for size in sorted(found))
