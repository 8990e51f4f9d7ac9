"""Let layers parametrize their parameters in the forward, as PEFT does to add adapters to stacked experts.

For each call PEFT registers a parametrization of ``torch.nn.utils`` on a parameter, and removes it again. Two of
torch's habits are in the way of layers that run on copies, in several threads:

::

    register    the parameter is set to itself, which torch counts as a write       -> not set at all
    cached()    torch keeps what was computed, by module, for the whole process     -> forgotten at each call of a layer
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from yobx_flatten.private_names.of_torch import cached_parametrizations, setter_of_parametrizations
from yobx_flatten.registry.patches import AttributePatch


def _patch() -> AttributePatch | None:
    module, name = setter_of_parametrizations()
    original = getattr(module, name, None)
    if original is None:
        return None

    def set_other(dest: Any, src: Any) -> None:
        if dest is not src:
            original(dest, src)

    return AttributePatch(module, name, set_other)


_PATCH = _patch()


@contextlib.contextmanager
def setting_nothing_to_itself() -> Iterator[None]:
    """A block in which a parametrization that is registered writes no parameter that keeps its numbers."""
    if _PATCH is None:
        yield
        return
    _PATCH.acquire()
    try:
        yield
    finally:
        _PATCH.release()


def forget_parametrized(module: nn.Module) -> None:
    """Forget what torch has cached for a module and those in it: it was computed from other copies, in another graph.

    Threads share torch's cache, and its end: while one is in a block of ``cached()``, what others computed stays.
    """
    if cached := cached_parametrizations():
        own = set(map(id, module.modules()))
        for key in tuple(cached):
            if key[0] in own:
                cached.pop(key, None)
