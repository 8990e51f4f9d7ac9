"""The inputs that a generation loop feeds to a file, and an empty cache for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..errors import GenerationError
from ..huggingface.cache_names import CACHE
from ..runners.ports import CacheSlot, Port
from ..runners.runner import Runner

# Leaves of which nothing, or zeros, is what a cache holds before the first token. A convolution sees zeros in front of
# the first token, and a recurrence starts from zero.
_EMPTY_AT_FIRST = {"key", "value", "length", "position", "conv_states", "recurrent_states"}


def empty_cache(slots: Iterable[CacheSlot], batch: int) -> dict[str, torch.Tensor]:
    """Make the cache that has seen no token, by name of the input."""
    # returns: zeros by name of the input; axes that vary have size 0, the first one the batch size
    made = {}
    for slot in slots:
        name, shape, dtype = slot.port
        part = name.rstrip("0123456789").rstrip(".").rpartition(".")[2]  # a layer can have several states
        if part not in _EMPTY_AT_FIRST:
            raise GenerationError(
                f"{name} has no value before the first token: this file continues a text, and cannot begin one. Name a "
                "file without a cache among its inputs for the first call:\n"
                "    OnnxGenerator(path, prefill=first_path)"
            )
        # axis 0 is the batch, and every other size that varies is a number of tokens
        sizes = [batch if axis == 0 and size is None else size or 0 for axis, size in enumerate(shape)]
        if shape and sizes[0] != batch:
            raise GenerationError(f"{name} was exported for {sizes[0]} rows, found {batch}. Pass {sizes[0]} rows.")
        made[name] = torch.zeros(sizes, dtype=dtype)
    return made


def check_ports(ports: Mapping[str, Port], known: Iterable[str], where: str) -> None:
    """Check that a generation loop has everything that a file takes."""
    unknown = [name for name in ports if name not in set(known)]
    if unknown:
        raise GenerationError(
            f"{where} takes {', '.join(unknown)}, which a generation loop does not know. It knows "
            f"{', '.join(sorted(known))}, and {CACHE}.*."
        )
    text = [name for name, port in ports.items() if port.dtype is None]
    if text:
        raise GenerationError(
            f"{where} takes {', '.join(text)}, which are text or sequences. A generation loop feeds tensors of numbers "
            "only."
        )


def typed(runner: Runner, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a file takes of what there is, with elements of the type that it takes."""
    return {name: made[name].to(port.dtype) for name, port in runner.ports.items() if name in made}
