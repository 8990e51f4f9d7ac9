"""Check that all ranks agree on the model and on each call, and start them from the weights of rank 0."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from ...engine.config import RoundPipeRunConfig
from ...errors import RoundPipeWarning, warn
from ...optim.parameters import LayerContents
from ..ranks.ranks import Ranks


def describe_model(model: nn.Module, **options: Any) -> dict[str, object]:
    """Return what makes a model and its pipeline, by name, for :func:`ranks_disagree`."""
    stated: dict[str, object] = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in _tensors(model)}
    return stated | {name: str(value) for name, value in options.items()}


def describe_call(
    contents: list[LayerContents], config: RoundPipeRunConfig, *, call: str, step: int, is_deferred: bool
) -> dict[str, object]:
    """Return what makes a call, by name, for :func:`ranks_disagree`."""
    trainable = [
        (layer.index, number)
        for layer in contents
        for number, parameter in enumerate(layer.parameters())
        if parameter.requires_grad
    ]
    return {
        "the call": call,
        "the number of completed calls": step,
        "num_microbatch": config.num_microbatch,
        "loss_reduction": config.loss_reduction,
        "no_sync": is_deferred,
        "the number of trainable parameters": len(trainable),
        "the digest of what is trainable": zlib.crc32(repr(trainable).encode()),
        "the training mode of the layers": all(layer.module.training for layer in contents),
    }


@torch.no_grad()
def share_weights(model: nn.Module, ranks: Ranks) -> None:
    """Give all ranks the weights and buffers of rank 0, where they differ."""
    if ranks.size == 1:
        return
    tensors = _tensors(model)
    digests = ranks.exchange([_digest(tensor) for _, tensor in tensors])
    different = [number for number in range(len(tensors)) if any(one[number] != digests[0][number] for one in digests)]
    for number in different:
        tensor = tensors[number][1]
        if tensor.is_contiguous():
            ranks.broadcast(tensor.detach())
        else:
            received = tensor.detach().contiguous()
            ranks.broadcast(received)
            tensor.copy_(received)
    if different and ranks.rank == 0:
        warn(
            f"The ranks began with different values of {len(different)} parameters or buffers, like "
            f"{tensors[different[0]][0]!r}; all have those of rank 0 now. The same seed on all ranks makes them the "
            "same:\n"
            "    torch.manual_seed(0)  # before the model is made",
            RoundPipeWarning,
        )


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _digest(tensor: torch.Tensor) -> int:
    if not tensor.numel() or tensor.is_meta:
        return 0
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)
