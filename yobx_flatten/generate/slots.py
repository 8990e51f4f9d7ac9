"""What a generation file takes and returns, by name: which inputs are the cache, and which output each becomes.

.. code-block:: text

    past_key_values.0.key          <-- next time --   present.0.key
    past_key_values.length         <-- next time --   present.length
    past_key_values.0.encoder.key      stays as the first call returned it, where no output has its name
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from ..errors import GenerationError
from ..huggingface.cases import CACHE_NAMES

__all__ = ["CacheSlot", "Port", "cache_slots", "check_ports", "empty_cache", "is_present"]

# Leaves of which nothing, or zeros, is what a cache holds before the first token; others (the states of linear
# attention) have no such value.
_EMPTY_AT_FIRST = {"key", "value", "length", "position"}


class Port(NamedTuple):
    """One input of a program.

    Attributes:
        name: of the input.
        shape: ``None`` for a size that varies.
        dtype: of its elements.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class CacheSlot:
    """One leaf of the cache.

    Attributes:
        port: the input.
        present: the output that takes its place in the next call; where there is none of that name, the leaf stays.
    """

    port: Port
    present: str


def cache_slots(ports: Iterable[Port]) -> list[CacheSlot]:
    """Find the inputs that are the cache.

    >>> cache_slots([Port("input_ids", (None, None), torch.int64), Port("past_key_values.length", (), torch.int64)])
    [CacheSlot(port=Port(name='past_key_values.length', shape=(), dtype=torch.int64), present='present.length')]
    """
    slots = []
    for port in ports:
        prefix = next((name for name in CACHE_NAMES if port.name.startswith(f"{name}.")), None)
        if prefix is not None:
            slots.append(CacheSlot(port, "present" + port.name.removeprefix(prefix)))
    return slots


def is_present(name: str) -> bool:
    """Return whether an output is part of the cache."""
    return name.startswith("present.")


def empty_cache(slots: Iterable[CacheSlot], batch: int) -> dict[str, torch.Tensor]:
    """Make the cache that has seen no token, by name of the input.

    Args:
        slots: the leaves.
        batch: number of rows.

    Raises:
        GenerationError: when a leaf has no empty value, as the states of linear attention.
    """
    made = {}
    for slot in slots:
        name, shape, dtype = slot.port
        if name.rpartition(".")[2] not in _EMPTY_AT_FIRST:
            raise GenerationError(
                f"{name} has no value before the first token: this file goes on generating, and cannot begin. Name a "
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
    """Refuse a program that takes something no generation loop has.

    Raises:
        GenerationError: naming the inputs.
    """
    unknown = [name for name in ports if name not in set(known)]
    if unknown:
        raise GenerationError(
            f"{where} takes {', '.join(unknown)}, which a generation loop does not know. It knows "
            f"{', '.join(sorted(known))}, and past_key_values.*."
        )
