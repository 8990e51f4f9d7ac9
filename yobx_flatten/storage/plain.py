"""Check whether a tensor has plain data in one piece of memory, and choose what to store if not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runners.elements import ELEMENTS


class Obstacle(NamedTuple):
    """Why a tensor is not stored as it is."""

    what: str  # what it is, and why that is not stored, in words
    line: str  # what to store instead


def obstacle_of(tensor: torch.Tensor) -> Obstacle | None:
    """Say why a tensor cannot be stored as it is; ``None`` if it can.

    >>> obstacle_of(torch.eye(2).to_sparse()).line
    'tensor.to_dense()'
    >>> obstacle_of(torch.eye(2)) is None
    True
    """
    cls, dtype = type(tensor), str(tensor.dtype).removeprefix("torch.")
    bases = {base.__name__ for base in cls.__mro__}  # by name: some of these modules take long to import
    if "FakeTensor" in bases:
        return Obstacle(
            f"a FakeTensor, {_NO_DATA}", "torch.zeros(tensor.shape, dtype=tensor.dtype)  # outside its mode"
        )
    if tensor.is_nested:
        return Obstacle(f"nested, with rows of several lengths, {_NO_DATA}", "list(tensor.unbind())")
    if tensor.is_meta or "UninitializedTensorMixin" in bases:
        return Obstacle(f"on the meta device or not initialized, {_NO_DATA}", "torch.zeros_like(tensor, device='cpu')")
    if tensor.is_quantized:
        return Obstacle(f"quantized, with a scale, {_NO_DATA}", "tensor.dequantize()")
    if "DTensor" in bases:
        return Obstacle(f"a DTensor in several processes, {_NO_DATA}", "tensor.full_tensor()")
    # a subclass with operators of its own keeps its data elsewhere
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        own: Any = cls
        knows_how = own.dequantize is not torch.Tensor.dequantize
        parts = "[getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]"
        return Obstacle(f"a {cls.__name__} of other tensors, {_NO_DATA}", "tensor.dequantize()" if knows_how else parts)
    if tensor.layout is not torch.strided:
        return Obstacle(f"of layout {tensor.layout}, {_NO_DATA}", "tensor.to_dense()")
    if dtype not in ELEMENTS or ELEMENTS[dtype].packed > 1:
        return Obstacle("which ONNX does not have", "tensor.view(torch.uint8)")
    if cls not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return Obstacle(
            f"a {cls.__name__}, which would come back as a plain tensor", "tensor.as_subclass(torch.Tensor)"
        )
    return None


_NO_DATA = "which has no plain data to store"
