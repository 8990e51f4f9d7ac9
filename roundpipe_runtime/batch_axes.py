"""Along which axis each leaf is cut, and how many rows there are: worked out from all of the inputs together.

::

    input_ids    (8, 128)     8 rows: cut along axis 0
    labels       (8, 128)     8 rows: cut along axis 0
    mask         (1, 128)     size 1 broadcasts: whole
    weight       (3,)         no axis of 8: whole
    a cache      (8, 4, 9, 16) its registration says {0: "batch", 2: "length"}: cut along axis 0
    positions    (3, 8, 128)  8 stands elsewhere: an error, unless a rule says what to do
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from yobx_flatten import find_unregistered, leaves

from .chunks import Rule, Rules, is_below, rule_for
from .errors import SplitError, UnregisteredObjectError
from .packed import RoundPipePackedData

__all__ = ["BatchAxes", "Entry", "batch_axes", "entries_of", "refuse_unregistered"]

# Arguments of transformers whose axis 0 is not the batch, or not always: {number of axes: axis}. The positions of
# models with several kinds of tokens are (3, batch, length); `cache_position` counts along the length; `cu_seq_lens_*`
# say where texts begin that stand one behind the other in a single row.
_KNOWN_ARGUMENTS: dict[str, dict[int, int]] = {
    "position_ids": {2: 0, 3: 1},
    "cache_position": {},
    "cu_seq_lens_q": {},
    "cu_seq_lens_k": {},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One leaf of the inputs or labels, with all that is known before the batch size is.

    Attributes:
        path: the way to it.
        value: the leaf.
        rule: what the user said.
        axis: the batch axis as the user, the registration or the name of the argument have it.
        is_known: whether one of them said anything at all; ``axis=None`` means "whole" then.
    """

    path: str
    value: Any
    rule: Rule | None
    axis: int | None
    is_known: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor; ``()`` for all else."""
        return tuple(self.value.shape) if isinstance(self.value, torch.Tensor) else ()


@dataclasses.dataclass(frozen=True, slots=True)
class BatchAxes:
    """The decision: how many rows there are, and the axis of each leaf.

    Attributes:
        batch: number of rows; ``None`` if no leaf has a batch axis.
        axes: the axis of each input leaf, ``None`` for those that go whole to every microbatch.
        label_axes: the same for the labels.
    """

    batch: int | None
    axes: list[int | None]
    label_axes: list[int | None]


def entries_of(tree: Any, name: str, rules: Mapping[str, Rule]) -> list[Entry]:
    """List the leaves of a tree with what is known of their axes."""
    return [_entry(leaf.path, leaf.value, leaf.axes, rule_for(leaf.path, rules)) for leaf in leaves(tree, name=name)]


def batch_axes(inputs: Sequence[Entry], labels: Sequence[Entry], rules: Rules) -> BatchAxes:
    """Decide how many rows there are and which axis of each leaf they are.

    Args:
        inputs: leaves of arguments and keyword arguments.
        labels: leaves of the labels.
        rules: what the user said, to be checked against the leaves.

    Raises:
        SplitError: when several sizes could be the batch, when two leaves contradict each other, or when a leaf has the
            batch size on another axis than 0.
    """
    _refuse_unknown_paths([*inputs, *labels], rules)
    batch = _batch_size(inputs, labels)
    return BatchAxes(batch, [_axis(e, batch) for e in inputs], [_axis(e, batch) for e in labels])


def refuse_unregistered(tree: Any, name: str, rules: Mapping[str, Rule]) -> None:
    """Refuse objects that hold tensors but do not come apart, unless a rule hands them on whole.

    Raises:
        UnregisteredObjectError: with the line to type for each of them.
    """
    packed = [leaf.path for leaf in leaves(tree, name=name) if isinstance(leaf.value, RoundPipePackedData)]
    allowed = [*packed, *(path for path, rule in rules.items() if rule.dim is None)]
    # what is inside of a leaf needs a line of its own only once the leaf is registered, and is told then
    found = [
        str(one)
        for one in find_unregistered(tree, name=name)
        if one.inside is None and not any(is_below(one.path, path) for path in allowed)
    ]
    found += [
        f"{leaf.path} is a {type(leaf.value).__qualname__} that is not registered. Every microbatch would write into "
        "the same one. Register it first:\n"
        "    with register_flattening_functions(patch_transformers=True): ..."
        for leaf in leaves(tree, name=name)
        if _is_cache(leaf.value) and not any(text.startswith(f"{leaf.path} is ") for text in found)
    ]
    if found:
        raise UnregisteredObjectError("\n".join(found))


def _entry(path: str, value: Any, axes: dict[int, str] | None, rule: Rule | None) -> Entry:
    if not isinstance(value, torch.Tensor):
        return Entry(path, value, rule, None, True)
    if rule is not None:
        return Entry(path, value, rule, _axis_of_rule(path, value, rule), True)
    if axes is not None:
        # a tensor that stands for "nothing yet" may have fewer axes than it will have
        declared = [axis for axis, meaning in axes.items() if meaning == "batch" and axis < value.dim()]
        return Entry(path, value, None, declared[0] if declared else None, True)
    name = re.fullmatch(r"kwargs\['(\w+)'\]", path)
    if name is not None and name[1] in _KNOWN_ARGUMENTS:
        axis = _KNOWN_ARGUMENTS[name[1]].get(value.dim())
        # one row of positions broadcasts over any batch, and does not tell its size
        return Entry(path, value, None, None if axis is None or value.shape[axis] == 1 else axis, True)
    return Entry(path, value, None, None, value.dim() == 0)


def _axis_of_rule(path: str, value: torch.Tensor, rule: Rule) -> int | None:
    if rule.dim is None or value.dim() == 0:
        return None
    if not -value.dim() <= rule.dim < value.dim():
        raise SplitError(
            f"{path}: the rule says TensorChunkSpec({rule.dim}), but this tensor has shape {tuple(value.shape)}, with "
            f"axes {list(range(value.dim()))}."
        )
    return rule.dim % value.dim()


# -- how many rows ---------------------------------------------------------------------------------------------------


def _batch_size(inputs: Sequence[Entry], labels: Sequence[Entry]) -> int | None:
    known = _sizes([e for e in [*inputs, *labels] if e.is_known and e.axis is not None])
    packed = _sizes_of_packed(inputs)
    for size, paths in packed.items():
        known.setdefault(size, []).extend(paths)
    if len(known) > 1:
        known.pop(1, None)
    if len(known) > 1:
        raise SplitError(
            f"These have a batch axis, but not the same number of rows: {_spell(known)}. Cut or repeat them to the "
            "same number before the call."
        )
    of_inputs = _sizes([e for e in inputs if not e.is_known])
    of_labels = _sizes([e for e in labels if not e.is_known])
    if known:
        batch = next(iter(known))
        # labels none of which has the rows are more likely wrong than meant
        if batch > 1 and max(of_labels, default=1) > 1 and batch not in of_labels and not _has_axis(labels):
            raise _unlike(known, of_labels)
        return batch
    return _batch_size_by_axis_0(of_inputs, of_labels)


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
        if entry.shape:
            found.setdefault(entry.shape[entry.axis or 0], []).append(entry.path)
    return found


def _sizes_of_packed(entries: Sequence[Entry]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for entry in entries:
        rows = entry.value.rows if isinstance(entry.value, RoundPipePackedData) else ()
        counted = [count for count in rows if count is not None]
        if counted and len(counted) == len(rows):
            found.setdefault(sum(counted), []).append(entry.path)
    return found


# -- which axis ------------------------------------------------------------------------------------------------------


def _axis(entry: Entry, batch: int | None) -> int | None:
    shape = entry.shape
    if batch is None:
        return None
    if entry.is_known:
        if not shape and batch > 1:
            _refuse_array(entry, batch)
        # size 1 beside a larger batch broadcasts
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


def _refuse_array(entry: Entry, batch: int) -> None:
    shape = getattr(entry.value, "shape", None)
    if isinstance(shape, tuple) and shape and shape[0] == batch and not isinstance(entry.value, torch.Tensor):
        if entry.rule is not None and entry.rule.dim is None:
            return
        raise SplitError(
            f"{entry.path} is a {type(entry.value).__module__}.{type(entry.value).__qualname__} with {batch} rows, but "
            "only tensors are cut. Pass a tensor:\n"
            "    torch.as_tensor(array)"
        )


def _refuse_unknown_paths(entries: Sequence[Entry], rules: Rules) -> None:
    for path, rule in rules.items():
        below = [entry for entry in entries if is_below(entry.path, path)]
        if not below:
            raise SplitError(
                f"split_input: {path!r} is not among the inputs. Their key paths are:\n"
                f"    {[entry.path for entry in entries]}"
            )
        if rule.reduce is not None:
            raise SplitError(f"{path}: a reducer joins outputs. Inputs are cut or handed on whole.")
        if rule.dim is not None and below[0].path == path and not below[0].shape:
            raise SplitError(
                f"{path}: the rule says TensorChunkSpec({rule.dim}), but there is no axis to cut in {below[0].value!r}."
            )


def _ambiguous(found: dict[int, list[str]]) -> SplitError:
    largest = max(found)
    other = next(paths[0] for size, paths in found.items() if size != largest)
    return SplitError(
        f"It is not clear how many rows the batch has: axis 0 has {_spell(found)}. Say which of them go whole to every "
        "microbatch:\n"
        f"    RoundPipeRunConfig(split_input={{{other!r}: Replicate}})"
    )


def _unlike(of_inputs: dict[int, list[str]], of_labels: dict[int, list[str]]) -> SplitError:
    path = next(iter(of_labels.values()))[0]
    return SplitError(
        f"The labels have other rows than the inputs: axis 0 has {_spell(of_inputs)}; {_spell(of_labels)}. Labels are "
        "cut along with the inputs, row by row: give them as many. If they go whole to every microbatch:\n"
        f"    RoundPipeRunConfig(split_input={{{path!r}: Replicate}})"
    )


def _spell(found: dict[int, list[str]]) -> str:
    return "; ".join(f"{size} in {', '.join(found[size])}" for size in sorted(found))


def _is_cache(value: Any) -> bool:
    # an empty cache holds no tensor yet, but is filled by the forward
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)
