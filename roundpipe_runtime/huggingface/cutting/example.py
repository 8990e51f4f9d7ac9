"""A default example batch for a model: two rows of text, the first one padded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from yobx_flatten.recipe.aliases import Kwargs

from ..adapters import model_inside, text_config

_LENGTH = 12
_PADDING = 3
_LARGEST_TOKEN = 100  # larger ids are often placeholders of images


def example_inputs(model: nn.Module) -> Kwargs:
    """Return keyword arguments of a model's forward: tokens, and the mask and decoder tokens that it takes."""
    vocabulary = getattr(text_config(model), "vocab_size", None) or _LARGEST_TOKEN
    generator = torch.Generator().manual_seed(0)
    high = min(vocabulary, _LARGEST_TOKEN)
    tokens = torch.randint(min(5, high - 1), high, (2, _LENGTH), generator=generator)
    taken = inspect.signature(model_inside(model).forward).parameters
    name = next((name for name in ("input_ids", "inputs") if name in taken), "input_ids")
    made: dict[str, Any] = {name: tokens}
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if "attention_mask" in taken:
        made["attention_mask"] = torch.ones_like(tokens)
        made["attention_mask"][0, :_PADDING] = 0
        if device.type == "meta":  # models read the values of a mask of rows, but not of a mask of pairs of tokens
            made["attention_mask"] = torch.zeros(2, 1, _LENGTH, _LENGTH)
    if "decoder_input_ids" in taken:
        made["decoder_input_ids"] = tokens.flip(1)[:, : _LENGTH - 4]
    return {key: value.to(device) for key, value in made.items()}


def without_cache(model: nn.Module, kwargs: Kwargs) -> Kwargs:
    """Set ``use_cache=False`` for a model that takes it, unless it is given."""
    taken = inspect.signature(model_inside(model).forward).parameters
    knows = "use_cache" in taken or (
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        and (hasattr(getattr(model, "config", None), "use_cache") or hasattr(text_config(model), "use_cache"))
    )
    return {**kwargs, "use_cache": False} if knows and "use_cache" not in kwargs else dict(kwargs)


def plain_rows(kwargs: Kwargs) -> Kwargs:
    """Return keyword arguments in which mappings in lists are dictionaries: those of image processors are objects."""
    return {name: _plain(value) if type(value) is list else value for name, value in kwargs.items()}


def _plain(values: list[Any]) -> list[Any]:
    return [dict(value) if isinstance(value, Mapping) else value for value in values]
