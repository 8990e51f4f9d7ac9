"""Check the arguments of ``forward_backward`` before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ConfigError
from .flat import FlatTree
from .packed import RoundPipePackedData


def check_call(input_args: Any, input_kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check the arguments of ``forward_backward`` and return them as positional and keyword arguments of the model.

    >>> check_call([1, 2], None)
    ((1, 2), {})
    """
    # input_args: a tuple or list with one entry per argument
    if not isinstance(input_args, (tuple, list)) or isinstance(input_args, RoundPipePackedData):
        raise ConfigError(
            "input_args must be a tuple with the positional arguments of the model, found "
            f"{type(input_args).__qualname__}. A model of one argument:\n"
            "    forward_backward((x,), label=labels, loss_fn=loss_fn)"
        )
    if input_kwargs is not None and not isinstance(input_kwargs, Mapping):
        raise ConfigError(
            f"input_kwargs must be a mapping from names to arguments, found {type(input_kwargs).__qualname__}:\n"
            "    forward_backward(input_kwargs={'mask': mask}, label=labels, loss_fn=loss_fn)"
        )
    return tuple(input_args), dict(input_kwargs or {})


def check_loss_fn(loss_fn: Any) -> None:
    """Check that a loss function can be called."""
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn must be a function of the outputs and labels of a microbatch, found {loss_fn!r}. Where the "
            "outputs of the model are the loss, leave it out."
        )


def check_labels(label: FlatTree) -> None:
    """Check that no label requires a gradient: devices have copies, so no gradient reaches the labels."""
    for leaf in label.leaves:
        is_packed = isinstance(leaf.value, RoundPipePackedData)
        tensors = leaf.value if is_packed else [leaf.value]
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            line = "forward_backward(..., label=label.detach())"
            if is_packed:
                line = "with torch.no_grad(): label = teacher(x)"
            raise ConfigError(
                f"{leaf.path} requires a gradient, and labels get none. If none is wanted, as for the outputs of a "
                "teacher:\n"
                f"    {line}\n"
                "Otherwise pass it to the model as an argument, which gets one, and let the last layer return it."
            )
