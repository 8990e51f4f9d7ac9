"""Type aliases for annotations that name user-defined classes or classes of optional libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

PyTree: TypeAlias = Any  #: nested value: containers, and objects of registered classes, around tensors and other leaves
Kwargs: TypeAlias = dict[str, Any]  #: keyword arguments of a forward
#: ``transformers.PreTrainedModel``, or PEFT's model around one; transformers counts as untyped
TransformersModel: TypeAlias = Any
#: a cache as plain data: the keys and values of each layer, ``{"key": ..., "value": ...}``
PlainCache: TypeAlias = list[dict[str, Any]]
TransformersCache: TypeAlias = Any  #: ``transformers.cache_utils.Cache``, or a cache class that a model defines itself
CacheLayer: TypeAlias = Any  #: a layer of a cache: of ``transformers.cache_utils``, or a class that a model defines
Size: TypeAlias = int  #: the size of an axis; a symbol during a trace, which torch annotates as an int
Length: TypeAlias = Size | torch.Tensor  #: a number of tokens; in a trace also a 0-d tensor, which has no value yet
#: the static part of a flattened object: any value that compares, and that can become JSON or a cache key
Static: TypeAlias = Any
DynamicShapes: TypeAlias = Any  #: ``dynamic_shapes`` of :func:`torch.export.export`, in the containers of the inputs
TransformersConfig: TypeAlias = Any  #: ``transformers.PretrainedConfig``, or a class that a model defines itself
ModelOutput: TypeAlias = Any  #: ``transformers.utils.ModelOutput``: values by name, and as attributes
Call: TypeAlias = Callable[..., Any]  #: a function with the same parameters as its caller
Device: TypeAlias = torch.device | str | int  #: a device, as :meth:`torch.Tensor.to` accepts it
#: a value of a graph that onnxscript builds, or a tensor in its eager mode; onnxscript has no types for mypy
OnnxValue: TypeAlias = Any
