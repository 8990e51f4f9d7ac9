"""Random numbers that are the same for rows in one piece and in parts, so that what is made of them can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["SteadyDraws"]

_DROPOUTS = (functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d,
             functional.dropout2d, functional.dropout3d)  # fmt: skip


class SteadyDraws(TorchFunctionMode):
    """Puts one number in place of all that are drawn, and leaves out dropout.

    Integers become those of the reversed range, as of a permutation, so that rows that are exchanged stay exchanged.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        before = torch.default_generator.get_state()
        found = func(*args, **kwargs)
        is_drawn = isinstance(kwargs.get("generator"), torch.Generator)
        if not isinstance(found, torch.Tensor) or (
            not is_drawn and torch.equal(before, torch.default_generator.get_state())
        ):
            return found
        with torch.no_grad():
            if found.is_floating_point():
                found.fill_(0.5)
            else:
                found.copy_(torch.arange(found.numel()).flip(0).reshape(found.shape) % 2**31)
        return found
