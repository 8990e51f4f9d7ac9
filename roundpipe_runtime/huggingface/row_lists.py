"""Split arguments that are lists with one entry per row, such as the labels of object detection.

::

    pixel_values   (4, 3, 64, 64)
    labels         [{"class_labels": (2,), "boxes": (2, 4)}, {(1,), (1, 4)}, ...]    4 entries: cut between rows
    mask_labels    [(2, 64, 64), (1, 64, 64), ...]                                   likewise
    features       [(4, 32), (4, 64)]                                                a list of batches, each cut itself
"""

from __future__ import annotations

import inspect
import itertools
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.errors.failures import result_or
from yobx_flatten.recipe.aliases import Kwargs

from ..batch.spec import sizes
from ..batch.splitting import infer_batch_size, split
from ..errors import SplitError
from ..pipeline.live import with_own_forwards
from .adapters import model_inside
from .cutting.check import evaluating

SplitFunction = Callable[[Any, Kwargs, int], tuple[list[Any], list[Any]]]


def split_lists(
    model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs, inner: SplitFunction | None
) -> SplitFunction | None:
    """Return a split function for a call with lists of rows."""
    # inner: split function for the other arguments; `None` cuts them along the batch
    lists = {name: value for name, value in kwargs.items() if _may_have_rows(value)}
    if not lists:
        return inner
    others = {name: value for name, value in kwargs.items() if name not in lists}
    try:
        rows = infer_batch_size(args, others)
    except SplitError:  # the split states why
        rows = None
    names = {name for name, value in lists.items() if len(value) == rows and _has_rows(model, name, value)}
    if rows is None or not names:
        return inner

    def split_input(given_args: Any, given: Kwargs, num_microbatch: int) -> tuple[list[Any], list[Any]]:
        rest = {name: value for name, value in given.items() if name not in names}
        if inner is None:
            parts = [(part.args, part.kwargs) for part in split(given_args, rest, None, num_microbatch)]
        else:
            parts = list(zip(*inner(given_args, rest, num_microbatch), strict=True))
        stops = list(itertools.accumulate(sizes(rows, num_microbatch)))
        made = [dict(part) for _, part in parts]
        for part, start, stop in zip(made, [0, *stops], stops, strict=False):
            part |= {name: given[name][start:stop] for name in names}
        return [part for part, _ in parts], made

    split_input.is_of_batch = True  # type: ignore[attr-defined] # an attribute of a function
    return split_input


def _may_have_rows(value: Any) -> bool:
    """Whether a value is a list of dictionaries or of tensors."""
    kinds = (Mapping, torch.Tensor)
    return type(value) is list and bool(value) and any(all(isinstance(v, k) for v in value) for k in kinds)


def _has_rows(model: nn.Module, name: str, values: Sequence[Any]) -> bool:
    """Whether the entries of a list with as many entries as the batch has rows are its rows.

    They are, unless each of them may be a batch itself: then the model has to state that it takes a list of labels.
    """
    held = itertools.chain(*(value.values() if isinstance(value, Mapping) else [value] for value in values))
    tensors = [value for value in held if isinstance(value, torch.Tensor)]
    if any(t.dim() == 0 or t.shape[0] != len(values) for t in tensors):
        return True
    if "label" not in name:
        return False
    if _takes_list(model, name):
        return True
    raise SplitError(
        f"kwargs[{name!r}] is a list of {len(values)} entries, each with {len(values)} rows, and the batch has as "
        "many. It is not clear whether entry i belongs to row i of the batch, or row i of every entry does. Split it "
        "with a function:\n"
        "    RoundPipeRunConfig(split_input=lambda args, kwargs, count: (args_of_parts, kwargs_of_parts))"
    )


def _takes_list(model: nn.Module, name: str) -> bool:
    """Whether the signature of the model's forward states that an argument is a list."""
    forward = type(model_inside(model)).forward
    found = inspect.signature(forward).parameters.get(name)
    try:
        stated = typing.get_type_hints(forward).get(name) if found is not None else None
    except (NameError, TypeError):  # of names that are imported for type checkers only
        stated = None
    return any(typing.get_origin(kind) is list for kind in (stated, *typing.get_args(stated)))


# Packed rows: several texts in one row, whose positions begin again. Some models let a text see the one before it.


# What a text may differ by next to another one, relative to its numbers.
_ROUNDING, _ROUNDING_16 = 1e-4, 2e-2


def is_packed(kwargs: Mapping[str, Any]) -> bool:
    """Report whether positions of a call begin again within a row, which is not masked as padding is.

    >>> is_packed({"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}), is_packed({"position_ids": torch.arange(5)[None]})
    (True, False)
    """
    positions = kwargs.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.dim() < 2 or positions.shape[-1] < 3:
        return False
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and not bool(mask.all()):
        return False
    begins = (positions[..., 1:-1] == 0) & (positions[..., :-2] != 0) & (positions[..., 2:] == 1)
    return bool(begins.any())


def keeps_texts_apart(model: nn.Module) -> bool | None:
    """Return whether a text gives the same results alone and packed after another text in one row.

    It is called with both, on the host. Models with recurrent states carry them on, whatever the positions are.
    ``None`` if the model does not run on tokens alone.
    """
    one, other = torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[8, 9, 3, 5]])
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]

    def is_apart() -> bool:
        try:
            alone = model(input_ids=other, position_ids=positions[:, 5:])[0]
            packed = model(input_ids=torch.cat([one, other], 1), position_ids=positions, use_cache=False)[0][:, 5:]
        except TypeError:  # it takes no positions, without which nothing states where a text begins
            return False
        rounding = _ROUNDING_16 if alone.dtype.itemsize < 4 else _ROUNDING
        return bool((alone - packed).float().norm() <= rounding * alone.float().norm())

    with with_own_forwards(model), evaluating(model), torch.no_grad():
        return result_or(is_apart, lambda error: None)  # a model raises what it likes for what it does not take
