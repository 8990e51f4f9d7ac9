"""Collect the results of a run's stages. They reach the model only if the whole run succeeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ..device.protocol import NOW, Event
from ..device.transfer import HostValue
from ..errors import StageError
from ..optim.parameters import LayerContents
from .parameters.on_device import Buffers, Gradients
from .recompute.attributes import LayerAttributes

# Attribute of layers whose forward runs the code of earlier ones again, from its start: these have the same object in
# it. They write the same values into the same buffers, so those of the first one count.
RUNS_AGAIN = "_rp_runs_again"

# Gradients of the tensors between two stages, on the host; ``None`` where none flows.
Copies: TypeAlias = list[tuple[torch.Tensor, Event] | None]


@dataclasses.dataclass
class Collected:
    """The results of stages; each entry is written by one stage only."""

    buffers: WrittenBuffers  # buffers that layers wrote
    outputs: dict[int, HostValue] = dataclasses.field(default_factory=dict)  # outputs of the last layer, by microbatch
    # inputs of the layers at which a recomputation starts, by layer and microbatch
    saved: dict[tuple[int, int], HostValue] = dataclasses.field(default_factory=dict)
    # data that layers saved with `save_for_recompute`, by layer and microbatch
    kept: dict[tuple[int, int], HostValue] = dataclasses.field(default_factory=dict)
    # gradients of the inputs of the model, by microbatch
    input_gradients: dict[int, Copies] = dataclasses.field(default_factory=dict)
    # gradients of the parameters, by layer; those of a loss function after the last layer
    gradients: dict[int, Gradients] = dataclasses.field(default_factory=dict)
    # gradients of a loss function's own parameters, by microbatch, until all are there
    loss_gradients: dict[int, dict[nn.Parameter, torch.Tensor]] = dataclasses.field(default_factory=dict)
    # attributes of layers that change them, as they were before a forward, by layer and microbatch
    attributes: dict[tuple[int, int], LayerAttributes] = dataclasses.field(default_factory=dict)
    shared: dict[tuple[int, int], Shared] = dataclasses.field(default_factory=dict)  # outputs that are views of others
    # what shows whether a recomputation equals its forward, by layer and microbatch, in a run that looks
    digests: dict[tuple[int, int], list[tuple[torch.Tensor, Event]]] = dataclasses.field(default_factory=dict)

    def add_loss_gradients(self, layer: int) -> None:
        """Add the gradients of the loss function's parameters to those of a layer, in the order of microbatches."""
        while self.loss_gradients:
            sums = self.gradients.setdefault(layer, {})
            for parameter, gradient in self.loss_gradients.pop(min(self.loss_gradients)).items():
                before = sums.get(parameter)
                sums[parameter] = (gradient if before is None else before[0] + gradient, NOW)

    def clear(self) -> None:
        """Release everything."""
        self.buffers.clear()
        values: list[dict[Any, Any]] = [self.outputs, self.saved, self.kept, self.input_gradients, self.gradients]
        for one in [*values, self.loss_gradients, self.digests, self.attributes, self.shared]:
            one.clear()


class WrittenBuffers:
    """The buffers that layers write in a run, such as running statistics."""

    def __init__(self, contents: Sequence[LayerContents]) -> None:
        self._contents = contents
        self._final: dict[int, Buffers] = {}
        self._trail: dict[int, list[Buffers]] = {}
        self._at_start: dict[tuple[int, int], torch.Tensor] = {}

    def add(self, layer: int, written: Buffers) -> None:
        """Take the values that a layer leaves behind."""
        # written: buffers that it wrote, as they are after the last microbatch
        self._final[layer] = written

    def follow(self, layer: int, written: Buffers) -> None:
        """Take the values after one microbatch, so that a recomputation of the next one can start from them."""
        self._trail.setdefault(layer, []).append(written)

    def before(self, layer: int, microbatch: int) -> Buffers:
        """Return the values of a layer's buffers from before a microbatch, for its recomputation."""
        trail = self._trail.get(layer)
        if not trail:
            return {}
        slots = self._contents[layer].buffers
        found: Buffers = {}
        for number in sorted({number for written in trail for number in written}):
            start = self._at_start.get((layer, number), slots[number].tensor)
            found[number] = (start, NOW)
            for written in trail[:microbatch]:
                found[number] = written.get(number, found[number])
        return found

    def check(self) -> None:
        """Check that no buffer was written by two layers, unless both run the same code."""
        for layer, number, writer in self._written():
            code = getattr(self._contents[layer].module, RUNS_AGAIN, None)
            if writer != layer and (
                code is None or code is not getattr(self._contents[writer].module, RUNS_AGAIN, None)
            ):
                raise StageError(
                    f"{self._contents[writer].title} and {self._contents[layer].title} are the same module, or "
                    f"share one, and both write its buffer {self._contents[layer].buffers[number].name!r}. Stages run "
                    "one microbatch apart, so neither would see what the other wrote. Give each layer its own module."
                )

    def _written(self) -> Iterator[tuple[int, int, int]]:
        """The layers and the numbers of buffers that they wrote, each with the first layer that wrote the same one."""
        places: dict[int, list[tuple[int, int]]] = {}
        for layer, written in sorted(self._final.items()):
            for number in written:
                places.setdefault(id(self._contents[layer].buffers[number].tensor), []).append((layer, number))
        for claimed in places.values():
            # a norm that a layer holds and does not call counts as written, as torch does not state that it was
            changed = [place for place in claimed if len(claimed) == 1 or self._is_new(*place)] or claimed[:1]
            yield from ((layer, number, changed[0][0]) for layer, number in changed)

    def _is_new(self, layer: int, number: int) -> bool:
        value, ready = self._final[layer][number]
        ready.result()
        before = self._contents[layer].buffers[number].tensor
        return value.dtype != before.dtype or not torch.equal(value, before)

    def final(self) -> dict[tuple[int, int], torch.Tensor]:
        """Return the values that layers left, on the host, by the layer and the number of the buffer."""
        found = {}
        for layer, number, writer in self._written():
            if layer == writer:
                value, ready = self._final[layer][number]
                ready.result()
                found[layer, number] = value
        return found

    def keep_start(self) -> None:
        """Keep the current values of the model, because another run will replace them before this run's backward."""
        for layer, written in self._final.items():
            for number in written:
                self._at_start[layer, number] = self._contents[layer].buffers[number].tensor.clone()

    def commit(self, *, keep_start: bool) -> None:
        """Write the final values to the model, after :meth:`check`."""
        if keep_start:
            self.keep_start()
        for (layer, number), value in self.final().items():
            self._contents[layer].buffers[number].store(value)
        self._final.clear()

    def clear(self) -> None:
        """Release everything."""
        self._final.clear()
        self._trail.clear()


# Refuse a write to an output of a layer that shares its memory with another output.


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
    """Return the places of outputs that share memory with others."""
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
    """Return the inputs that a layer returns unchanged, for the next layer."""
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
                f"memory with number {other}, as {shared[number].layer} returned them, and between layers each becomes "
                "a separate tensor: the write would not reach the other one. Return one of them, and take the view in "
                "the layer that writes:\n    first = tokens[:, 0]\nOr write to a copy, if that is meant:\n    first = "
                "first + prompt"
            )


def _overlap(one: _Place, other: _Place) -> bool:
    if one.memory != other.memory:
        return False
    if one.numbers > _MANY:
        return True
    numbers = torch.zeros(one.numbers, dtype=torch.bool)
    numbers.as_strided(one.shape, one.stride, one.offset).fill_(True)
    return bool(numbers.as_strided(other.shape, other.stride, other.offset).any())
