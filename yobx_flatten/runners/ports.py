"""The inputs and outputs of an exported file by name, and which output each cache input becomes.

.. code-block:: text

    past_key_values.0.key          <-- next time --   present.0.key
    past_key_values.length         <-- next time --   present.length
    past_key_values.0.encoder.key      stays as the first call returned it, where no output has its name

Any other part of the cache grows. A file that takes it and does not return it would forget what it read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import GenerationError
from ..huggingface.cache_names import CACHE, PRESENT, after_cache

KEPT_SCORES = "num_logits_to_keep"
"""Input of an ONNX file that has a value, so that none has to be given: of how many last tokens it returns scores."""

_NAMES = (
    "Export it again with these names, which export_onnx gives by itself:\n"
    f'    torch.onnx.export(..., input_names=[..., "{CACHE}.0.key"], output_names=[..., "{PRESENT}.0.key"])'
)


class Port(NamedTuple):
    """One input of a program."""

    name: str  # the name of the input
    shape: tuple[int | None, ...]  # `None` for a size that varies
    dtype: torch.dtype | None  # the dtype of its elements; `None` for text and other types that torch does not have


@dataclasses.dataclass(frozen=True)
class CacheSlot:
    """One leaf of the cache."""

    port: Port  # the input
    present: str | None  # the output that takes its place in the next call; `None` where the leaf stays as it is


def present_of(name: str) -> str | None:
    """Return the output that takes the place of an input in the next call; ``None`` if it is not of the cache.

    >>> present_of("past_key_values.0.key"), present_of("input_ids")
    ('present.0.key', None)
    """
    rest = after_cache(name)
    return None if rest is None else PRESENT + rest


def check_cache_outputs(
    inputs: Iterable[str],
    outputs: Collection[str],
    where: str,
    *,
    of: str | None = None,
    remedy: str = _NAMES,
) -> None:
    """Refuse files that accept a growing cache and do not return all of it.

    >>> check_cache_outputs(["past_key_values.0.key"], ["logits", "present.0.key"], "model.onnx")
    """
    # of: name of the file that takes the inputs, where that is another one; `None`, the default, for the same
    # remedy: what to do about it; by default for a file that exists
    lost = {name: present for name in inputs if (present := _grown(name)) is not None and present not in outputs}
    if lost:
        name, present = next(iter(lost.items()))
        takes, returns = f"{of or where} takes", "does not return" if of is None else f"{where} does not return"
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise GenerationError(
            f"{takes} {name} and {returns} {present}{more}: the next call would not get the updated cache. It "
            f"returns {', '.join(outputs)}. {remedy}"
        )


def _grown(name: str) -> str | None:
    """The output in which an input that grows comes back; what an encoder made does not grow."""
    return None if ".encoder." in name else present_of(name)


def cache_slots(ports: Iterable[Port], outputs: Collection[str], where: str = "") -> list[CacheSlot]:
    """Find the inputs that are the cache.

    >>> counter = Port("past_key_values.length", (), torch.int64)
    >>> cache_slots([Port("input_ids", (None, None), torch.int64), counter], ["logits", "present.length"], "model.onnx")
    [CacheSlot(port=Port(name='past_key_values.length', shape=(), dtype=torch.int64), present='present.length')]
    """
    # where: name of a file of which calls follow each other; by default none has to, and nothing is checked
    ports = list(ports)
    if where:
        check_cache_outputs([port.name for port in ports], outputs, where)
    presents = ((port, present_of(port.name)) for port in ports)
    return [
        CacheSlot(port, present if present in outputs else None) for port, present in presents if present is not None
    ]


def is_present(name: str) -> bool:
    """Return whether an output is part of the cache."""
    return name.startswith(f"{PRESENT}.")


def split_cache(
    found: Mapping[str, Any], slots: Iterable[CacheSlot], cache: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the outputs of a step from the cache of the next one.

    >>> slots = [CacheSlot(Port("past_key_values.length", (), torch.int64), "present.length")]
    >>> split_cache({"logits": 1, "present.length": 4}, slots, {"past_key_values.length": 3})
    ({'logits': 1}, {'past_key_values.length': 4})
    """
    # slots: the inputs that are the cache; none for the file of a first call, whose outputs are the cache of another
    # raises: `GenerationError` where a part of the cache that grows does not come out
    # returns: the outputs that are not part of the cache, by name, and the cache by name of the input (of the output,
    # where there are no slots)
    slots = list(slots)
    if any(slot.present is None for slot in slots):
        check_cache_outputs([slot.port.name for slot in slots], found, "the file")
    following = {
        slot.port.name: cache[slot.port.name] if slot.present is None else found[slot.present] for slot in slots
    }
    following = following or {name: value for name, value in found.items() if is_present(name)}
    return {name: value for name, value in found.items() if not is_present(name)}, following


def with_rows(leaf: Any, rows: torch.Tensor) -> Any:
    """Return a leaf of a cache with other rows; one that all rows share, as the number of tokens seen, stays.

    >>> with_rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 1, 0])).tolist()
    [[3, 4], [3, 4], [1, 2]]
    """
    # rows: for each new row the place of an old one
    return leaf[rows] if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 else leaf
