"""Aliases for types in signatures, where the class is the user's or of an optional library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

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
#: the static part of a flattened object: anything that compares, and that JSON or a cache key is made of
Static: TypeAlias = Any
#: what :func:`torch.export.export` takes as ``dynamic_shapes``, in the containers of the inputs
DynamicShapes: TypeAlias = Any
#: ``transformers.PretrainedConfig``, or the configuration of a model's own
TransformersConfig: TypeAlias = Any
#: ``transformers.utils.ModelOutput``: values by name, and as attributes
ModelOutput: TypeAlias = Any
#: a function that is called as its caller is
Call: TypeAlias = Callable[..., Any]
#: what :meth:`torch.Tensor.to` takes for a device
Device: TypeAlias = torch.device | str | int
#: a value of a graph that onnxscript builds, or a tensor where it computes at once: it counts as untyped
OnnxValue: TypeAlias = Any
