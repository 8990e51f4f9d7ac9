"""Names of types in signatures, where the class is up to the user or to a library that is not required."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Kwargs", "PyTree", "TransformersModel"]

#: nested value: containers, and objects of registered classes, around tensors and other leaves
PyTree: TypeAlias = Any
#: keyword arguments of a forward
Kwargs: TypeAlias = dict[str, Any]
#: ``transformers.PreTrainedModel``, or PEFT's model around one; transformers counts as untyped
TransformersModel: TypeAlias = Any
