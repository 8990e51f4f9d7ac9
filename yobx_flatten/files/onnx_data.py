"""List the external data files of an ONNX file."""

from __future__ import annotations

import pathlib

from .scratch import is_data_of


def data_files_of(path: pathlib.Path) -> set[str]:
    """Return the names of files of data that an ONNX file refers to, if they are as this package gives them."""
    # path: the file; one that is not there, or no ONNX file, refers to nothing
    if not path.is_file():
        return set()
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(path, load_external_data=False).graph
    except DecodeError:  # not an ONNX file
        return set()
    stored = [entry for tensor in graph.initializer for entry in tensor.external_data]
    return {entry.value for entry in stored if entry.key == "location" and is_data_of(entry.value, path)}
