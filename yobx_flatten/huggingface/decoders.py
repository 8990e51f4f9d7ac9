"""Wrap decoders to take the inputs that generation tools pass, and find the text length at which rotary angles change.

A decoder is wrapped if its KV cache has only sliding layers, or only recurrent states. The number of tokens that the
cache has seen is the length of the attention mask minus the number of new tokens.
"""

# the model     input_ids, attention_mask, position_ids, DynamicCache: keys, values, how many tokens were seen
# this module   input_ids, attention_mask, position_ids, keys and values of each layer

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim

from ..registry.recipe.aliases import CacheLayer, DynamicShapes, PlainCache, TransformersCache, TransformersModel
from .builders import make_dynamic_cache
from .cache_names import CACHE, PRESENT, argument_of, cache_of, forward_of, installed_name, name_in
from .caches.layers import code_of

_FED = ("input_ids", "attention_mask", "position_ids")  # and the cache


def counts_by_itself(cache: TransformersCache) -> bool:
    """Return whether a cache is a ``DynamicCache`` of filled sliding layers only; then a leaf counts the tokens."""
    layers: Any = getattr(cache, "layers", None)
    return (
        type(cache).__name__ == "DynamicCache"
        and bool(layers)
        and all(code_of(layer).startswith("W") and isinstance(layer.keys, torch.Tensor) for layer in layers)
    )


def why_not_sliding(model: torch.nn.Module, kwargs: Mapping[str, Any], cache_is: str) -> str | None:
    fed, takes = (*_FED, cache_is), inspect.signature(model.forward).parameters
    lacking = [name if name in _FED else "cache" for name in fed if name not in takes]
    if lacking:
        return f"the model takes no {' and no '.join(lacking)}"
    others = [name for name, value in kwargs.items() if name not in fed and isinstance(value, torch.Tensor)]
    if others or not isinstance(kwargs.get("input_ids"), torch.Tensor):
        return f"the inputs contain {' and '.join(others)}" if others else "there are no input_ids"
    mask = kwargs.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        return "attention_mask has not the shape (batch, length)"
    return None


def with_returned(kwargs: Mapping[str, Any], present: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a copy of ``kwargs`` in which the KV cache has the tensors that a call returned (``present``)."""
    kept = [{**before, **layer} for before, layer in zip(kwargs["cache"], present, strict=True)]
    return {**kwargs, "cache": kept}


class Continued(torch.nn.Module):
    def next_inputs(self, kwargs: Mapping[str, Any], outputs: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
        """Make the inputs of the next call: as many random tokens as before, and the returned KV cache."""
        ids = kwargs["input_ids"]  # with three axes they are not changed: audio codes, each with its own vocabulary
        if ids.dim() == 2:
            drawn = torch.randint(
                0, outputs["logits"].shape[-1], ids.shape, generator=torch.Generator().manual_seed(seed)
            )
            ids = drawn.to(ids.device)
        return {**with_returned(kwargs, outputs[PRESENT]), "input_ids": ids}


class SlidingDecoder(Continued):
    """Wraps a decoder whose KV cache has only sliding layers, to remove the token counter from the inputs."""

    # kwargs: example keyword arguments of the model, which determine the classes and windows of the cache's layers.
    # Their values that are not tensors are passed to the model at each call.

    def __init__(self, model: TransformersModel, kwargs: Mapping[str, Any], cache_is: str) -> None:
        super().__init__()
        self.model, self.cache_is = model, cache_is
        layers = kwargs[cache_is].layers
        self.classes = [type(layer) for layer in layers]
        self.windows = [{"sliding_window": layer.sliding_window} for layer in layers]
        self.made = [name for name in _FED[1:] if not isinstance(kwargs.get(name), torch.Tensor)]
        fed = (*_FED, cache_is)
        self.constants = {name: value for name, value in kwargs.items() if name not in fed and value is not None}

    @property
    def kept(self) -> dict[str, int]:
        """The largest number of tokens in each cache input, by name: the size of the sliding window minus 1."""
        return {
            f"{CACHE}.{layer}.{leaf}": window["sliding_window"] - 1
            for layer, window in enumerate(self.windows)
            for leaf in ("key", "value")
        }

    def inputs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        # without a mask there is no padding; default positions continue from the number of tokens seen, as in the model
        ids, cache = kwargs["input_ids"], cache_of(kwargs)
        batch, new = ids.shape[:2]
        past = cache.layers[0].cumulative_length
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is None:
            mask = ids.new_ones(batch, past + new)
        if positions is None:
            positions = torch.arange(past, past + new, device=ids.device).expand(batch, new).contiguous()
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "cache": [pair_of(layer) for layer in cache.layers],
        }

    def shapes(self, given: DynamicShapes) -> DynamicShapes:
        if given is None:
            return None
        leaves = given[self.cache_is] or [None] * (2 * len(self.classes))
        return {
            "input_ids": given["input_ids"],
            **{name: {0: Dim.AUTO, 1: Dim.AUTO} if name in self.made else given[name] for name in _FED[1:]},
            "cache": [{"key": leaves[2 * layer], "value": leaves[2 * layer + 1]} for layer in range(len(self.classes))],
        }

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, cache: PlainCache
    ) -> dict[str, Any]:
        pairs = [(layer["key"], layer["value"]) for layer in cache]
        filled = make_dynamic_cache(pairs, self.classes, self.windows)
        for layer in filled.layers:
            layer.cumulative_length = attention_mask.shape[1] - input_ids.shape[1]
        fed = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        options = {self.cache_is: filled, "use_cache": True, "return_dict": True}
        found = self.model(**{**self.constants, **fed, **options})
        kept = [pair_of(layer) for layer in cache_of(found).layers]
        returned = name_in(found)
        others = {name: value for name, value in found.items() if name != returned and value is not None}
        return {**others, PRESENT: kept}

    def next_inputs(self, kwargs: Mapping[str, Any], outputs: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
        following, mask = super().next_inputs(kwargs, outputs, seed), kwargs["attention_mask"]
        ids = following["input_ids"]
        longer = torch.cat([mask, mask.new_ones(ids.shape[:2])], dim=1)
        return {**following, "attention_mask": longer, "position_ids": kwargs["position_ids"] + ids.shape[1]}


def pair_of(layer: CacheLayer) -> dict[str, torch.Tensor]:
    return {"key": layer.keys, "value": layer.values}


def has_states_alone(model: TransformersModel) -> bool:
    """Return whether the cache of a model contains only recurrent states, and no keys and values."""
    name = argument_of(forward_of(model))
    if name is None:
        return False
    annotation = inspect.signature(forward_of(model)).parameters[name].annotation
    classes = [cls for cls in (annotation, *typing.get_args(annotation)) if isinstance(cls, type)]
    # a model with its own cache class (xLSTM, and Mamba before transformers 5) has only states if it counts no tokens
    caches = [cls for cls in classes if cls.__name__.endswith("Cache")]
    if caches and not any(hasattr(cls, "get_seq_length") for cls in caches):
        return True
    from transformers.cache_utils import DynamicCache

    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return bool(layers) and all(hasattr(one, "recurrent_states") and not hasattr(one, "keys") for one in layers)


class StateDecoder(torch.nn.Module):
    """Wraps a recurrent model such as Mamba, so that its mask covers all tokens, not only the new tokens."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.cache_is = argument_of(model.forward) or CACHE

    @staticmethod
    def fits(model: torch.nn.Module) -> bool:
        from transformers.cache_utils import Cache

        takes = inspect.signature(model.forward).parameters
        # before 5.23 a call with a state ignores the mask
        masks = {"attention_mask", "logits_to_keep"} <= set(takes) and hasattr(Cache, "get_recurrent_state")
        return masks and has_states_alone(model)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.get_input_embeddings()  # type: ignore[no-any-return] # transformers counts as untyped

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: TransformersCache | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> dict[str, Any]:
        # Not mask[:, -new:]: a slice checks whether it begins at 0, which adds a guard to the program.
        new = input_ids.shape[1]
        last = torch.arange(new, device=input_ids.device) + (attention_mask.shape[1] - new)
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask.index_select(1, last),
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{self.cache_is: cache},
        )
        return {"logits": found.logits, "cache": cache_of(found)}


def switch_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens above which a model's rotary angles change; ``None`` if they never change.

    >>> switch_of({"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096})
    4096
    >>> switch_of({"rope_scaling": {"rope_type": "yarn"}, "original_max_position_embeddings": 4096}) is None
    True
    """
    ropes = [rope for name in ("rope_parameters", "rope_scaling") if isinstance(rope := config.get(name), Mapping)]
    # some models have several settings of rotary embeddings, for different layers
    ropes += [one for rope in ropes for one in rope.values() if isinstance(one, Mapping)]
    return min([length for rope in ropes if type(length := switch_of_kind(rope, config)) is int], default=None)


def switch_of_kind(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    kind, longest = rope.get("rope_type", rope.get("type")), config.get("max_position_embeddings")
    if kind in ("longrope", "su"):
        places = (rope, config)
        return next((found for place in places if (found := place.get("original_max_position_embeddings"))), longest)
    return longest if kind == "dynamic" else None


@torch.no_grad()
def rereads_at_switch(model: TransformersModel, switch: int) -> bool | None:
    """Return whether a model drops its cache and recomputes all tokens when the text exceeds ``switch`` tokens."""
    # Phi-3 does, since its keys were rotated with the short factors. The inputs that a model prepares for three calls
    # show this: the last call before the switch, the call that exceeds it, and the next call.
    try:
        read = [_reads(model, length) for length in (switch, switch + 1, switch + 2)]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # a model with its own loop
        return None
    return {"all": True, "the next": False}.get(read[1]) if read[0] == read[2] == "the next" else None


def _reads(model: TransformersModel, length: int) -> str:
    """Return which tokens ``generate`` passes: only the last (``"the next"``), ``"all"`` or ``"something else"``."""
    from transformers import GenerationMixin
    from transformers.cache_utils import DynamicCache

    cache, ids = DynamicCache(), torch.zeros(1, length, dtype=torch.int64)
    keys = torch.zeros(1, 1, length - 1, 1)  # of all tokens except the last
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
