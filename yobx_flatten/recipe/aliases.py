"""Type aliases for annotations that name user-defined classes or classes of optional libraries."""

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
#: a cache as plain data: the keys and values of each layer, ``{"key": ..., "value": ...}``
PlainCache: TypeAlias = list[dict[str, Any]]
#: ``transformers.cache_utils.Cache``, or a cache class that a model defines itself
TransformersCache: TypeAlias = Any
#: a layer of a cache: of ``transformers.cache_utils``, or a class that a model defines itself
CacheLayer: TypeAlias = Any
#: the size of an axis; a symbol during a trace, which torch annotates as an int
Size: TypeAlias = int
#: a number of tokens; during a trace also a 0-d tensor, which has no value yet
Length: TypeAlias = Size | torch.Tensor
#: the static part of a flattened object: any value that compares, and that can become JSON or a cache key
Static: TypeAlias = Any
#: the ``dynamic_shapes`` argument of :func:`torch.export.export`, in the containers of the inputs
DynamicShapes: TypeAlias = Any
#: ``transformers.PretrainedConfig``, or a configuration class that a model defines itself
TransformersConfig: TypeAlias = Any
#: ``transformers.utils.ModelOutput``: values by name, and as attributes
ModelOutput: TypeAlias = Any
#: a function with the same parameters as its caller
Call: TypeAlias = Callable[..., Any]
#: a device, as :meth:`torch.Tensor.to` accepts it
Device: TypeAlias = torch.device | str | int
#: a value of a graph that onnxscript builds, or a tensor in its eager mode; onnxscript has no types for mypy
OnnxValue: TypeAlias = Any
