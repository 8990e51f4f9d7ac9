"""What an exported file takes and returns, by name: which inputs are the cache, and which output each becomes.

.. code-block:: text

    past_key_values.0.key          <-- next time --   present.0.key
    past_key_values.length         <-- next time --   present.length
    past_key_values.0.encoder.key      stays as the first call returned it, where no output has its name
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..huggingface.cases import CACHE_NAMES

__all__ = ["CacheSlot", "Port", "cache_slots", "is_present", "split_cache", "with_rows"]


class Port(NamedTuple):
    """One input of a program.

    Attributes:
        name: the name of the input.
        shape: ``None`` for a size that varies.
        dtype: the dtype of its elements; ``None`` for text and other types that torch does not have.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype | None


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


def split_cache(
    found: Mapping[str, Any], slots: Iterable[CacheSlot], cache: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the outputs of a step from the cache of the next one.

    Args:
        found: all outputs by name.
        slots: the inputs that are the cache; none for the file of a first call, whose outputs are the cache of another.
        cache: what the step was given.

    Returns:
        The outputs that are not part of the cache, by name, and the cache by name of the input (of the output, where
        there are no slots).

    >>> slots = cache_slots([Port("past_key_values.length", (), torch.int64)])
    >>> split_cache({"logits": 1, "present.length": 4}, slots, {"past_key_values.length": 3})
    ({'logits': 1}, {'past_key_values.length': 4})
    """
    following = {slot.port.name: found.get(slot.present, cache.get(slot.port.name)) for slot in slots}
    following = following or {name: value for name, value in found.items() if is_present(name)}
    return {name: value for name, value in found.items() if not is_present(name)}, following


def with_rows(leaf: Any, rows: torch.Tensor) -> Any:
    """Return a leaf of a cache with other rows; one that all rows share, as the number of tokens seen, stays.

    Args:
        leaf: a tensor, or a number.
        rows: for each new row the place of an old one.

    >>> with_rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 1, 0])).tolist()
    [[3, 4], [3, 4], [1, 2]]
    """
    return leaf[rows] if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 else leaf
