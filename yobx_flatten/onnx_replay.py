"""An ONNX file in onnxruntime as one side of a replay: inputs by name, its own cache fed back."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from .naming import leaf_names

__all__ = ["OnnxSteps"]


class OnnxSteps:
    """What :func:`.replay.replay` asks of a runtime.

    Args:
        path: the file.
        input_leaves: the names of all leaves of the module's inputs, in order.
        cache_is: the input that is the cache; ``""`` without one.
    """

    def __init__(self, path: pathlib.Path, input_leaves: Sequence[str], cache_is: str) -> None:
        import onnxruntime

        self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._wanted = {given.name for given in self._session.get_inputs()}
        self._results = [result.name for result in self._session.get_outputs()]
        self._input_leaves, self._cache_is = input_leaves, cache_is

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one step; return its outputs by name."""
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        feeds = dict(zip(self._input_leaves, leaves, strict=True))
        arrays = {name: _to_numpy(feeds[name]) for name in self._wanted}
        found = self._session.run(None, arrays)
        return dict(zip(self._results, map(torch.from_numpy, map(_writable, found)), strict=True))

    def feed_back(self, kwargs: Mapping[str, Any], outputs: dict[str, Any]) -> Mapping[str, Any]:
        """Put the file's own cache in place of the eager one."""
        leaves, spec = pytree.tree_flatten(dict(kwargs))
        own = [
            _like(leaf, outputs.get("present" + name.removeprefix(self._cache_is), leaf))
            if name.startswith(f"{self._cache_is}.")
            else leaf
            for name, leaf in zip(leaf_names(dict(kwargs)), leaves, strict=True)
        ]
        return pytree.tree_unflatten(own, spec)  # type: ignore[no-any-return] # a dict, as it was


def _like(given: Any, found: Any) -> Any:
    """What came out of a graph in place of an input: a counter is a number again, not a tensor without axes."""
    return int(found) if type(given) is int else found


def _to_numpy(leaf: Any) -> Any:
    import numpy

    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu().contiguous().numpy()
    return numpy.array(leaf)


def _writable(array: Any) -> Any:
    import numpy

    return numpy.array(array)
