"""Sizes and types of a module's weights, read once per export."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ..huggingface.layer_weights import largest_layer
from .proof.memory import weight_bytes


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Facts about a module for the checks before an export."""

    name: str  # of its class
    weight_bytes: int  # of parameters and buffers, what is tied counted once
    layer_bytes: int  # of the largest layer whose weights are read when it is called; 0 where all are in memory
    types: tuple[str, ...]  # of parameters and buffers, such as `"float32"`
    kernel_types: tuple[str, ...]  # of floating-point parameters, which a runtime needs kernels for
    matrix_types: tuple[str, ...]  # of parameters that may be stored in fewer bits
    projected: int  # number of weights in projections
    projected_bytes: int  # bytes of those of them that are not also tables of embeddings

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModelFacts:
        """Read them off a module."""
        projections = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Linear)}
        tables = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
        stored = [weight for weight in module.parameters() if id(weight) in projections]
        alone = [weight for weight in stored if id(weight) not in tables]
        return cls(
            name=type(module).__qualname__,
            weight_bytes=weight_bytes(module),
            layer_bytes=largest_layer(module),
            types=_types((*module.parameters(), *module.buffers())),
            kernel_types=_types(weight for weight in module.parameters() if weight.is_floating_point()),
            matrix_types=_types(_matrices(module)),
            projected=sum(weight.numel() for weight in stored),
            projected_bytes=sum(weight.numel() * weight.element_size() for weight in alone),
        )

    def bytes_in(self, bits: int) -> int:
        """Return how many bytes the weights take if the projections are quantized."""
        return self.weight_bytes - self.projected_bytes + self.projected * bits // 8

    @property
    def is_in_half(self) -> bool:
        """Whether there are weights of half precision."""
        return not {"float16", "bfloat16"}.isdisjoint(self.types)


def _matrices(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters that may be multiplied with: matrices, but for those of embeddings alone."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    heads = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Linear)}
    for weight in module.parameters():
        if weight.dim() == 2 and weight.is_floating_point() and (id(weight) not in tables or id(weight) in heads):
            yield weight


def _types(tensors: Iterator[torch.Tensor] | tuple[torch.Tensor, ...]) -> tuple[str, ...]:
    return tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
