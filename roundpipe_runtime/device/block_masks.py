"""Block masks of flex attention: split along the batch, and flattened for copies to a device.

A ``BlockMask`` states which blocks count, row by row of the batch, and holds a function that states it for each place:
``mask_mod(b, h, q, kv)``. A part of it begins at a later row, so its function is asked for ``b`` rows later. Registered
with torch or not, a mask is one leaf here: its tensors alone can be split, the function would still count from row 0.

The idea is that of ``torch.distributed.pipelining``, whose microbatches get their masks in this way.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import PyTree


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeldMask:
    """Holds a mask so that it is not flattened."""

    mask: Any  # `BlockMask`

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch and heads; either is 1 where the mask is the same for all."""
        return tuple(self.mask.kv_num_blocks.shape[:-1])


def is_block_mask(value: Any) -> bool:
    """Report whether this is a ``BlockMask``; nothing is imported to find out."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def leaf_test() -> Callable[[Any], bool] | None:
    """Return the test for leaves that keeps torch from flattening masks, where their class is registered."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return is_block_mask if module is not None and module.BlockMask in pytree.SUPPORTED_NODES else None


def held(tree: PyTree) -> PyTree:
    """Return the tree with every mask in a :class:`HeldMask`; the tree itself where there is none."""
    if "torch.nn.attention.flex_attention" not in sys.modules:
        return tree
    leaves, spec = pytree.tree_flatten(tree, is_leaf=is_block_mask)
    if not any(map(is_block_mask, leaves)):
        return tree
    return pytree.tree_unflatten([HeldMask(leaf) if is_block_mask(leaf) else leaf for leaf in leaves], spec)


def cut_mask(mask: Any, start: int, stop: int) -> Any:
    """Return the mask of some rows of the batch."""
    # mask: a `BlockMask` with its own batch
    part = mask[start:stop]  # blocks only: torch leaves a function there that raises
    part.mask_mod = _later(mask.mask_mod, start)
    return part


def _later(mask_mod: Callable[..., torch.Tensor], start: int) -> Callable[..., torch.Tensor]:
    def of_part(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return mask_mod(b + start, h, q_idx, kv_idx)

    return of_part


# -- on the way to a device ------------------------------------------------------------------------------------------


def parts_of_mask(mask: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[Any]], Any]]:
    """Return the tensors of a mask, including those in the closure of its function, and the function that rebuilds it.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> def mask_mod_of(allowed):
    ...     return lambda b, h, q_idx, kv_idx: allowed[b] | (q_idx == kv_idx)
    >>> allowed = torch.tensor([True, False])
    >>> mask = create_block_mask(mask_mod_of(allowed), 2, None, 128, 128, device="cpu")
    >>> tensors, together = parts_of_mask(mask)
    >>> any(tensor is allowed for tensor in tensors), together(tensors).shape
    (True, (2, 1, 128, 128))
    """
    names = [name for name, value in vars(mask).items() if isinstance(value, torch.Tensor)]
    tensors = [getattr(mask, name) for name in names]
    inside: list[torch.Tensor] = []
    mask_mod = _opened(mask.mask_mod, inside)

    def together(moved: Sequence[Any]) -> Any:
        made = copy.copy(mask)
        for name, tensor in zip(names, moved, strict=False):
            setattr(made, name, tensor)
        made.mask_mod = mask_mod(moved[len(names) :])
        return made

    return [*tensors, *inside], together


def _opened(function: Any, tensors: list[torch.Tensor]) -> Callable[[Sequence[Any]], Any]:
    """Add the tensors that a function holds to the list; return what makes it again around others in their places."""
    if isinstance(function, functools.partial):
        held_by = (function.func, function.args, function.keywords)
    elif isinstance(function, types.FunctionType) and function.__closure__:
        try:
            held_by = tuple(cell.cell_contents for cell in function.__closure__)
        except ValueError:  # a variable that has no value yet
            return lambda moved: function
    else:
        return lambda moved: function
    before = len(tensors)
    leaves, spec = pytree.tree_flatten(held_by)
    makers = [_value(leaf, tensors) for leaf in leaves]
    if len(tensors) == before:
        return lambda moved: function

    def make(moved: Sequence[Any]) -> Any:
        values = pytree.tree_unflatten([maker(moved) for maker in makers], spec)
        if isinstance(function, functools.partial):
            return functools.partial(values[0], *values[1], **values[2])
        cells = tuple(types.CellType(value) for value in values)
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    return make


def _value(leaf: Any, tensors: list[torch.Tensor]) -> Callable[[Sequence[Any]], Any]:
    if isinstance(leaf, torch.Tensor):
        number = len(tensors)
        tensors.append(leaf)
        return lambda moved: moved[number]
    return _opened(leaf, tensors)
