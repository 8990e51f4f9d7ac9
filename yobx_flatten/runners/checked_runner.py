"""Check inputs and call a library that takes tensors in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..errors import GenerationError, ReplayError
from ..errors.failures import raised_as
from ..errors.messages import first_line
from .ports import CacheSlot, Port, cache_slots, split_cache, with_rows
from .signature import Signature

__all__ = ["CheckedRunner"]


class CheckedRunner:
    """One file, open; a :class:`.runner.Runner` whose subclasses only call the library."""

    runtime: ClassVar[str]

    def __init__(self, signature: Signature, name: str) -> None:
        self.name, self.signature = name, signature
        self.ports: Mapping[str, Port] = signature.ports
        self.outputs: Sequence[str] = signature.outputs
        self.slots: Sequence[CacheSlot] = cache_slots(self.ports.values(), self.outputs, name)
        self.in_place: Mapping[str, str] = {}

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one call; see :meth:`.runner.Runner.run`."""
        tensors = self.signature.bind(inputs, ReplayError, self.name)

        def failed(error: BaseException) -> ReplayError:
            return ReplayError(f"{self.runtime} fails on the inputs of the case: {self._reason(error)}")

        with raised_as(failed):  # the libraries have no base classes for their errors
            return dict(zip(self.outputs, self._call(tensors), strict=True))

    def cache(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return a cache for :meth:`step`: the tensors themselves."""
        return dict(tensors)

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Run one call of a loop; see :meth:`.runner.Runner.step`."""
        tensors = self.signature.bind({**cache, **feeds}, GenerationError, self.name)
        with raised_as(lambda error: GenerationError(f"{self.name} stopped: {self._reason(error)}")):
            found = dict(zip(self.outputs, self._call(tensors), strict=True))
        return split_cache(found, self.slots, cache)

    def select_rows(self, cache: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
        """Return a cache with other rows; see :meth:`.runner.Runner.select_rows`."""
        return {name: with_rows(value, rows) for name, value in cache.items()}

    def _reason(self, error: BaseException) -> str:
        """Return what a user reads of an error of the library."""
        return first_line(error)

    def _call(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the file on contiguous tensors in order; the outputs are memory of their own."""
        raise NotImplementedError
