"""Read and check untrusted JSON, safetensors and ONNX files, and write safetensors files."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pathlib
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from ...errors import DamagedFileError, FlattenError, require
from ...errors.failures import first_line, raised_as, undone_on_failure
from .scratch import is_data_of

if TYPE_CHECKING:
    import onnx
    import torch

T = TypeVar("T")

# patterns of files next to weights that are read as text or by a tokenizer, and may be copied
TEXTS = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")
_LARGEST = 2**30  # bytes; a tokenizer with 260,000 tokens has 35 million
# transformers 5 writes numbers that JSON does not have as {"__float__": "Infinity"}
_TAGGED = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def damage_as(failure: type[Exception], where: str, *own: type[Exception]) -> contextlib.AbstractContextManager[None]:
    """In a ``with`` block, convert errors that a reader raises for a damaged file to the class ``failure``."""

    # safetensors, protobuf and torch raise many classes for inconsistent data; a lack of memory stays as it is
    def damaged(error: BaseException) -> Exception:
        return failure(f"{where} is damaged ({type(error).__name__}: {first_line(error)}).")

    return raised_as(damaged, FlattenError, OSError, MemoryError, *own)


def open_regular(path: pathlib.Path, *, failure: type[Exception], most: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading; refuse a folder, a device, a pipe or a file above the size limit."""
    # the open file is checked, since another process could replace the file; `O_NONBLOCK`: a pipe does not block
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with undone_on_failure(lambda: os.close(number)):
        _check(os.fstat(number), path, failure, most)
        return os.fdopen(number, "rb")


def read_bytes(path: pathlib.Path, *, failure: type[Exception], most: int = _LARGEST) -> bytes:
    with open_regular(path, failure=failure, most=most) as file:
        return file.read()


def read_text(path: pathlib.Path, *, failure: type[Exception], most: int = _LARGEST) -> str:
    try:
        return read_bytes(path, failure=failure, most=most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise failure(f"{path} is not a text in UTF-8 ({error.reason}).") from error


def read_document(
    path: pathlib.Path,
    form: type[T],
    *,
    failure: type[Exception],
    remedy: str = "",
    finite: bool = True,
    kind: str = "",
) -> T:
    # form: the expected type: a dataclass, or a type such as `dict[str, float]`
    # finite: whether to refuse `Infinity` and `NaN`, which transformers configurations may contain
    # kind: the kind of file, for the message about a file that does not begin like JSON
    text = read_bytes(path, failure=failure)
    if kind and text.strip() and text.lstrip()[:1] not in b"{[":
        raise failure(f"{path} is not a {kind}.{remedy and ' '}{remedy}")
    return parse_document(text, form, str(path), failure=failure, remedy=remedy, finite=finite)


def read_configuration(path: pathlib.Path, form: type[T], *, failure: type[Exception], remedy: str = "") -> T:
    """Read a JSON configuration; accept infinity and NaN, as plain numbers or in the format of transformers 5."""
    # `read_document` does not convert the numbers, so that a changed configuration can be written in the same form

    def untagged(entries: dict[str, Any]) -> Any:
        tag = entries.get("__float__")
        return _TAGGED[tag] if len(entries) == 1 and isinstance(tag, str) and tag in _TAGGED else entries

    how: dict[str, Any] = {"failure": failure, "remedy": remedy, "finite": False, "object_hook": untagged}
    return parse_document(read_bytes(path, failure=failure), form, str(path), **how)


def parse_document(
    text: str | bytes,
    form: type[T],
    where: str,
    *,
    failure: type[Exception],
    remedy: str = "",
    finite: bool = True,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
) -> T:
    how: dict[str, Any] = {"parse_float": _finite, "parse_constant": _finite} if finite else {}
    require("msgspec", purpose=f"reading {where}")
    import msgspec

    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        # msgspec's parser refuses half a surrogate pair ("\\ud800"), which texts may contain
        return msgspec.convert(json.loads(text, object_hook=object_hook, **how), form)
    except RecursionError:
        what = "it is nested too deeply"
    except msgspec.MsgspecError as error:
        what = str(error)
    except ValueError as error:  # invalid JSON, invalid text, or an invalid number
        if text and text.lstrip()[:1] not in ("{", "[", b"{", b"["):  # not a JSON document
            raise failure(f"{where} is not a JSON file: it begins with {text[:8]!r}.{remedy and ' '}{remedy}") from None
        what = f"it is not JSON ({error})" if text else "it is empty"
    raise failure(f"{where} is damaged: {what}.{remedy and ' '}{remedy}")


def _finite(number: str) -> float:
    found = float(number)
    if not math.isfinite(found):
        raise ValueError(f"{number} is not a finite number")
    return found


def inside(folder: pathlib.Path, name: object, failure: type[Exception]) -> pathlib.Path:
    """Return the path of a file that a JSON document names; refuse paths outside of the folder of the document."""
    parts = pathlib.PurePosixPath(name).parts if isinstance(name, str) else ()
    # on Windows, a backslash or a drive leads to another folder; no file name contains a zero byte
    if not parts or parts[0] == "/" or ".." in parts or any(sign in part for part in parts for sign in "\\:\0"):
        raise failure(f"A JSON file in {folder} names the file {name!r}, which is not in the folder.")
    path = folder.joinpath(*parts)
    try:
        check_regular(path, failure)
    except (FileNotFoundError, NotADirectoryError):
        raise failure(f"A JSON file in {folder} names the file {name!r}, which does not exist.") from None
    return path


def own_files(folder: pathlib.Path, patterns: Iterable[str], failure: type[Exception]) -> list[pathlib.Path]:
    """Return the files of an untrusted folder that match the patterns; refuse links that lead outside of the folder."""
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    for path in found:
        check_own(path, folder, failure)
    return found


def check_own(path: pathlib.Path, folder: pathlib.Path, failure: type[Exception]) -> None:
    """Raise ``failure`` if a link in an untrusted folder leads to a file outside of the folder."""
    if path.is_symlink() and not path.exists():
        raise failure(f"{path} is a link that leads to no file. Remove it.")
    check_regular(path, failure, _LARGEST)
    real, root = path.resolve(), folder.resolve()
    # the Hub's cache has links: `models--owner--name/snapshots/REVISION/file -> ../../blobs/DIGEST`
    if not real.is_relative_to(root) and real.parent != root.parent.parent / "blobs":
        raise failure(
            f"{path} is a link to {real}, which is outside of the folder. The export could copy the contents of the "
            "linked file. Replace the link by the file itself, or remove it."
        )


def check_regular(path: pathlib.Path, failure: type[Exception], most: int | None = None) -> None:
    """Refuse a path that is not a regular file, such as a pipe; links, as in the Hub's cache, are followed."""
    # most: the largest number of bytes; no limit by default
    _check(os.stat(path), path, failure, most)


def _check(found: os.stat_result, path: pathlib.Path, failure: type[Exception], most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise failure(f"{path} is not a regular file.")
    if most is not None and found.st_size > most:
        raise failure(f"{path} has {found.st_size / 1e6:.0f} MB, and the limit for such files is {most / 1e6:.0f} MB.")


@contextlib.contextmanager
def opened_tensors(path: pathlib.Path, *, failure: type[Exception]) -> Iterator[Any]:
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
    """Write tensors, which must not share memory, to a safetensors file; raise an OSError if the write fails."""
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
    """Yield a new file to which torch writes. If writing fails, the ``with`` block raises when it ends."""
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


_LARGEST_ONNX = 2**31  # bytes; protobuf reads no more


def read_onnx(path: pathlib.Path, *, failure: type[Exception]) -> onnx.ModelProto:
    """Read an ONNX file without its external data; raise ``failure`` if the file is damaged."""
    import onnx

    data = read_bytes(path, failure=failure, most=_LARGEST_ONNX)
    with damage_as(failure, str(path)):
        return onnx.load_model_from_string(data)


def data_files_of(path: pathlib.Path) -> set[str]:
    """Return the names of an ONNX file's external data files, if the names have the form that this package writes."""
    if not path.is_file():  # no file, or one that is not ONNX, refers to no files
        return set()
    try:
        graph = read_onnx(path, failure=DamagedFileError).graph
    except DamagedFileError:
        return set()
    stored = [entry for tensor in graph.initializer for entry in tensor.external_data]
    return {entry.value for entry in stored if entry.key == "location" and is_data_of(entry.value, path)}
