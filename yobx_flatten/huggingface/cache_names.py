"""Find the name of a model's KV cache in a signature or an output, in any version of transformers.

The KV cache is named ``cache`` since transformers 5.24; before, ``past_key_values``, or ``cache_params`` in Mamba.
"""

# forward(input_ids, cache)              argument_of(forward)      "cache"
# {"input_ids": ..., "cache": <Cache>}   name_in(values)           "cache"
# out.cache                              name_in(out)              "cache"
# past_key_values.0.key, present.0.key   CACHE and PRESENT: inputs and outputs of files, in every version

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ..errors.failures import result_or
from ..registry.recipe.aliases import ModelOutput, TransformersCache, TransformersModel

CACHE = "past_key_values"
"""Prefix of the names of an exported file's inputs that are cached keys and values."""

PRESENT = "present"
"""Prefix of the names of an exported file's cache outputs, which are the cache inputs of the next call."""

# Newest first. The first is a common word, so it counts only if the type or the value is a cache.
_USUAL = "cache"
_WORDS = (_USUAL, CACHE, "cache_params")

_TENSORS = re.compile(r"(?i)\b(?:tuple|list|sequence)\[.*Tensor")

_SIDES = ({"key", "value"}, {"decoder", "encoder"})


def is_cache(value: object) -> bool:
    """Return whether a value is a KV cache: an object of a cache class, or a list with a dict of tensors per layer.

    >>> is_cache([{"key": 1, "value": 2}]), is_cache([1, 2]), is_cache({"a": 1})
    (True, False, False)
    """
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(layer, Mapping) and set(layer) in _SIDES for layer in value)
    if value is None or isinstance(value, (torch.Tensor, torch.nn.Module, type)):
        return False
    # states of xLSTM count no tokens
    return callable(getattr(value, "get_seq_length", None)) or type(value).__name__.endswith("Cache")


def tokens_in(cache: TransformersCache) -> int | None:
    # caches without attention raise various errors
    return result_or(lambda: int(cache.get_seq_length()), lambda error: None)


def has_read(cache: TransformersCache) -> bool:
    # layers without attention have flags instead of a count
    flags = (getattr(layer, "has_previous_state", False) for layer in getattr(cache, "layers", None) or ())
    return bool(tokens_in(cache)) or any(
        flag is True or (isinstance(flag, Mapping) and True in flag.values()) for flag in flags
    )


def name_in(values: object) -> str | None:
    """Return the name of the KV cache among the arguments of a call or the outputs of a model, else ``None``.

    >>> name_in({"input_ids": 1, "cache_params": None}), name_in({"cache": {"a": 1}})
    ('cache_params', None)
    """
    # values: a mapping by name, or an output of a model; an entry that is `None` also counts
    if not isinstance(values, Mapping):
        return None
    # the keys only: an output of transformers 5.24 also has attributes with the older names
    names = set(values.keys())
    known = (word for word in _WORDS if word in names)
    return next((word for word in known if word != _USUAL or values[word] is None or is_cache(values[word])), None)


def cache_of(values: ModelOutput) -> TransformersCache:
    name = name_in(values)
    return None if name is None else values[name]


def forward_of(model: TransformersModel) -> Callable[..., Any]:
    """Return a model's ``forward``; for a PEFT model, which takes ``*args``, the ``forward`` of the wrapped model."""
    forward: Callable[..., Any] = model.forward
    base = getattr(model, "get_base_model", None)
    if argument_of(forward) is None and callable(base) and base() is not model:
        return forward_of(base())
    return forward


def argument_of(function: Callable[..., Any]) -> str | None:
    """Return the name of a function's parameter that takes the KV cache, such as ``past_key_values``.

    >>> def forward(input_ids, past_key_values=None): ...
    >>> argument_of(forward)
    'past_key_values'
    """
    # returns: the name of the parameter; `None` if no parameter has a known name or the type of a cache
    parameters = _parameters(function)
    if parameters is None:
        return None
    if _USUAL in parameters:
        annotation = parameters[_USUAL].annotation
        # thirty forwards of transformers 5.24 (RoBERTa's) still state the former types: tuples and lists of tensors
        if annotation is inspect.Parameter.empty or "Cache" in str(annotation) or _TENSORS.search(str(annotation)):
            return _USUAL
    for word in _WORDS[1:]:
        if word in parameters:
            return word
    # a name from a later version
    typed = [name for name, parameter in parameters.items() if "Cache" in str(parameter.annotation)]
    return typed[0] if len(typed) == 1 else None


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return None


def named_for(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the KV cache renamed to the parameter of ``function`` that takes it.

    >>> def forward(input_ids, cache: "Cache"): ...
    >>> named_for(forward, {"input_ids": 1, "past_key_values": None})
    {'input_ids': 1, 'cache': None}
    """
    return _renamed(kwargs, argument_of(function), _parameters(function) or ())


def named_as(names: Collection[str], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the KV cache renamed as in ``names``, such as ``cache`` to ``past_key_values``.

    >>> named_as(["input_ids", "past_key_values"], {"input_ids": 1, "cache": [{"key": 2, "value": 3}]})
    {'input_ids': 1, 'past_key_values': [{'key': 2, 'value': 3}]}
    """
    # names: the names of the model's arguments
    return _renamed(kwargs, next((word for word in _WORDS if word in names), None), names)


def _renamed(kwargs: Mapping[str, Any], wanted: str | None, known: Collection[str]) -> dict[str, Any]:
    given = name_in(kwargs)
    if given is None or wanted is None or given in known:
        return dict(kwargs)
    return {wanted if name == given else name: value for name, value in kwargs.items()}


@functools.cache
def installed_name() -> str:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    fields = {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}
    return next(word for word in _WORDS if word in fields)


def word_in_files(name: str, value: object, word: str = CACHE) -> str:
    """Return the name of a model's input or output in exported files; each KV cache gets the name ``word``.

    >>> word_in_files("cache_params", None), word_in_files("input_ids", 1)
    ('past_key_values', 'input_ids')
    """
    is_it = name in _WORDS and (name != _USUAL or is_cache(value))
    return word if is_it else name


def spellings_of(path: str) -> list[str]:
    """Return a KV cache tensor's path with each name that a KV cache can have; an empty list for other tensors.

    >>> spellings_of("cache_params.key_0"), spellings_of("input_ids")
    (['cache.key_0', 'past_key_values.key_0', 'cache_params.key_0'], [])
    """
    first, dot, rest = path.partition(".")
    return [word + dot + rest for word in _WORDS] if first in _WORDS and dot else []


def after_cache(name: str) -> str | None:
    """Return the part of an input's name after the KV cache's name; ``None`` if the input is not in a KV cache.

    >>> after_cache("past_key_values.0.key"), after_cache("cache_params.0.state"), after_cache("input_ids")
    ('.0.key', '.0.state', None)
    """
    word = next((word for word in _WORDS if word != _USUAL and name.startswith(f"{word}.")), None)
    return None if word is None else name.removeprefix(word)
