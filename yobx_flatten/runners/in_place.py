"""Define KV caches that a runtime updates in place, so that generating a token copies no earlier keys and values.

The last tokens of a KV cache are removed by slicing its tensors, or by restoring the tensors from before a call.
"""

# returned    past (7 tokens) ──> call ──> present (8 tokens)      each call writes all 8 tokens
# in place    [ 0 ... 6 | 7 ]  ──> call                            the call writes the new token only
#
# keys of every token       [ 0 1 2 3 4 5 ]  ──> [ 0 1 2 3 ]          a view, or no change in buffers
# a window, a state         [ 3 4 5 ]        ──> the leaf from before the call; its tokens are read again

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy
import torch

from ..errors import GenerationError, ReplayError
from ..errors.failures import first_line, raised_as
from .ports import CacheSlot, Port, Runner, cache_slots, from_value, is_present, presents_of, split_cache, with_rows
from .signature import Signature


class InPlaceCache(dict[str, Any]):
    """A KV cache (a dict from input name to tensor) in memory that the runtime overwrites at each step."""

    # presents: for each input that is written in place, the name of the output that the file would return
    # shapes: the shape of each leaf in place without unused capacity, by name of the input
    shapes: Mapping[str, tuple[int, ...]]

    def __init__(self, values: Mapping[str, Any], presents: Mapping[str, str]) -> None:
        super().__init__(values)
        self.presents = presents

    @property
    def others(self) -> dict[str, Any]:
        """The KV cache tensors that the runtime does not update in place. Each call returns them as new tensors."""
        return {name: value for name, value in self.items() if name not in self.presents}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the KV cache tensors that are updated in place, without unused capacity, by input name."""
        return {}

    def crop(self, kept: int) -> None:
        """Remove the last tokens from the cache tensors that are updated in place, so that ``kept`` tokens remain."""
        raise NotImplementedError

    def select_rows(self, rows: torch.Tensor) -> None:
        """Select rows of the batch in the cache tensors that are updated in place, as beam search needs."""
        # rows: for each new row the index of an old row
        raise NotImplementedError

    def grown(self, tokens: int) -> None:
        """Record that a call has appended the keys and values of ``tokens`` tokens to the buffers."""
        raise NotImplementedError


def new_tokens(feeds: Mapping[str, torch.Tensor]) -> int:
    return int(feeds["input_ids" if "input_ids" in feeds else "inputs_embeds"].shape[1])


_LEAST = 256  # tokens


class TensorBuffers(InPlaceCache):
    """A KV cache in buffers of shape (rows, heads, capacity, size), by input name, which a file updates in place."""

    # room: the capacity, in tokens, of new buffers for a number of tokens and some later tokens

    def __init__(
        self,
        values: Mapping[str, torch.Tensor],
        presents: Mapping[str, str],
        room: Callable[[int], int] = lambda total: max(2 * total, _LEAST),
    ) -> None:
        super().__init__(values, presents)
        self._room = room
        if len(held := {values[name].shape[2] for name in presents}) > 1:  # all buffers share one number of tokens
            raise GenerationError(f"The layers of the cache must hold the same number of tokens, found {sorted(held)}.")
        self.seen = self._capacity = values[next(iter(presents))].shape[2]  # in tokens
        self._own = False  # the given tensors belong to the caller, and are not changed

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override] # it follows from the buffers
        return {name: (*self[name].shape[:2], self.seen, *self[name].shape[3:]) for name in self.presents}

    def reserve(self, new: int) -> None:
        total = self.seen + new
        # the traced program takes a slice of the buffer that is shorter than the buffer
        if self._own and total < self._capacity:
            return
        self._capacity = self._room(total)
        self._move({name: self[name] for name in self.presents})

    def _move(self, leaves: Mapping[str, torch.Tensor]) -> None:
        for name, leaf in leaves.items():
            rows, heads, _, *size = leaf.shape
            shape = rows, heads, self._capacity, *size
            # NumPy's zeros need no memory until they are written; torch would write them with several threads
            pages = numpy.zeros(math.prod(shape) * leaf.element_size(), numpy.uint8)
            self[name] = torch.from_numpy(pages).view(leaf.dtype).reshape(shape)
            self[name][:, :, : self.seen] = leaf[:, :, : self.seen]
        self._own = True

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: self[name][:, :, : self.seen].clone() for name in self.presents}

    def grown(self, tokens: int) -> None:
        self.seen += tokens

    def crop(self, kept: int) -> None:
        self.seen = kept

    def select_rows(self, rows: torch.Tensor) -> None:
        own = self._own  # before the first layer is moved
        for name in self.presents:
            found = self[name][:, :, : self.seen][rows]
            if own and len(rows) == len(self[name]):  # the buffers are reused
                self[name][:, :, : self.seen] = found
            else:
                self._move({name: found})


def cache_tensors(cache: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    written = cache.tensors() if isinstance(cache, InPlaceCache) else {}
    values = {name: written.get(name, value) for name, value in cache.items()}
    return {name: value if isinstance(value, torch.Tensor) else from_value(value) for name, value in values.items()}


def copied(runner: Runner, cache: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(cache, InPlaceCache):
        return dict(cache)
    return runner.cache({name: leaf.clone() for name, leaf in cache_tensors(cache).items()})


def cropped(runner: Runner, cache: Mapping[str, Any], seen: int, kept: int) -> dict[str, Any] | None:
    """Return the KV cache of the first ``kept`` tokens; ``None`` if recurrent states or a sliding window prevent it."""
    # cache: the caller may not use it afterwards
    returned = cache.others if isinstance(cache, InPlaceCache) else cache
    others = {name: value for name, value in returned.items() if ".encoder." not in name}
    for name in others:
        shape = runner.ports[name].shape
        if name.rpartition(".")[2] not in ("key", "value") or len(shape) != 4 or shape[2] is not None:
            return None
    tensors = cache_tensors(others)
    if any(leaf.shape[2] != seen for leaf in tensors.values()):
        return None
    cut = {name: leaf[:, :, :kept] for name, leaf in tensors.items()}
    if isinstance(cache, InPlaceCache):
        cache.crop(kept)
        cache.update(runner.cache(cut) if cut else {})
        return cache
    return {**cache, **runner.cache(cut)}


def select_rows(runner: Runner, cache: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """Return a KV cache with selected rows of the batch, as beam search needs; the number of rows may change."""
    # cache: a result of `cache` or `step` of the runner, which the caller may not use afterwards
    # rows: for each new row the index of an old row, int64
    returned = cache.others if isinstance(cache, InPlaceCache) else cache
    # onnxruntime's values become tensors and back; a counter of a program can be a Python number
    leaves = {name: from_value(leaf) if hasattr(leaf, "element_type") else leaf for name, leaf in returned.items()}
    selected = runner.cache({name: with_rows(leaf, rows) for name, leaf in leaves.items()})
    if not isinstance(cache, InPlaceCache):
        return selected
    cache.select_rows(rows)
    cache.update(selected)
    return cache


def held_before(cache: Mapping[str, Any]) -> dict[str, Any]:
    """Return the KV cache tensors to save before a call, so that :func:`rewound` can undo the call."""
    return cache.others if isinstance(cache, InPlaceCache) else dict(cache)


def rewound(cache: Mapping[str, Any], held: Mapping[str, Any], seen: int) -> dict[str, Any]:
    """Return the KV cache as it was before a call, with the tensors that :func:`held_before` returned."""
    # cache: the cache after the call, which the caller may not use afterwards
    if not isinstance(cache, InPlaceCache):
        return dict(held)
    cache.crop(seen)
    cache.update(held)
    return cache


class CheckedRunner:
    """Base class that checks the inputs of an exported file; each subclass runs the file with one runtime library."""

    runtime: ClassVar[str]
    _reason = staticmethod(first_line)  # returns the line that names the cause of an error

    # written: names of the cache inputs that the library writes in place

    def __init__(self, signature: Signature, name: str, written: Collection[str] = ()) -> None:
        self.name, self.signature = name, signature
        self.ports: Mapping[str, Port] = signature.ports
        self.outputs: Sequence[str] = signature.outputs
        self.slots: Sequence[CacheSlot] = cache_slots(self.ports.values(), self.outputs)
        # for each cache input that the library writes in place, the name of the output that the file would return
        presents = presents_of(self.slots).items()
        self.in_place: Mapping[str, str] = {name: present for name, present in presents if name in written}

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        tensors = self.signature.bind(inputs, ReplayError, self.name)
        failed = f"{self.runtime} fails on these inputs"
        with raised_as(lambda e: ReplayError(f"{failed}: {self._reason(e)}")):  # libraries raise errors of any class
            if not self.in_place:
                return dict(zip(self.outputs, self._call(tensors), strict=True))
            bound = dict(zip(self.ports, tensors, strict=True))
            cache = self._written_in_place({slot.port.name: bound[slot.port.name] for slot in self.slots})
            given = [tensor for name, tensor in bound.items() if name not in self.in_place]
            found = self._called(given, cache, new_tokens(bound))
            found |= {self.in_place[name]: tensor for name, tensor in cache.tensors().items()}
            return {name: found[name] for name in self.outputs}

    def cache(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        if not self.in_place or not self.in_place.keys() <= tensors.keys():
            return dict(tensors)
        with raised_as(lambda error: GenerationError(f"{self.name} stopped: {self._reason(error)}")):
            return self._written_in_place(tensors)

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any], *, last_scores: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        if self.in_place and not isinstance(cache, InPlaceCache):  # returned by the file of the first call
            cache = self.cache(cache)
        held = cache.shapes if isinstance(cache, InPlaceCache) else {}
        tensors = self.signature.bind({**cache, **feeds}, GenerationError, self.name, held)
        with raised_as(lambda error: GenerationError(f"{self.name} stopped: {self._reason(error)}")):
            if not isinstance(cache, InPlaceCache):
                found = dict(zip(self.outputs, self._call(tensors), strict=True))
                return split_cache(found, self.slots, cache)
            found = self._called(tensors, cache, new_tokens(feeds))
        slots = [slot for slot in self.slots if slot.port.name not in self.in_place]
        cache.update(split_cache(found, slots, cache)[1] if slots else {})
        return {name: value for name, value in found.items() if not is_present(name)}, cache

    def _called(self, tensors: list[torch.Tensor], cache: InPlaceCache, tokens: int) -> dict[str, torch.Tensor]:
        """Run the file, update the KV cache in place, and return the outputs outside the cache by output name."""
        made = [name for name in self.outputs if name not in self.in_place.values()]
        found = dict(zip(made, self._call_in_place(tensors, cache, tokens), strict=True))
        cache.grown(tokens)
        return found

    def _call(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the file on contiguous tensors in the order of its inputs; outputs share no memory with the runtime."""
        raise NotImplementedError

    def _written_in_place(self, leaves: Mapping[str, torch.Tensor]) -> InPlaceCache:
        return TensorBuffers(leaves, self.in_place)

    def _call_in_place(self, tensors: list[torch.Tensor], cache: InPlaceCache, tokens: int) -> Sequence[torch.Tensor]:
        """Run the file on ``tensors``, the inputs not updated in place, in order; update ``cache`` in place."""
        raise NotImplementedError
