"""Draw the same random numbers for rows in one piece and in parts, so that results can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_DROPOUTS = (functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d,
             functional.dropout2d, functional.dropout3d)  # fmt: skip

# Functions with a dropout within, and the place of its probability among their arguments.
_PLACES = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}


class NoDropout(TorchFunctionMode):
    """Leaves out dropout, which would differ between all rows and parts of them."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:  # called anyway, as what stands instead of a tensor waits for the first operation
            return func(args[0] if args else kwargs["input"], 0.0, training=False)
        place = _PLACES.get(func)
        if place is not None and len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return self.call(func, args, kwargs)

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function other than a dropout."""
        return func(*args, **kwargs)


class _HasState(Protocol):
    """A generator, such as that of an accelerator."""

    def get_state(self) -> torch.Tensor:
        """Return the state."""


class SteadyDraws(NoDropout):
    """Replaces all random numbers by one constant, and leaves out dropout.

    Integers become those of the reversed range, as of a permutation, so that rows that are exchanged stay exchanged.
    """

    # generator: generator of the device on which is computed. Default: there is only that of the host.

    def __init__(self, generator: _HasState | None = None) -> None:
        super().__init__()
        self._generators = [torch.default_generator, *([] if generator is None else [generator])]

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function, and replace its random numbers by constants."""
        if torch.compiler.is_dynamo_compiling():  # flex attention compiles itself, and states cannot be read in a trace
            return func(*args, **kwargs)
        before = [one.get_state() for one in self._generators]
        found = func(*args, **kwargs)
        is_drawn = isinstance(kwargs.get("generator"), torch.Generator) or not all(
            torch.equal(one, own.get_state()) for one, own in zip(before, self._generators, strict=True)
        )
        if is_drawn and isinstance(found, torch.Tensor):
            with torch.no_grad():
                if found.is_floating_point():
                    found.fill_(0.5)
                else:
                    found.copy_(torch.arange(found.numel()).flip(0).reshape(found.shape) % 2**31)
        return found
