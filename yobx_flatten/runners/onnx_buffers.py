"""Bind the cache of a loop once, so that onnxruntime writes keys and values in place.

.. code-block:: text

    step 1   [ 0 ... 6 |                 ]   seven tokens in memory for sixteen
    step 2   [ 0 ... 6   7 |             ]   one is added; nothing is copied
    step 11  [ 0 ... 15  16 |                                ]   memory was full: twice as much
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .in_place import InPlaceCache

SHARED_CACHE = "yobx_flatten.shared_cache"
"""Key of a file's metadata; the value names the inputs whose memory may be that of their outputs, with commas."""

_LEAST = 256  # tokens


class BufferedCache(InPlaceCache):
    """The cache by name of the input, ``onnxruntime.OrtValue``s, and the binding that they are part of."""

    # fixed: inputs that are the same in each step, bound once; none by default

    def __init__(
        self,
        session: Any,
        values: Mapping[str, Any],
        presents: Mapping[str, str],
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(values, presents)
        self.binding = session.io_binding()
        for name, value in (fixed or {}).items():
            self.binding.bind_ortvalue_input(name, value)
        self.capacity = 0
        self._arrays: dict[str, Any] = {}
        self._seen = 0

    def reserve(self, total: int, new: int) -> None:
        """Have memory for a step."""
        self._seen = total
        if total <= self.capacity:
            return
        self.capacity = max(2 * total, _LEAST)
        for name in self.presents:
            old = self._arrays[name] if name in self._arrays else self[name].numpy()
            self._move(name, old[:, :, : total - new])

    def crop(self, kept: int) -> None:
        """Do nothing: what lies after the tokens of the mask is written again."""

    def select_rows(self, rows: torch.Tensor) -> None:
        """Have other rows."""
        for name, array in self._arrays.items():
            found = array[:, :, : self._seen][rows.numpy()]
            if len(rows) == len(array):
                array[:, :, : self._seen] = found
            else:
                self._move(name, found)

    def _move(self, name: str, tokens: Any) -> None:
        """Bind new memory that begins with these tokens."""
        import numpy
        from onnxruntime import OrtValue

        batch, heads, seen, size = tokens.shape
        # zeros take no memory before something is written
        array = numpy.zeros((batch, heads, self.capacity, size), tokens.dtype)
        array[:, :, :seen] = tokens
        self._arrays[name] = array
        self[name] = OrtValue.ortvalue_from_numpy(array)  # shares the memory of the array
        self.binding.bind_ortvalue_input(name, self[name])
        self.binding.bind_ortvalue_output(self.presents[name], self[name])
