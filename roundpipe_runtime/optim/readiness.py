"""Decide when pipeline stages may read a layer's parameters, and when an optimizer step may replace them.

:class:`LayerReadiness` has the rules for one layer, without threads, so that a test can try every order of events.
:class:`ReadinessTable` has one :class:`LayerReadiness` per layer, and adds a lock and waiting.
"""

# v0, v1: versions of the parameters
# run t         run t+1        optimizer, step t
# reads v0      reads v0       update          publish v1, layer by layer, after the last read of run t+1
# ............. held ......... | ............. v1 v1 v1 |     run t+2 waits for v1 of one layer at a time

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable

from ..errors import StageError


@dataclasses.dataclass(slots=True)
class LayerReadiness:
    """Decides when stages may read one layer's parameters, and when an optimizer step may replace them.

    >>> layer = LayerReadiness()
    >>> layer.start_read(0); layer.can_write(1); layer.end_read(); layer.can_write(1)
    False
    True
    """

    version: int = 0  # number of the parameters' current version
    readers: int = 0  # number of stages that read the parameters now
    writing: bool = False  # whether the parameters are being replaced
    # number of runs that still need each version; a version that a run needs is not replaced
    holds: dict[int, int] = dataclasses.field(default_factory=dict)

    def can_read(self, version: int) -> bool:
        return self.version == version and not self.writing

    def start_read(self, version: int) -> None:
        _require(self.can_read(version), f"version {version} cannot be read", self)
        self.readers += 1

    def end_read(self) -> None:
        _require(self.readers > 0, "no stage reads them", self)
        self.readers -= 1

    def can_write(self, version: int) -> bool:
        """Return whether ``version`` is the next version, and no pipeline call still needs the current version."""
        free = not self.writing and not self.readers and not self.holds.get(self.version)
        return free and self.version + 1 == version

    def start_write(self, version: int) -> None:
        _require(self.can_write(version), f"version {version} cannot be written", self)
        self.writing = True

    def end_write(self, *, done: bool = True) -> None:
        """End the write of the next version; unless ``done`` is true, the previous version stays current."""
        _require(self.writing, "no step replaces them", self)
        self.writing = False
        self.version += done

    def hold(self, version: int) -> None:
        _require(version >= self.version, f"version {version} was already replaced", self)
        self.holds[version] = self.holds.get(version, 0) + 1

    def let_go(self, version: int) -> None:
        _require(self.holds.get(version, 0) > 0, f"no stage holds version {version}", self)
        self.holds[version] -= 1
        if not self.holds[version]:
            del self.holds[version]


def _require(allowed: bool, problem: str, layer: LayerReadiness) -> None:
    if not allowed:
        raise StageError(f"A layer's parameters were read or replaced out of order: {problem}. State: {layer}.")


class ReadinessTable:
    """Makes stages wait for updated parameters of a layer, and makes updates wait until no stage reads the layer."""

    def __init__(self, num_layers: int) -> None:
        self._layers = [LayerReadiness() for _ in range(num_layers)]
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._latest = 0  # some layers may still have an earlier version

    @property
    def latest(self) -> int:
        """Version of the parameters that a pipeline call reads if it starts now."""
        return self._latest

    def advance(self) -> int:
        """Increment and return the latest version of the parameters, for which all later pipeline calls wait."""
        with self._changed:
            self._failure = None
            self._latest += 1
            return self._latest

    def version(self, layer: int) -> int:
        with self._changed:
            return self._layers[layer].version

    def can_read(self, layer: int, version: int) -> bool:
        with self._changed:
            return self._layers[layer].can_read(version)

    def start_read(self, layer: int, version: int, *, check: Callable[[], None] = lambda: None) -> None:
        """Wait until a layer has the given version, and keep this version until :meth:`end_read` is called."""
        # check: function that is called ten times a second while waiting; it may raise to give up
        with self._changed:
            while not self._layers[layer].can_read(version):
                check()
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(0.1)
            self._layers[layer].start_read(version)

    def end_read(self, layer: int) -> None:
        self._each([self._layers[layer]], LayerReadiness.end_read)

    def write(self, layer: int, version: int, fill: Callable[[], None], *, done: bool = True) -> None:
        """Wait until no pipeline call needs a layer's current parameters, then call ``fill`` to write new ones."""
        # done: whether `fill` completes the layer; otherwise a later call does. An error in `fill` keeps the version.
        with self._changed:
            self._changed.wait_for(lambda: self._layers[layer].can_write(version))
            self._layers[layer].start_write(version)
        filled = False
        try:
            fill()  # not under the lock, because it runs code of the user
            filled = True
        finally:
            self._each([self._layers[layer]], lambda state: state.end_write(done=filled and done))

    def fail(self, error: BaseException | None) -> None:
        """Raise an error in threads that wait for a version that will not be written; ``None`` clears the error."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def hold_latest(self) -> int:
        """Return the latest version of the parameters, and keep this version until :meth:`let_go` is called."""
        with self._changed:
            self._each(self._layers, lambda state: state.hold(self._latest))
            return self._latest

    def let_go(self, version: int) -> None:
        self._each(self._layers, lambda state: state.let_go(version))

    def _each(self, layers: Iterable[LayerReadiness], change: Callable[[LayerReadiness], None]) -> None:
        with self._changed:
            for layer in layers:
                change(layer)
            self._changed.notify_all()
