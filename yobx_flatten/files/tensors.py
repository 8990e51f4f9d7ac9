"""Write tensor files, and read untrusted tensor files and ONNX files."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from ..errors import DamagedFileError
from ..errors.failures import first_line
from .document import damage_as, open_regular, read_bytes
from .scratch import is_data_of

if TYPE_CHECKING:
    import onnx


@contextlib.contextmanager
def opened_tensors(path: pathlib.Path, *, failure: type[Exception]) -> Iterator[Any]:
    """In a ``with`` block, open a file as ``safetensors.safe_open`` does; raise ``failure`` if it is damaged."""
    from safetensors import SafetensorError, safe_open

    with open_regular(path, failure=failure) as file:
        if file.read(9)[8:] not in (b"{", b""):  # the JSON follows eight bytes with its length
            raise failure(f"{path} is not a safetensors file.")
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise failure(f"{path} is damaged (SafetensorError: {first_line(error)}).") from error


def read_tensors(path: pathlib.Path, *, failure: type[Exception]) -> dict[str, torch.Tensor]:
    """Read all tensors of a safetensors file; the tensors are memory-mapped."""
    with opened_tensors(path, failure=failure) as file, damage_as(failure, str(path)):
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # it is not a mapping


def write_tensor_file(
    path: pathlib.Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors that share no memory to a safetensors file; raise an OSError if the write fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:  # "... (os error 28)"
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise OSError(f"{path} could not be written: {error}") from error
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


@contextlib.contextmanager
def file_for_torch(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a new file whose writes never fail; the first error is raised at the end of the ``with`` block."""
    # torch's archive writer also writes in its C++ destructor, where an error would end the process
    with _Lenient(path, "wb") as file:
        try:
            yield file
        finally:
            if file.failure is not None:
                raise file.failure


class _Lenient(io.FileIO):
    """A file that stores the first error of a write, and drops all later data."""

    failure: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override] # what torch passes
        left = memoryview(data)
        try:
            while self.failure is None and len(left):
                left = left[super().write(left) :]
        except BaseException as error:  # Ctrl-C would also end the process
            self.failure = error
        return len(data)


_LARGEST = 2**31  # bytes; protobuf reads no more


def read_onnx(path: pathlib.Path, *, failure: type[Exception]) -> onnx.ModelProto:
    """Read an ONNX file without its external data; raise ``failure`` if the file is damaged."""
    import onnx

    data = read_bytes(path, failure=failure, most=_LARGEST)
    with damage_as(failure, str(path)):
        return onnx.load_model_from_string(data)


def data_files_of(path: pathlib.Path) -> set[str]:
    """Return the names of data files that an ONNX file refers to, if they match the names of this package."""
    # a missing file, or a file that is not ONNX, refers to no files
    if not path.is_file():
        return set()
    try:
        graph = read_onnx(path, failure=DamagedFileError).graph
    except DamagedFileError:
        return set()
    stored = [entry for tensor in graph.initializer for entry in tensor.external_data]
    return {entry.value for entry in stored if entry.key == "location" and is_data_of(entry.value, path)}
