"""Write the matrices of adapters into an exported folder, for this package and for onnxruntime-genai."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping

import torch

from ...export.room import Adapter
from ...files.tensors import write_tensor_file
from ...runners.adapters import ADAPTERS, check_matrices
from ...runners.elements import ELEMENTS
from ...runners.folder_adapters import rooms_of_files
from ...runners.ports import Port


def write_matrices(folder: pathlib.Path, adapters: Iterable[Adapter]) -> None:
    """Write adapters next to the files that take them."""
    rooms: Mapping[str, Port] | None = None
    for adapter in adapters:
        rooms = rooms_of_files(folder) if rooms is None else rooms
        check_matrices(adapter.matrices, rooms, f"The adapter {adapter.name!r}")
        place = folder / ADAPTERS
        place.mkdir(exist_ok=True)
        write_tensor_file(place / f"{adapter.name}.safetensors", adapter.matrices)
        if (folder / "genai_config.json").is_file():
            _write_for_genai(place / f"{adapter.name}.onnx_adapter", adapter.matrices)


def _write_for_genai(path: pathlib.Path, matrices: Mapping[str, torch.Tensor]) -> None:
    """Write the form of onnxruntime, which the clients of onnxruntime-genai load."""
    import onnxruntime

    def value(matrix: torch.Tensor) -> onnxruntime.OrtValue:
        if matrix.dtype == torch.bfloat16:
            bits = matrix.view(torch.uint16).numpy()
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ELEMENTS["bfloat16"].code)
        return onnxruntime.OrtValue.ortvalue_from_numpy(matrix.numpy())

    form = onnxruntime.AdapterFormat()
    form.set_adapter_version(1)
    form.set_model_version(1)
    form.set_parameters({name: value(matrix) for name, matrix in matrices.items()})
    form.export_adapter(str(path))
