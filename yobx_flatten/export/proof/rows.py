"""Find out whether a model itself answers a row differently when another row of its batch is padded.

.. code-block:: text

    row 0   1 1 1 1      0 1 1 1      padded in the second call only
    row 1   1 1 1 1      1 1 1 1      the same in both: so must be what the model returns for it

A kernel of attention that gets no mask may attend in both directions, and in one with a mask: a file has one
way for all masks, and agrees with such a model at some of them only.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch

from ...core.compare import largest_difference
from ...errors.failures import result_or
from ...private_names.of_torch import pytree
from ...trees.naming import output_names
from .case import Case, clone
from .eager_runs import eager_steps


def dependence_on_padding(module: torch.nn.Module, case: Case, written: Collection[str], tolerance: float) -> str:
    """Return a sentence about a module whose rows depend on the padding of others; empty for any other."""
    # case: one that failed; two more calls of the module are made where it takes a mask
    whole, padded = _masked(module, case, padded=False), _masked(module, case, padded=True)
    if whole is None or padded is None:
        return ""
    cases = whole, padded
    # a mask of ones may be one that the module stops at
    found = result_or(lambda: [eager_steps(module, one, written)[0].outputs for one in cases], lambda error: None)
    if found is None:
        return ""
    rows = len(next(_masks(module, whole)))
    far = {
        name: largest_difference(one[1:], other[1:])
        for name, one, other in zip(output_names(found[0], ()), *map(pytree.tree_leaves, found), strict=True)
        if isinstance(one, torch.Tensor) and one.shape == other.shape and one.shape[:1] == (rows,)
    }
    name = max(far, key=far.__getitem__, default="")
    if not far or far[name] <= tolerance:
        return ""
    way = ""
    if callable(getattr(module, "set_attn_implementation", None)):
        way = ' Another kernel may not: model.set_attn_implementation("eager")'
    return (
        "The model itself answers differently when another row is padded: the answer to a row moves by "
        f"{far[name]:.1e} (output {name!r}), so that no file agrees with it at every mask.{way}"
    )


def _masked(module: torch.nn.Module, case: Case, *, padded: bool) -> Case | None:
    """A case in which nothing is padded, or the first row alone; ``None`` without a mask of several rows."""
    made = Case(case.name, *clone((case.args, dict(case.kwargs))))
    masks = list(_masks(module, made))
    for mask in masks:
        padding = (mask == 0)[int((mask == 0).sum(1).argmax())]
        mask.fill_(1)
        if padded:
            mask[0, padding if bool(padding.any()) else 0] = 0
    return made if masks else None


def _masks(module: torch.nn.Module, case: Case) -> Iterator[torch.Tensor]:
    """The masks of a call over its tokens, of two rows or more."""
    named: dict[str, Any] = {**inspect.signature(module.forward).bind_partial(*case.args).arguments, **case.kwargs}
    for name, value in named.items():
        if not isinstance(value, torch.Tensor) or value.ndim != 2 or len(value) < 2 or value.is_floating_point():
            continue
        if value.dtype == torch.bool or ("mask" in name and int(value.max()) == 1):
            yield value
