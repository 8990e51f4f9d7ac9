"""The manifest ``checkpoint.json``: files of a checkpoint, their sizes and SHA-256. It is written last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping

from yobx_flatten.files.document import inside, open_regular, read_document
from yobx_flatten.files.flush import flush_tree

from .errors import CheckpointError, DamagedCheckpointError

MANIFEST = "checkpoint.json"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class _File:
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class _Version:
    format: int


@dataclasses.dataclass(frozen=True)
class _Manifest:
    files: dict[str, _File]


def describe_files(folder: pathlib.Path, part: int = 0, parts: int = 1) -> dict[str, dict[str, object]]:
    """Return sizes and checksums of the files in a folder, and in folders in it."""
    # part: number of the files that this process reads: each `parts`-th one, from this one on
    files = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in files[part::parts]
    }


def write_manifest(folder: pathlib.Path, files: Mapping[str, object] | None = None) -> None:
    """List the files of a folder, and of folders in it, in its manifest, and wait until all of it is on the disk."""
    # files: what `describe_files` returned. Default: the files are read.
    described = describe_files(folder) if files is None else {name: files[name] for name in sorted(files)}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"format": _VERSION, "files": described}, file, indent=2)
    flush_tree(folder)


def is_complete(folder: pathlib.Path) -> bool:
    """Report whether all files exist with their sizes; their contents are not read."""
    try:
        _check_sizes(folder)
    except CheckpointError:
        return False
    return True


def verify(folder: pathlib.Path, part: int = 0, parts: int = 1) -> None:
    """Read every file of a checkpoint and compare it with what was written."""
    # part: number of the files that this process reads: each `parts`-th one, from this one on
    for name, entry in list(_check_sizes(folder).items())[part::parts]:
        try:
            found = _digest(folder / name)
        except OSError as error:
            raise DamagedCheckpointError(f"{folder}: {name} cannot be read: {error}") from error
        if found != entry.sha256:
            raise DamagedCheckpointError(f"{folder}: {name} was changed after it was written: its SHA-256 differs.")


def _check_sizes(folder: pathlib.Path) -> dict[str, _File]:
    files = _read(folder)
    for name, entry in files.items():
        size = inside(folder, name, DamagedCheckpointError).stat().st_size
        if size != entry.bytes:
            raise DamagedCheckpointError(f"{folder}: {name} has {size} bytes, and {entry.bytes} were written.")
    return files


def _read(folder: pathlib.Path) -> dict[str, _File]:
    try:
        version = read_document(folder / MANIFEST, _Version, failure=DamagedCheckpointError).format
        if version != _VERSION:
            raise CheckpointError(
                f"{folder} has format {version!r}, and {_VERSION} is the newest known. Update yobx-flatten."
            )
        files = read_document(folder / MANIFEST, _Manifest, failure=DamagedCheckpointError).files
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{folder}: {MANIFEST} is missing.") from error
    except OSError as error:
        raise DamagedCheckpointError(f"{folder}: {MANIFEST} cannot be read: {error}") from error
    if not files:
        raise DamagedCheckpointError(f"{folder}: {MANIFEST} names no file.")
    return files


def _digest(path: pathlib.Path) -> str:
    with open_regular(path, failure=DamagedCheckpointError) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
