"""Leave frozen weights in few bits out of a checkpoint, and know them again by a digest.

They are the same in every checkpoint of a training, and some libraries cannot load what their ``state_dict`` gave. The
model that continues has them already, from where it was quantized; a digest shows that they are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..device.composite import is_composite, parts_of, plain_numbers, states_of
from .errors import CheckpointError


def names_left_out(model: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return the names in a state dict that stand for frozen weights in few bits, with their scales."""
    # state: `model.state_dict(keep_vars=True)`
    frozen = {name for name, value in state.items() if isinstance(value, torch.Tensor) and is_composite(value)}
    if not frozen:
        return set()
    owners = {name.rpartition(".")[0] for name in frozen}
    registered = {id(one) for one in (*nn.Module.parameters(model), *nn.Module.buffers(model))}
    return frozen | {
        name for name, value in state.items() if id(value) not in registered and owners.intersection(_above(name))
    }


def digests_of_frozen(model: nn.Module) -> dict[str, str]:
    """Return a digest of each frozen weight in few bits, by its name in the state dict."""
    owners = {id(p): module for module in nn.Module.modules(model) for p in module._parameters.values()}
    return {
        name: _digest([value, *(slot.value for slot in states_of(owners[id(value)]))])
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and is_composite(value)
    }


def check_frozen(model: nn.Module, stored: Mapping[str, str]) -> None:
    """Check that a model has the frozen weights that a checkpoint was saved with."""
    found = digests_of_frozen(model) if stored else {}
    changed = [name for name, digest in stored.items() if found.get(name) != digest]
    if changed:
        raise CheckpointError(
            f"The checkpoint is of another model: {changed[0]} and {len(changed) - 1} more frozen weights in few bits "
            "are not stored in it, and those of the model are others. Quantize the same weights in the same way first, "
            "and load the checkpoint then."
        )


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts))]


def _digest(values: list[Any]) -> str:
    """A digest of the tensors in a weight and in the state of its module, which may move from one to the other."""
    return hashlib.sha256("".join(sorted(_digest_of_tensor(part) for part in parts_of(values))).encode()).hexdigest()


def _digest_of_tensor(tensor: torch.Tensor) -> str:
    numbers = plain_numbers(tensor).cpu().contiguous()
    what = f"{numbers.dtype} {tuple(numbers.shape)} ".encode()
    return hashlib.sha256(what + numbers.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
