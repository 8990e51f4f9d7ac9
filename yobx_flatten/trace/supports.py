"""Interface of a model library that adapts traces, and the list of those that open blocks use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from ..recipe.aliases import PyTree
from ..registry.locking import LOCK
from .onnx_operators import Translation


class TraceSupport(Protocol):
    """What a model library needs while its models are traced, and while programs of them are loaded."""

    modules: str

    def acquire(self) -> None:
        """Put in place what programs of its models need wherever they are called: a block opens."""

    def release(self) -> None:
        """Put it back: a block closes."""

    def named_for(self, forward: Callable[..., Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return keyword arguments, or their dynamic shapes, under the names that a forward has for them."""

    def named_as(self, names: Collection[str], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keyword arguments of a call under the names that a program has for them."""

    def prepare(self, tree: PyTree) -> PyTree:
        """Return the example inputs as the trace should see them."""

    def traceable(self) -> contextlib.AbstractContextManager[None]:
        """Put the traceable versions in place."""

    def translations(self) -> Iterable[Translation]:
        """Return the translations to ONNX of the operators that the library defines."""


OPEN: list[TraceSupport | None] = []
"""One entry for each open block and library; ``None`` for a block without one. Read and changed under the lock."""


def open_supports() -> list[TraceSupport]:
    """Return what the model libraries of the open blocks need, each once."""
    with LOCK:
        return [support for support in dict.fromkeys(OPEN) if support is not None]
