"""Trace a module with other weights in place of those that a trace cannot take as they are.

=====================  ====================================================================================
weights on ``meta``     fake ones on the device of the inputs: a trace refuses tensors of two devices
integers of torchao     the numbers that they stand for, in which :mod:`..onnx.kept_integers` finds them again
of inference mode       the same ones, frozen: a trace cannot state that they are learned
=====================  ====================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...huggingface.layer_weights import paused
from ...private_names.of_torch import FakeTensor, FakeTensorMode


@contextlib.contextmanager
def stand_ins(module: torch.nn.Module, leaves: Iterable[Any]) -> Iterator[None]:
    """Put other weights in the place of some while a module is traced; afterwards it has its own again."""
    # leaves: those of the inputs. Where they are also on `meta`, weights on `meta` stay as they are.
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    device = next((one for one in devices if one.type != "meta"), None if devices else torch.device("cpu"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    made: dict[int, torch.Tensor | None] = {}  # what is tied stays tied
    for owner in module.modules():
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for held in tables:
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in made:
                    made[id(tensor)] = _stand_in(tensor, mode, device)
                if tensor is not None and made[id(tensor)] is not None:
                    found.append((held, name, tensor))
    for held, name, tensor in found:
        held[name] = made[id(tensor)]
    try:
        with paused(module) if any(tensor.is_meta for _, _, tensor in found) else contextlib.nullcontext():
            yield
    finally:
        for held, name, tensor in found:
            held[name] = tensor


def _stand_in(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device | None) -> torch.Tensor | None:
    """A tensor for the trace; ``None`` for one that stays."""
    # device: that of the inputs; `None` where they are on `meta`
    learns = tensor.requires_grad
    if device is not None and tensor.is_meta and not isinstance(tensor, FakeTensor):
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    elif _is_of_integers(tensor):
        made, learns = tensor.dequantize(), False
    elif learns and tensor.is_inference():
        made, learns = tensor.detach(), False
    else:
        return None
    return torch.nn.Parameter(made, requires_grad=learns) if isinstance(tensor, torch.nn.Parameter) else made


def _is_of_integers(tensor: torch.Tensor) -> bool:
    """Whether torchao computes a weight from integers, and multiplies it with what is not rounded."""
    kind: Any = type(tensor)
    wraps = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "tensor_data_names")
    rounds = ("activation_quantization", "act_quant_kwargs")
    return wraps and all(getattr(tensor, name, None) is None for name in rounds)
