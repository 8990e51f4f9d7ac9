"""Trace models that call their layers in a loop, where only the last call writes the cache."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch

from ...recipe.aliases import TransformersCache
from .layers import last_places
from .replacement import Function, replacement


@replacement
def _past_of_the_window(original: Function) -> Function:
    # Upstream joins the past and the new keys, and cuts what is before the window from the front. Such a slice asks
    # whether there is anything to cut, and the answer is fixed in the program. There is nothing where a layer has
    # forgotten it already, as all but recording ones have; so the cut is made on the past alone, and only of those.
    def forward(
        again: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        self: Any,
        cache: TransformersCache | None = None,
        shared_kv_states: dict[int, tuple[torch.Tensor, ...]] | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared = shared_kv_states or {}
        past = shared.get(self.layer_idx)
        layer = None if cache is None else cache.layers[self.layer_idx]
        sliding: Any = sys.modules["transformers.cache_utils"].DynamicSlidingWindowLayer
        if past is None or self.sliding_window is None or not isinstance(layer, sliding):
            return again()
        if getattr(layer, "record_past", False):
            last = last_places(past[0], self.sliding_window - 1)
            past = tuple(states.index_select(2, last) for states in past)
        uncut = copy.copy(self)  # not the module itself, which other threads may call
        uncut.sliding_window = None
        return again(self=uncut, shared_kv_states={**shared, self.layer_idx: past})

    return forward


# models, class, method, version to trace
LOOPS = ((("dory",), "DoryAttention", "forward", _past_of_the_window),)
