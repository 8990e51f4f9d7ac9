"""Take the last tokens out of a cache: cut them off, or go back to what it was before a call.

.. code-block:: text

    keys of every token       [ 0 1 2 3 4 5 ]  ──> [ 0 1 2 3 ]          a view, or nothing at all in bound memory
    a window, a state         [ 3 4 5 ]        ──> what was held before the call; its tokens are read again
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .onnx_buffers import BufferedCache
from .onnx_values import from_value
from .runner import Runner

__all__ = ["cache_tensors", "cropped", "held_before", "rewound"]


def cache_tensors(cache: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the leaves of a cache as tensors, by name of the input."""
    # cache: what a runner's `cache` or `step` returned
    return {name: value if isinstance(value, torch.Tensor) else from_value(value) for name, value in cache.items()}


def cropped(runner: Runner, cache: Mapping[str, Any], seen: int, kept: int) -> dict[str, Any] | None:
    """Return a cache without its last tokens; ``None`` where a leaf does not hold every token on its own."""
    # cache: the cache; it may not be used any more
    bound = cache.presents if isinstance(cache, BufferedCache) else {}
    others = {name: value for name, value in cache.items() if name not in bound and ".encoder." not in name}
    for name in others:
        shape = runner.ports[name].shape
        if name.rpartition(".")[2] not in ("key", "value") or len(shape) != 4 or shape[2] is not None:
            return None
    tensors = cache_tensors(others)
    if any(leaf.shape[2] != seen for leaf in tensors.values()):
        return None
    cut = runner.cache({name: leaf[:, :, :kept] for name, leaf in tensors.items()})
    if isinstance(cache, BufferedCache):  # what lies after the tokens of the mask is written again
        cache.update(cut)
        return cache
    return {**cache, **cut}


def held_before(cache: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be held of a cache during a call so that :func:`rewound` can go back to it."""
    bound = cache.presents if isinstance(cache, BufferedCache) else {}
    return {name: value for name, value in cache.items() if name not in bound}


def rewound(cache: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cache that was there before a call."""
    # cache: the cache after the call; it may not be used any more
    if not isinstance(cache, BufferedCache):
        return dict(held)
    cache.update({name: value for name, value in held.items() if name not in cache.presents})
    return cache
