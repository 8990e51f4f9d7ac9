"""Write the matrices of adapters into an exported folder, for this package and for onnxruntime-genai."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping

import torch

from ..errors import InvalidArgumentError
from ..errors.dependencies import require
from ..export.room import Adapter
from ..files.damage import damage_as
from ..runners.adapters import ADAPTERS, FIRST, SECOND, check_matrices
from ..runners.elements import ELEMENTS
from ..runners.ports import Port

__all__ = ["rooms_of_files", "write_matrices"]

_TYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}  # numbers of ONNX


def rooms_of_files(folder: pathlib.Path) -> dict[str, Port]:
    """Return the optional inputs that the files of a folder have for adapters, by name."""
    require("onnx", purpose="adapters of a folder", extra="onnx")
    import onnx

    found = {}
    for path in sorted(folder.glob("*.onnx")):
        with damage_as(InvalidArgumentError, str(path)):
            graph = onnx.load(str(path), load_external_data=False).graph
        held = {tensor.name for tensor in graph.initializer}
        for value in graph.input:
            if value.name in held and value.name.endswith((f".{FIRST}", f".{SECOND}")):
                kind = value.type.tensor_type
                sizes = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim)
                found[value.name] = Port(value.name, sizes, _TYPES.get(kind.elem_type))
    return found


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
