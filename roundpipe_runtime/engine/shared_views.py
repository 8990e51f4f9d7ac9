"""Refuse a write to an output of a layer that shares its memory with another output.

Layers return tensors; between layers each is a tensor of its own. So a write to one does not reach the other one, which
it would without a pipeline::

    tokens, first = layer(x)      # first is tokens[:, 0]
    first.add_(prompt)            # in the next layer: tokens stays as it was
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from ..errors import StageError


class _Place(NamedTuple):
    """A tensor in its memory."""

    memory: int
    numbers: int  # how many it has room for
    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]
    layer: str  # title of the layer that returned it


# The outputs of a layer that share memory with another one, by their number.
Shared: TypeAlias = dict[int, _Place]

# More numbers are not looked at one by one: tensors in one memory are then taken to overlap.
_MANY = 2**24


def shared_views(outputs: Sequence[torch.Tensor], title: str) -> Shared:
    """Return where outputs are that share memory with others."""
    if len(outputs) < 2:
        return {}
    places: dict[int, list[int]] = {}
    for number, tensor in enumerate(outputs):
        if tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
    found = [(number, memory) for memory, numbers in places.items() if len(numbers) > 1 for number in numbers]
    return {number: _place(outputs[number], memory, title) for number, memory in found if memory}


def _place(tensor: torch.Tensor, memory: int, title: str) -> _Place:
    numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
    return _Place(memory, numbers, tensor.storage_offset(), tensor.shape, tensor.stride(), title)


def passed_on(shared: Shared, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Shared:
    """Return those of the next layer: its inputs that it returns as they are."""
    numbers = {id(tensor): number for number, tensor in enumerate(inputs)}
    taken = {place: numbers[id(tensor)] for place, tensor in enumerate(outputs) if id(tensor) in numbers}
    return {place: shared[number] for place, number in taken.items() if number in shared}


def check_writes(shared: Shared, written: Sequence[int], title: str) -> None:
    """Check that no input was written that shares memory with another one."""
    for number in written:
        other = next((one for one in shared if one != number and _overlap(shared[one], shared[number])), None)
        if other is not None:
            raise StageError(
                f"{title} writes its input number {number} in place, of shape {tuple(shared[number].shape)}. It shares "
                f"memory with number {other}, as {shared[number].layer} returned them, and between layers each is a "
                "tensor of its own: the write would not reach the other one. Return one of them, and take the view in "
                "the layer that writes:\n"
                "    first = tokens[:, 0]\n"
                "Or write to a copy, if that is meant:\n"
                "    first = first + prompt"
            )


def _overlap(one: _Place, other: _Place) -> bool:
    if one.memory != other.memory:
        return False
    if one.numbers > _MANY:
        return True
    numbers = torch.zeros(one.numbers, dtype=torch.bool)
    numbers.as_strided(one.shape, one.stride, one.offset).fill_(True)
    return bool(numbers.as_strided(other.shape, other.stride, other.offset).any())
