"""Copy a cache, or remove its last tokens: cut them off, or restore the cache from before a call.

.. code-block:: text

    keys of every token       [ 0 1 2 3 4 5 ]  ──> [ 0 1 2 3 ]          a view, or no change in buffers
    a window, a state         [ 3 4 5 ]        ──> the leaf from before the call; its tokens are read again
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .in_place import InPlaceCache
from .onnx_runner import from_value
from .ports import Runner


def cache_tensors(cache: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the leaves of a runner's KV cache as tensors, by input name."""
    written = cache.tensors() if isinstance(cache, InPlaceCache) else {}
    values = {name: written.get(name, value) for name, value in cache.items()}
    return {name: value if isinstance(value, torch.Tensor) else from_value(value) for name, value in values.items()}


def copied(runner: Runner, cache: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a KV cache, which later calls do not change."""
    if not isinstance(cache, InPlaceCache):
        return dict(cache)
    return runner.cache({name: leaf.clone() for name, leaf in cache_tensors(cache).items()})


def cropped(runner: Runner, cache: Mapping[str, Any], seen: int, kept: int) -> dict[str, Any] | None:
    """Return a KV cache with its first ``kept`` tokens; ``None`` if a leaf, such as a state, cannot be cropped."""
    # cache: the caller may not use it afterwards
    returned = cache.others if isinstance(cache, InPlaceCache) else cache
    others = {name: value for name, value in returned.items() if ".encoder." not in name}
    for name in others:
        shape = runner.ports[name].shape
        if name.rpartition(".")[2] not in ("key", "value") or len(shape) != 4 or shape[2] is not None:
            return None
    tensors = cache_tensors(others)
    if any(leaf.shape[2] != seen for leaf in tensors.values()):
        return None
    cut = {name: leaf[:, :, :kept] for name, leaf in tensors.items()}
    if isinstance(cache, InPlaceCache):
        cache.crop(kept)
        cache.update(runner.cache(cut) if cut else {})
        return cache
    return {**cache, **runner.cache(cut)}


def held_before(cache: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cache leaves that the caller must keep during a call, so that :func:`rewound` can undo the call."""
    return cache.others if isinstance(cache, InPlaceCache) else dict(cache)


def rewound(cache: Mapping[str, Any], held: Mapping[str, Any], seen: int) -> dict[str, Any]:
    """Return the KV cache as it was before a call, with the leaves that :func:`held_before` returned."""
    # cache: the cache after the call, which the caller may not use afterwards
    # seen: the number of tokens before the call
    if not isinstance(cache, InPlaceCache):
        return dict(held)
    cache.crop(seen)
    cache.update(held)
    return cache
