"""List the leaves of inputs and labels, with the facts about each that are known before the batch size."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch

from yobx_flatten import find_unregistered
from yobx_flatten.recipe.aliases import PyTree

from ..device.block_masks import HeldMask, held
from ..errors import SplitError, UnregisteredObjectError
from .flat import FlatTree
from .packed import RoundPipePackedData, counted_rows, known_rows
from .spec import Rule, is_below, rule_for

# Leaves of these types hold nothing that torch would have to flatten; a batch mostly has no others.
_CLOSED = frozenset(
    {torch.Tensor, torch.nn.Parameter, int, float, complex, bool, str, bytes, type(None), RoundPipePackedData, HeldMask}
)

# Arguments of transformers whose axis 0 is not the batch, or not always: {number of axes: axis}. The positions of
# models with several kinds of tokens are (3, batch, length); `cache_position` counts along the length; `cu_seq_lens_*`
# say where texts begin that follow one another in a single row.
_KNOWN_ARGUMENTS: dict[str, dict[int, int]] = {
    "position_ids": {2: 0, 3: 1},
    "cache_position": {},
    "cu_seq_lens_q": {},
    "cu_seq_lens_k": {},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One leaf of the inputs or labels, with all that is known before the batch size is."""

    path: str  # key path
    value: Any  # the leaf
    rule: Rule | None  # rule of the user
    axis: int | None  # batch axis according to the user, the registration or the name of the argument
    is_known: bool  # whether one of these three gave an axis; `axis=None` then means "whole"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor; batch and heads of a mask; ``()`` for everything else."""
        return tuple(self.value.shape) if isinstance(self.value, torch.Tensor | HeldMask) else ()

    @property
    def stated(self) -> tuple[int, ...] | None:
        """The rows of each microbatch, where this is packed data that knows them."""
        return known_rows(self.value) if isinstance(self.value, RoundPipePackedData) else None

    @property
    def counted(self) -> tuple[int, ...] | None:
        """Count the rows of each microbatch of packed data from its tensors, along axis 0 or the axis of a rule."""
        if not isinstance(self.value, RoundPipePackedData) or self.stated is not None:
            return None
        # a rule that hands it on whole states nothing: entry by entry it goes in any case
        return counted_rows(self.value, 0 if self.rule is None or self.rule.dim is None else self.rule.dim)


def entries_of(tree: PyTree, name: str, rules: Mapping[str, Rule]) -> list[Entry]:
    """List the leaves of a tree, with facts about their axes."""
    return entries_of_flat(FlatTree.of(tree, name), rules)


def entries_of_flat(flat: FlatTree, rules: Mapping[str, Rule]) -> list[Entry]:
    """List the leaves of a flattened tree, with facts about their axes."""
    return [_entry(leaf.path, leaf.value, leaf.axes, rule_for(leaf.path, rules)) for leaf in flat.leaves]


def check_registered(flat: FlatTree, rules: Mapping[str, Rule]) -> None:
    """Check that every object that holds tensors is flattened, or that a rule passes it on whole."""
    if all(type(leaf.value) in _CLOSED for leaf in flat.leaves):
        return
    ours = [leaf.path for leaf in flat.leaves if isinstance(leaf.value, RoundPipePackedData | HeldMask)]
    allowed = [*ours, *(path for path, rule in rules.items() if rule.dim is None)]
    # what is inside of a leaf needs its own line only once the leaf is registered, and gets it then
    found = [
        str(one)
        for one in find_unregistered(held(flat.tree), name=flat.name)
        if one.inside is None and not any(is_below(one.path, path) for path in allowed)
    ]
    found += [
        f"{leaf.path} is a {type(leaf.value).__qualname__} that is not registered. Every microbatch would write into "
        "the same one. Register it first:\n"
        "    with register_flattening_functions(patch_transformers=True): ..."
        for leaf in flat.leaves
        if is_cache(leaf.value) and not any(text.startswith(f"{leaf.path} is ") for text in found)
    ]
    if found:
        raise UnregisteredObjectError("\n".join(found))


def _entry(path: str, value: Any, axes: dict[int, str] | None, rule: Rule | None) -> Entry:
    if isinstance(value, HeldMask):
        # one row of masks broadcasts over any batch, and does not have its size
        axis = _axis_of_mask(path, rule)
        return Entry(path, value, rule, axis if value.shape[0] > 1 else None, True)
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
        # one row of positions broadcasts over any batch, and does not have its size
        return Entry(path, value, None, None if axis is None or value.shape[axis] == 1 else axis, True)
    return Entry(path, value, None, None, value.dim() == 0)


def _axis_of_rule(path: str, value: torch.Tensor, rule: Rule) -> int | None:
    if rule.dim is None or value.dim() == 0:
        return None
    if not -value.dim() <= rule.dim < value.dim():
        raise SplitError(
            f"{path}: the rule is TensorChunkSpec({rule.dim}), but this tensor has shape {tuple(value.shape)}, with "
            f"axes {list(range(value.dim()))}."
        )
    return rule.dim % value.dim()


def _axis_of_mask(path: str, rule: Rule | None) -> int | None:
    if rule is not None and rule.dim not in (None, 0):
        raise SplitError(
            f"{path}: the rule is TensorChunkSpec({rule.dim}), but a BlockMask is split along its batch, axis 0, or "
            "passed whole to every microbatch."
        )
    return 0 if rule is None else rule.dim


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of transformers."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)
