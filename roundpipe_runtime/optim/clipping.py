"""Refuse torch's gradient clipping where copies hold the gradients: it would clip nothing and return 0."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from yobx_flatten.private_names.of_torch import clipping_functions

from ..errors import ConfigError

__all__ = ["HasMasters", "check_clipped", "watch_clipping"]


class HasMasters(Protocol):
    """What knows the copies of parameters in which an optimizer works."""

    def dtypes_of_masters(self) -> dict[int, torch.dtype]:
        """Return the dtype of the master weight of each parameter of the model that has one, by identity."""

    def has_master_gradients(self) -> bool:
        """Report whether a master weight has a gradient."""


_STORES: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_clipping(store: HasMasters) -> None:
    """Refuse, from now on, to clip gradients of parameters that are in the copies of this store."""
    _STORES.add(store)
    _install()


@functools.cache
def _install() -> None:
    """Check what torch's functions are given. Once per process, as torch has no hooks of its own for it."""
    for owner, name in clipping_functions():
        setattr(owner, name, _checked(getattr(owner, name)))


def _checked(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def checked(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check_clipped(given)
        return clip(given, *args, **kwargs)

    return checked


def check_clipped(parameters: Iterable[torch.Tensor]) -> None:
    """Check that the gradients of these parameters are where torch looks for them."""
    without = [one for one in parameters if isinstance(one, nn.Parameter) and one.grad is None]
    for store in list(_STORES) if without else ():
        dtypes = store.dtypes_of_masters()
        held = [parameter for parameter in without if id(parameter) in dtypes]
        if held and store.has_master_gradients():
            raise ConfigError(
                f"{len(held)} parameters of the model are to be clipped, whose gradients are in their copies of "
                f"{dtypes[id(held[0])]} (optim_dtype). Nothing would be clipped. Clip these:\n"
                "    torch.nn.utils.clip_grad_norm_(model.optim_parameters(), ...)"
            )
