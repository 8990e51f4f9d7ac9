"""Make all tensors of the inputs contiguous, including those in cache layers."""

from __future__ import annotations

from typing import Any

import torch

from ..recipe.aliases import PyTree


def contiguous(value: PyTree) -> PyTree:
    """Return a tensor contiguous; what holds tensors gets such, in place.

    A slice (``ids[:, 5:]``, the keys of a layer past its window) has strides that other tensors do not have, and code
    that was compiled for one of the two reads the other one wrongly.
    """
    # value: a tensor, or lists, tuples, dicts and objects of transformers that hold some. What is held twice stays one
    # tensor.
    return _contiguous(value, {})


def _contiguous(value: PyTree, done: dict[int, tuple[Any, Any]]) -> PyTree:
    if id(value) not in done:
        done[id(value)] = value, value  # kept, so that its id is not used again; and an end, where it holds itself
        done[id(value)] = value, _whole(value, done)
    return done[id(value)][1]


def _whole(value: PyTree, done: dict[int, tuple[Any, Any]]) -> PyTree:
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    if type(value) is tuple:
        return tuple(_contiguous(item, done) for item in value)
    if isinstance(value, list):
        value[:] = [_contiguous(item, done) for item in value]
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            value[key] = _contiguous(item, done)
    elif type(value).__module__.startswith("transformers") and not isinstance(value, (torch.nn.Module, type)):
        held = getattr(value, "__dict__", {})
        held.update((name, _contiguous(item, done)) for name, item in list(held.items()))
    return value
