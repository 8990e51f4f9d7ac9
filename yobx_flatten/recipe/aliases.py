"""Names of types in signatures, where the class is up to the user or to a library that is not required."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

__all__ = ["CacheLayer", "Kwargs", "Length", "PlainCache", "PyTree", "Size", "TransformersCache", "TransformersModel"]

#: nested value: containers, and objects of registered classes, around tensors and other leaves
PyTree: TypeAlias = Any
#: keyword arguments of a forward
Kwargs: TypeAlias = dict[str, Any]
#: ``transformers.PreTrainedModel``, or PEFT's model around one; transformers counts as untyped
TransformersModel: TypeAlias = Any
#: a cache without its class: for each layer its keys and values, ``{"key": ..., "value": ...}``
PlainCache: TypeAlias = list[dict[str, Any]]
#: ``transformers.cache_utils.Cache``, or a cache class of a model's own
TransformersCache: TypeAlias = Any
#: a layer of a cache: of ``transformers.cache_utils``, or a class of a model's own
CacheLayer: TypeAlias = Any
#: the size of an axis; in a trace a symbol, which torch's own types count as an int
Size: TypeAlias = int
#: a number of tokens; in a trace also a tensor without axes, which has no value yet
Length: TypeAlias = Size | torch.Tensor
