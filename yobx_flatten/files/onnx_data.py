"""Read ONNX files without their weights, and list their external data files."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from ..errors import DamagedFileError
from .document import damage_as, read_bytes
from .scratch import is_data_of

if TYPE_CHECKING:
    import onnx

_LARGEST = 2**31  # bytes; protobuf reads no more


def read_onnx(path: pathlib.Path, *, failure: type[Exception]) -> onnx.ModelProto:
    """Read a file that a user or another file names, without its external data."""
    import onnx

    data = read_bytes(path, failure=failure, most=_LARGEST)
    with damage_as(failure, str(path)):
        return onnx.load_model_from_string(data)


def data_files_of(path: pathlib.Path) -> set[str]:
    """Return the names of files of data that an ONNX file refers to, if they are as this package gives them."""
    # path: the file; one that is not there, or no ONNX file, refers to nothing
    if not path.is_file():
        return set()
    try:
        graph = read_onnx(path, failure=DamagedFileError).graph
    except DamagedFileError:  # not an ONNX file
        return set()
    stored = [entry for tensor in graph.initializer for entry in tensor.external_data]
    return {entry.value for entry in stored if entry.key == "location" and is_data_of(entry.value, path)}
