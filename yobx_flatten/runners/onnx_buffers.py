"""The cache of a loop in memory that is bound once, into which onnxruntime writes the keys and values of each step.

.. code-block:: text

    step 1   [ 0 ... 6 |                 ]   seven tokens in memory for sixteen
    step 2   [ 0 ... 6   7 |             ]   one is added; nothing is copied
    step 11  [ 0 ... 15  16 |                                ]   memory was full: twice as much
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["SHARED_CACHE", "BufferedCache"]

SHARED_CACHE = "yobx_flatten.shared_cache"
"""Key of a file's metadata; the value names the inputs whose memory may be that of their outputs, with commas."""

_LEAST = 256  # tokens


class BufferedCache(dict[str, Any]):
    """The cache by name of the input, ``onnxruntime.OrtValue``s, and the binding that they are part of.

    A step changes it: earlier states are gone.

    Args:
        session: an ``onnxruntime.InferenceSession``.
        values: the cache.
        presents: for each input whose memory is that of an output, the name of that output.
    """

    def __init__(self, session: Any, values: Mapping[str, Any], presents: Mapping[str, str]) -> None:
        super().__init__(values)
        self.presents = presents
        self.binding = session.io_binding()
        self.capacity = 0
        self._arrays: dict[str, Any] = {}

    def reserve(self, total: int, new: int) -> None:
        """Have memory for a step.

        Args:
            total: number of tokens after the step.
            new: number of tokens of the step.
        """
        if total <= self.capacity:
            return
        import numpy
        from onnxruntime import OrtValue

        seen = total - new
        self.capacity = max(2 * total, _LEAST)
        for name, present in self.presents.items():
            old = self._arrays[name] if name in self._arrays else self[name].numpy()
            batch, heads, _, size = old.shape
            # zeros take no memory before something is written
            grown = numpy.zeros((batch, heads, self.capacity, size), old.dtype)
            grown[:, :, :seen] = old[:, :, :seen]
            self._arrays[name] = grown
            self[name] = OrtValue.ortvalue_from_numpy(grown)  # shares the memory of the array
            self.binding.bind_ortvalue_input(name, self[name])
            self.binding.bind_ortvalue_output(present, self[name])
