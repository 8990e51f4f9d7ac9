"""Switch the adapters of an exported folder: the same files, called with different matrices."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import DamagedFileError, InvalidArgumentError
from ..errors.dependencies import require
from ..files.document import read_onnx
from .adapters import FIRST, SECOND, adapter_file, adapter_names, read_adapter
from .onnx_runner import OnnxRunner
from .ports import Port, Runner

_TYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}  # numbers of ONNX


def rooms_of_files(folder: pathlib.Path) -> dict[str, Port]:
    """Return the optional inputs for LoRA matrices that the ONNX files of a folder have, by name."""
    require("onnx", purpose="adapters of a folder", extra="onnx")
    found = {}
    for path in sorted(folder.glob("*.onnx")):
        graph = read_onnx(path, failure=DamagedFileError).graph
        held = {tensor.name for tensor in graph.initializer}
        for value in graph.input:
            if value.name in held and value.name.endswith((f".{FIRST}", f".{SECOND}")):
                kind = value.type.tensor_type
                sizes = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim)
                found[value.name] = Port(value.name, sizes, _TYPES.get(kind.elem_type))
    return found


class FolderAdapters:
    """The LoRA adapters of an exported folder; an adapter is read from its file when it is first used."""

    # folder: the exported folder; `None` for files outside of an exported folder

    def __init__(self, folder: pathlib.Path | None) -> None:
        self._folder = folder
        self._read: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def names(self) -> Sequence[str]:
        """The names of the adapters in the folder."""
        return [] if self._folder is None else adapter_names(self._folder)

    def hold(self, name: str, matrices: dict[str, torch.Tensor]) -> None:
        """Add an adapter from memory, which is then used instead of a file of that name."""
        self._read[name] = matrices

    def runners(self, runners: Mapping[str, Runner], name: str) -> dict[str, Any]:
        """Return runners of the same ONNX files that use the named adapter."""
        onnx: dict[str, OnnxRunner] = {}
        for part, runner in runners.items():
            if not isinstance(runner, OnnxRunner):
                raise InvalidArgumentError(
                    f"adapter={name!r}: {runner.runtime} cannot switch adapters. Use ONNX files in onnxruntime."
                )
            onnx[part] = runner
        rooms: dict[str, Port] = {}
        for runner in onnx.values():
            rooms |= runner.rooms
        if name not in self._read:
            if self._folder is None:
                raise InvalidArgumentError(f"adapter={name!r}: this file is not in a folder with adapters.")
            self._read[name] = read_adapter(adapter_file(self._folder, name), rooms)
        return {part: runner.with_adapter(self._read[name]) for part, runner in onnx.items()}
