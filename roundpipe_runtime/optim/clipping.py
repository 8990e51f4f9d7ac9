"""Refuse to clip or step parameters whose gradients are on master weights: it would do nothing.

torch's clipping would return 0, and an optimizer made of ``model.parameters()`` would change no weight. Both are
checked where they are called, by any class.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from yobx_flatten.private_names.of_torch import clipping_functions

from ..errors import ConfigError


class HasMasters(Protocol):
    """An object that knows the master weights of parameters."""

    def dtypes_of_masters(self) -> dict[int, torch.dtype]:
        """Return the dtype of the master weight of each parameter of the model that has one, by identity."""

    def has_master_gradients(self) -> bool:
        """Report whether a master weight has a gradient."""

    def why_not_clipped(self, parameters: Sequence[torch.Tensor]) -> str | None:
        """Return why gradients of these parameters cannot be clipped; ``None`` if they can."""


_STORES: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_originals(store: HasMasters) -> None:
    """Refuse, from now on, to clip or to step parameters whose gradients are in the copies of this store."""
    _STORES.add(store)
    _install()


@functools.cache
def _install() -> None:
    """Check what torch's functions and optimizers are given, once per process."""
    for owner, name in clipping_functions():
        setattr(owner, name, _checked(getattr(owner, name)))
    register_optimizer_step_pre_hook(_check_stepped)


def _checked(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def checked(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check_clipped(given)
        return clip(given, *args, **kwargs)

    return checked


def check_clipped(parameters: Iterable[torch.Tensor]) -> None:
    """Check that the gradients of these parameters are where torch looks for them."""
    given = list(parameters)
    for store in list(_STORES):
        if reason := store.why_not_clipped(given):
            raise ConfigError(reason)
    without, dtype = _originals(given)
    if any(without):
        raise ConfigError(
            f"{sum(without)} of these parameters have their gradients in {dtype} master weights (optim_dtype), so "
            "nothing would be clipped. Clip the master weights:\n"
            "    torch.nn.utils.clip_grad_norm_(model.optim_parameters(), ...)"
        )


def _check_stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    without, dtype = _originals(parameter for group in optimizer.param_groups for parameter in group["params"])
    if without and all(without):  # after `synchronize`, parameters have gradients too
        kind = type(optimizer).__name__
        raise ConfigError(
            f"{kind} holds {len(without)} parameters of the model, but their gradients are in {dtype} master weights "
            "(optim_dtype), so it would change nothing. Make it from the master weights:\n"
            f"    optimizer = {kind}(model.optim_parameters(), ...)\nIn create_optimizer of a Trainer they are "
            "self.pipeline.optim_parameters()."
        )


def _originals(parameters: Iterable[torch.Tensor]) -> tuple[list[bool], torch.dtype | None]:
    """Whether these parameters have their gradients in copies, and the dtype of the copies."""
    given = [one for one in parameters if isinstance(one, nn.Parameter)]
    for store in list(_STORES) if any(one.grad is None for one in given) else ():
        dtypes = store.dtypes_of_masters()
        held = [parameter for parameter in given if id(parameter) in dtypes]
        if held and store.has_master_gradients():
            return [one.grad is None for one in held], dtypes[id(held[0])]
    return [], None
