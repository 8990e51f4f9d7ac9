"""Check inputs and call a library that takes tensors in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..errors import GenerationError, ReplayError
from ..errors.failures import raised_as
from ..errors.messages import first_line
from .in_place import InPlaceCache, new_tokens
from .ports import CacheSlot, Port, cache_slots, is_present, split_cache, with_rows
from .signature import Signature


class CheckedRunner:
    """One file, open; a :class:`.runner.Runner` whose subclasses only call the library."""

    runtime: ClassVar[str]

    def __init__(self, signature: Signature, name: str) -> None:
        self.name, self.signature = name, signature
        self.ports: Mapping[str, Port] = signature.ports
        self.outputs: Sequence[str] = signature.outputs
        self.slots: Sequence[CacheSlot] = cache_slots(self.ports.values(), self.outputs)
        # inputs of the cache that the library writes in place, with the outputs that they would be
        self.in_place: Mapping[str, str] = {}

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one call; see :meth:`.runner.Runner.run`."""
        tensors = self.signature.bind(inputs, ReplayError, self.name)

        def failed(error: BaseException) -> ReplayError:
            return ReplayError(f"{self.runtime} fails on the inputs of the case: {self._reason(error)}")

        with raised_as(failed):  # the libraries have no base classes for their errors
            if not self.in_place:
                return dict(zip(self.outputs, self._call(tensors), strict=True))
            bound = dict(zip(self.ports, tensors, strict=True))
            cache = self._written_in_place({slot.port.name: bound[slot.port.name] for slot in self.slots})
            given = [tensor for name, tensor in bound.items() if name not in self.in_place]
            found = {**self._called(given, cache, new_tokens(bound)), **self._kept(cache)}
            return {name: found[name] for name in self.outputs}

    def cache(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return a cache for :meth:`step`: the tensors themselves, or what the library writes in place."""
        if not self.in_place or not self.in_place.keys() <= tensors.keys():
            return dict(tensors)
        with raised_as(lambda error: GenerationError(f"{self.name} stopped: {self._reason(error)}")):
            return self._written_in_place(tensors)

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any], *, last_scores: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Run one call of a loop; see :meth:`.runner.Runner.step`."""
        if self.in_place and not isinstance(cache, InPlaceCache):  # of a file for the first call
            cache = self.cache(cache)
        written = cache if isinstance(cache, InPlaceCache) else None
        held = {} if written is None else written.shapes
        tensors = self.signature.bind({**cache, **feeds}, GenerationError, self.name, held)
        with raised_as(lambda error: GenerationError(f"{self.name} stopped: {self._reason(error)}")):
            if written is None:
                found = dict(zip(self.outputs, self._call(tensors), strict=True))
                return split_cache(found, self.slots, cache)
            found = self._called(tensors, written, new_tokens(feeds))
        slots = [slot for slot in self.slots if slot.port.name not in self.in_place]
        outputs = {name: value for name, value in found.items() if not is_present(name)}
        written.update(split_cache(found, slots, written)[1] if slots else {})
        return outputs, written

    def select_rows(self, cache: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
        """Return a cache with other rows; see :meth:`.runner.Runner.select_rows`."""
        if not isinstance(cache, InPlaceCache):
            return {name: with_rows(value, rows) for name, value in cache.items()}
        cache.select_rows(rows)
        cache.update({name: with_rows(value, rows) for name, value in cache.others.items()})
        return cache

    def _called(self, tensors: list[torch.Tensor], cache: InPlaceCache, tokens: int) -> dict[str, torch.Tensor]:
        """The outputs of a call that are not written in place."""
        made = [name for name in self.outputs if name not in self.in_place.values()]
        found = dict(zip(made, self._call_in_place(tensors, cache, tokens), strict=True))
        cache.grown(tokens)
        return found

    def _kept(self, cache: InPlaceCache) -> dict[str, torch.Tensor]:
        """Copies of what is written in place, by name of the output."""
        return {self.in_place[name]: tensor for name, tensor in cache.tensors().items()}

    def _reason(self, error: BaseException) -> str:
        """Return what a user reads of an error of the library."""
        return first_line(error)

    def _call(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the file on contiguous tensors in order; the outputs do not share its memory."""
        raise NotImplementedError

    def _written_in_place(self, leaves: Mapping[str, torch.Tensor]) -> InPlaceCache:
        """Return a cache that the library writes in place."""
        raise NotImplementedError

    def _call_in_place(self, tensors: list[torch.Tensor], cache: InPlaceCache, tokens: int) -> Sequence[torch.Tensor]:
        """Run the file on the inputs that are not written in place, in order; see :meth:`_call`."""
        # tokens: how many are read
        raise NotImplementedError
