"""Find the length from which a model's rotary embeddings use different frequencies."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..recipe.aliases import TransformersModel
from .cache_names import argument_of, installed_name


def switch_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens above which rotary angles change; ``None`` if the angles never change.

    >>> switch_of({"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096})
    4096
    >>> switch_of({"rope_scaling": {"rope_type": "yarn"}, "original_max_position_embeddings": 4096}) is None
    True
    """
    lengths = [length for rope in _kinds(config) if type(length := switch_of_kind(rope, config)) is int]
    return min(lengths, default=None)


def _kinds(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    # some models have several settings of rotary embeddings, for different layers
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name)
        if isinstance(found, Mapping):
            yield from (found, *(one for one in found.values() if isinstance(one, Mapping)))


def switch_of_kind(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Return the length above which rotary embeddings change their angles; ``None`` if there is no such length."""
    kind, longest = rope.get("rope_type", rope.get("type")), config.get("max_position_embeddings")
    if kind in ("longrope", "su"):
        places = (rope, config)
        return next((found for place in places if (found := place.get("original_max_position_embeddings"))), longest)
    return longest if kind == "dynamic" else None


@torch.no_grad()
def rereads_at_switch(model: TransformersModel, switch: int) -> bool | None:
    """Return whether a model drops its cache and recomputes all tokens when the text exceeds the switch.

    Phi-3 drops its cache, since its keys were rotated with the short factors. The inputs that the model prepares for
    three calls show this: the last call before the switch, the call that exceeds it, and the next call.
    """
    try:
        read = [_reads(model, length) for length in (switch, switch + 1, switch + 2)]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # a model with its own loop
        return None
    return True if read == _DROPPED else False if read == _KEPT else None


_KEPT = ["the next", "the next", "the next"]
_DROPPED = ["the next", "all", "the next"]


def _reads(model: TransformersModel, length: int) -> str:
    """Return which tokens a model reads in a call with one new token and a cache of all other tokens."""
    from transformers import GenerationMixin
    from transformers.cache_utils import DynamicCache

    cache, ids = DynamicCache(), torch.zeros(1, length, dtype=torch.int64)
    keys = torch.zeros(1, 1, length - 1, 1)
    cache.update(keys, keys, 0)
    # a model passes arguments that it does not use to the method of GenerationMixin
    loops: Any = (model.prepare_inputs_for_generation, GenerationMixin.prepare_inputs_for_generation)
    asked = {name for loop in loops for name in inspect.signature(loop).parameters}
    cache_is = argument_of(model.forward) or installed_name()
    given = {cache_is: cache, "attention_mask": torch.ones_like(ids)}
    by_version = {"next_sequence_length": 1, "cache_position": torch.tensor([length - 1])}
    given |= {name: value for name, value in by_version.items() if name in asked}
    found = model.prepare_inputs_for_generation(ids, **given, use_cache=True)
    count, goes_on = found["input_ids"].shape[1], found.get(cache_is) is cache
    return "the next" if count == 1 and goes_on else "all" if count == length and not goes_on else "something else"
