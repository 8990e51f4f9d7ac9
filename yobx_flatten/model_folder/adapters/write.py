"""Write the matrices of adapters into an exported folder, for this package and for onnxruntime-genai."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping

import torch

from ...export.room import Adapter
from ...runners.adapters import ADAPTERS, check_matrices
from ...runners.elements import ELEMENTS
from ...runners.folder_adapters import rooms_of_files
from ...runners.ports import Port

__all__ = ["write_matrices"]


def write_matrices(folder: pathlib.Path, adapters: Iterable[Adapter], work: pathlib.Path | None = None) -> None:
    """Write adapters next to the files that take them, or into a folder ``work``."""
    from safetensors.torch import save_file

    rooms: Mapping[str, Port] | None = None
    for adapter in adapters:
        rooms = rooms_of_files(folder) if rooms is None else rooms
        check_matrices(adapter.matrices, rooms, f"The adapter {adapter.name!r}")
        place = folder / ADAPTERS if work is None else work
        place.mkdir(exist_ok=True)
        save_file(dict(adapter.matrices), place / f"{adapter.name}.safetensors")
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
