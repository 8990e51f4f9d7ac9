"""An ONNX file as a step of a loop: onnxruntime keeps what comes out, and gets it back without a copy.

.. code-block:: text

    step 1   past (empty)  ──> session ──> present ──┐ an OrtValue: memory that onnxruntime owns
    step 2   past  <── the same OrtValue ────────────┘ ──> session ──> present ── ...
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..dependencies import require
from ..errors import GenerationError
from ..messages import first_line
from .slots import CacheSlot, Port, cache_slots, empty_cache, is_present

__all__ = ["OnnxRunner", "open_session"]

_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}


def open_session(path: str | os.PathLike[str], *, threads: int | None = None) -> Any:
    """Open a file with onnxruntime, on the CPU.

    Args:
        path: the file.
        threads: that one operator may use; ``None`` for onnxruntime's own choice.

    Raises:
        MissingDependencyError: when onnxruntime is not installed.
        GenerationError: when the file cannot be loaded.
    """
    require("onnxruntime", purpose="OnnxGenerator", extra="onnx")
    import onnxruntime

    if not os.path.isfile(path):
        raise GenerationError(f"There is no file {os.fspath(path)}.")
    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has no base class for its errors
        raise GenerationError(f"onnxruntime cannot load {os.fspath(path)}: {first_line(error)}") from error


class OnnxRunner:
    """One ONNX file and the cache of the loop it is in.

    Args:
        session: an ``onnxruntime.InferenceSession``.
        name: of the file, for messages.
    """

    def __init__(self, session: Any, name: str) -> None:
        self.name = name
        self._session = session
        self.ports = {node.name: _port(node, name) for node in session.get_inputs()}
        self.outputs = [node.name for node in session.get_outputs()]
        self.slots: list[CacheSlot] = cache_slots(self.ports.values())

    def start(self, batch: int) -> dict[str, Any]:
        """Return the cache before the first token."""
        return {name: _to_value(tensor) for name, tensor in empty_cache(self.slots, batch).items()}

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Run once.

        Args:
            feeds: inputs by name.
            cache: what :meth:`start`, or the step before, returned.

        Returns:
            The outputs that are not part of the cache, and the cache for the next step. The tensors of ``cache`` that
            have a successor are released as soon as nothing else holds them.
        """
        binding = self._session.io_binding()
        for name, tensor in feeds.items():
            binding.bind_ortvalue_input(name, _to_value(tensor.to(self.ports[name].dtype)))
        for slot in self.slots:
            binding.bind_ortvalue_input(slot.port.name, cache[slot.port.name])
        for name in self.outputs:
            # without a shape: onnxruntime takes new memory for it, and never that of an input
            binding.bind_output(name)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime has no base class for its errors
            raise GenerationError(f"{self.name} stopped: {first_line(error)}") from error
        found = dict(zip(self.outputs, binding.get_outputs(), strict=True))
        following = {slot.port.name: found.get(slot.present, cache[slot.port.name]) for slot in self.slots}
        if not self.slots:  # the file of a first call: its outputs are the cache of another file
            following = {name: value for name, value in found.items() if is_present(name)}
        return {name: _to_tensor(value) for name, value in found.items() if not is_present(name)}, following


def _port(node: Any, name: str) -> Port:
    if node.type not in _DTYPES:
        raise GenerationError(f"{name} takes {node.name} as {node.type}, which a generation loop has no use for.")
    return Port(node.name, tuple(size if isinstance(size, int) else None for size in node.shape), _DTYPES[node.type])


def _to_value(tensor: torch.Tensor) -> Any:
    from onnxruntime import OrtValue

    return OrtValue.ortvalue_from_numpy(tensor.detach().cpu().contiguous().numpy())  # shares the memory


def _to_tensor(value: Any) -> torch.Tensor:
    return torch.from_numpy(value.numpy())
