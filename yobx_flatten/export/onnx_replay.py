"""Run an ONNX file in onnxruntime as one side of a replay: inputs by name, its own cache fed back."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..storage.ort_values import run_session, to_onnxruntime
from ..trees.naming import leaf_names

__all__ = ["OnnxSteps"]


class OnnxSteps:
    """What :func:`.replay.replay` asks of a runtime.

    Complex numbers, which onnxruntime does not have, are pairs of real ones in a file: one more axis of size 2.

    Args:
        path: the file.
        input_leaves: the names of all leaves of the module's inputs, in order.
        cache_is: the input that is the cache; ``""`` without one.
        pairs: outputs that are complex numbers in the module.
    """

    def __init__(
        self, path: pathlib.Path, input_leaves: Sequence[str], cache_is: str, pairs: Collection[str] = ()
    ) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised; it is not for the terminal, too
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._wanted = {given.name: given.type for given in self._session.get_inputs()}
        self._input_leaves, self._cache_is, self._pairs = input_leaves, cache_is, pairs

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one step; return its outputs by name."""
        import onnxruntime

        leaves = pytree.tree_leaves((args, dict(kwargs)))
        feeds = dict(zip(self._input_leaves, leaves, strict=True))
        values = {
            name: to_onnxruntime(onnxruntime, name, kind, _as_pairs(feeds[name])) for name, kind in self._wanted.items()
        }
        found = run_session(self._session, values)
        return {name: torch.view_as_complex(value) if name in self._pairs else value for name, value in found.items()}

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


def _as_pairs(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_complex():
        return torch.view_as_real(leaf.detach().resolve_conj())
    return leaf


def _like(given: Any, found: Any) -> Any:
    """What came out of a graph in place of an input: a counter is a number again, not a tensor without axes."""
    return int(found) if type(given) is int else found
