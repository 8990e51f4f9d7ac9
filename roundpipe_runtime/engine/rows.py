"""Prove that rows are independent where layers have them on another axis by their own word.

Recurrent layers and attention of torch have the sequence first unless ``batch_first=True``. A batch that is cut along
axis 0 would be cut along its sequence then, and every number would be another one. Whether it is cannot be seen in the
sizes; so some rows are computed at once and in two parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import pytree

from ..errors import SplitError

__all__ = ["check_rows", "evaluating", "sequence_first"]

_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
_USUAL = 1e-3


def sequence_first(layers: Sequence[nn.Module]) -> str | None:
    """Return the class of a module whose rows are on axis 1, ``None`` without any."""
    modules = (module for layer in layers for module in layer.modules())
    return next((type(module).__name__ for module in modules if getattr(module, "batch_first", None) is False), None)


@contextlib.contextmanager
def evaluating(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Switch off what draws, and what looks at the whole batch by design."""
    modes = {module: module.training for layer in layers for module in layer.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def check_rows(name: str, compute: Callable[[int], Any]) -> None:
    """Check that rows computed at once are those computed in two parts.

    Args:
        name: class of the module that has its rows on axis 1.
        compute: function that returns the joined outputs of some rows in this number of microbatches.

    Raises:
        SplitError: they are not.
    """
    whole, parts = pytree.tree_leaves(compute(1)), pytree.tree_leaves(compute(2))
    if len(whole) != len(parts) or not all(map(_is_close, whole, parts)):
        raise SplitError(
            f"The batch is cut along axis 0, and the layers mix what is on it: a {name} has batch_first=False, and "
            "outputs of one part are others than those of the same rows in two parts. Say where the rows are, or make "
            "the layers with batch_first=True:\n"
            '    RoundPipeRunConfig(split_input={"args[0]": TensorChunkSpec(1)}, merge_output=TensorChunkSpec(1))'
        )


def _is_close(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other)
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=_TOLERANCE.get(one.dtype, _USUAL) * scale, equal_nan=True)
