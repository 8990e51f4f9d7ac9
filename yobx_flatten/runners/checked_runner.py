"""A file whose library takes tensors in order: called by name, after a check of what is passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..errors import FlattenError, GenerationError, ReplayError
from ..errors.messages import first_line
from .ports import CacheSlot, Port, cache_slots, split_cache
from .signature import Signature

__all__ = ["CheckedRunner"]


class CheckedRunner:
    """One file, open; a :class:`.runner.Runner` whose subclasses only call the library.

    Args:
        signature: what the file takes and returns.
        name: of the file, for messages.

    Attributes:
        signature: what the file takes and returns.
    """

    runtime: ClassVar[str]

    def __init__(self, signature: Signature, name: str) -> None:
        self.name, self.signature = name, signature
        self.ports: Mapping[str, Port] = signature.ports
        self.outputs: Sequence[str] = signature.outputs
        self.slots: Sequence[CacheSlot] = cache_slots(self.ports.values())

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one call; see :meth:`.runner.Runner.run`."""
        return self._checked(inputs, ReplayError)

    def cache(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return a cache for :meth:`step`: the tensors themselves."""
        return dict(tensors)

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Run one call of a loop; see :meth:`.runner.Runner.step`."""
        return split_cache(self._checked({**cache, **feeds}, GenerationError), self.slots, cache)

    def _checked(self, values: Mapping[str, Any], failure: type[FlattenError]) -> dict[str, Any]:
        tensors = self.signature.bind(values, failure, self.name)
        try:
            found = self._call(tensors)
        except Exception as error:  # the libraries have no base classes for their errors
            raise failure(f"{self.runtime} fails on {self.name}: {first_line(error)}") from error
        return dict(zip(self.outputs, found, strict=True))

    def _call(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the file on contiguous tensors in order; the outputs are memory of their own."""
        raise NotImplementedError
