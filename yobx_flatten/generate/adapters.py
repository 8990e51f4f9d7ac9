"""Switch the adapters of an exported folder: the same files, called with other matrices."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ..runners.adapters import adapter_file, adapter_names, read_adapter
from ..runners.onnx_runner import OnnxRunner
from ..runners.ports import Port
from ..runners.runner import Runner
from .steps import Parts

__all__ = ["FolderAdapters"]


class FolderAdapters:
    """The adapters of a folder, each read when it is first asked for."""

    # folder: the exported folder; `None` for files that are of none

    def __init__(self, folder: pathlib.Path | None) -> None:
        self._folder = folder
        self._read: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def names(self) -> Sequence[str]:
        """The adapters that there are."""
        return [] if self._folder is None else adapter_names(self._folder)

    def hold(self, name: str, matrices: dict[str, torch.Tensor]) -> None:
        """Have an adapter that was read already, or that is not in the folder yet."""
        self._read[name] = matrices

    def parts(self, parts: Parts, name: str) -> Parts:
        """Return the files of a model with an adapter."""
        runners = {field.name: getattr(parts, field.name) for field in dataclasses.fields(parts)}
        used = self.runners({part: runner for part, runner in runners.items() if runner is not None}, name)
        return dataclasses.replace(parts, **used)

    def runners(self, runners: Mapping[str, Runner], name: str) -> dict[str, Any]:
        """Return files with an adapter."""
        onnx: dict[str, OnnxRunner] = {}
        for part, runner in runners.items():
            if not isinstance(runner, OnnxRunner):
                raise InvalidArgumentError(
                    f"adapter={name!r}: {runner.runtime} runs files with the weights that they hold. Adapters are "
                    "switched with ONNX files in onnxruntime."
                )
            onnx[part] = runner
        rooms: dict[str, Port] = {}
        for runner in onnx.values():
            rooms |= runner.rooms
        if name not in self._read:
            if self._folder is None:
                raise InvalidArgumentError(f"adapter={name!r}: this file is in no folder with adapters.")
            self._read[name] = read_adapter(adapter_file(self._folder, name), rooms)
        return {part: runner.with_adapter(self._read[name]) for part, runner in onnx.items()}
