"""Find the model inside a PEFT wrapper, its text configuration, and arguments for its forward."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from yobx_flatten.registry.recipe.aliases import Kwargs


def is_adapted(model: nn.Module) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def model_inside(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's wrapper; a model without such a wrapper is returned unchanged."""
    if not is_adapted(model):
        return model
    find = getattr(model, "get_base_model", None)  # models with mixed adapters lack it
    inner: nn.Module = model.base_model.model if find is None else find()  # type: ignore[union-attr,assignment] # attributes of modules have no types
    return inner


def text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    find = getattr(config, "get_text_config", None)
    return config if find is None else find(decoder=True)


_LENGTH, _PADDING = 12, 3
_LARGEST_TOKEN = 100  # larger ids may be image tokens


def random_tokens(model: nn.Module, rows: int, length: int) -> torch.Tensor:
    """Return random token ids below 100; each call returns the same ids."""
    high = min(getattr(text_config(model), "vocab_size", None) or _LARGEST_TOKEN, _LARGEST_TOKEN)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(5, high - 1), high, (rows, length), generator=generator)


def example_inputs(model: nn.Module) -> Kwargs:
    tokens = random_tokens(model, 2, _LENGTH)
    taken = inspect.signature(model_inside(model).forward).parameters
    name = next((name for name in ("input_ids", "inputs") if name in taken), "input_ids")
    made: dict[str, Any] = {name: tokens}
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if "attention_mask" in taken:
        made["attention_mask"] = torch.ones_like(tokens)
        made["attention_mask"][0, :_PADDING] = 0
        if device.type == "meta":  # models read the values of a row mask, but not of a mask of token pairs
            made["attention_mask"] = torch.zeros(2, 1, _LENGTH, _LENGTH)
    if "decoder_input_ids" in taken:
        made["decoder_input_ids"] = tokens.flip(1)[:, : _LENGTH - 4]
    return {key: value.to(device) for key, value in made.items()}


def without_cache(model: nn.Module, kwargs: Kwargs) -> Kwargs:
    """Return keyword arguments with ``use_cache=False``, if the model accepts it and the caller did not set it."""
    taken = inspect.signature(model_inside(model).forward).parameters
    knows = "use_cache" in taken or (
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        and (hasattr(getattr(model, "config", None), "use_cache") or hasattr(text_config(model), "use_cache"))
    )
    return {**kwargs, "use_cache": False} if knows and "use_cache" not in kwargs else dict(kwargs)


def plain_rows(kwargs: Kwargs) -> Kwargs:
    """Convert mappings inside list arguments to dictionaries, because image processors return other mapping classes."""
    return {
        name: [dict(one) if isinstance(one, Mapping) else one for one in value] if type(value) is list else value
        for name, value in kwargs.items()
    }
