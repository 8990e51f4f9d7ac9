"""Checkpoint folders and their manifest: a new checkpoint appears atomically, and old checkpoints are removed.

::

    runs/checkpoint-00000006/                a complete checkpoint
    runs/checkpoint-00000007/
    runs/.checkpoint-00000008.writing/       being written, or left by a killed process
    runs/.checkpoint-00000005.leaving/       being deleted
    runs/.writing/                           locked by the process that writes a checkpoint

The Hugging Face Trainer names its checkpoint of optimizer step 9 ``checkpoint-9``. This checkpoint is written into the
folder ``.checkpoint-9.writing``. Before it is deleted, it is renamed to ``.checkpoint-9.leaving``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping

from yobx_flatten.core.files.document import inside, open_regular, read_document
from yobx_flatten.core.files.scratch import flush_folder, flush_tree, hold

from ..device.worker import on_error
from ..errors import CheckpointError, DamagedCheckpointError

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
    """Return the size and checksum of each file in a folder and its subfolders, by relative path."""
    # part: index of this process: it reads every `parts`-th file, starting with this one
    files = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in files[part::parts]
    }


def write_manifest(folder: pathlib.Path, files: Mapping[str, object] | None = None) -> None:
    """Write the manifest of a checkpoint, and flush all files of the checkpoint to the disk."""
    # files: what `describe_files` returned. Default: the files are read.
    described = describe_files(folder) if files is None else {name: files[name] for name in sorted(files)}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"format": _VERSION, "files": described}, file, indent=2)
    flush_tree(folder)


def is_complete(folder: pathlib.Path) -> bool:
    """Return whether each file in the checkpoint's manifest exists with the listed size; contents are not read."""
    try:
        _check_sizes(folder)
    except CheckpointError:
        return False
    return True


def verify(folder: pathlib.Path, part: int = 0, parts: int = 1) -> None:
    """Raise an error if the checksum of a file in a checkpoint differs from the checkpoint's manifest."""
    # part: index of this process: it reads every `parts`-th file, starting with this one
    for name, entry in list(_check_sizes(folder).items())[part::parts]:
        try:
            found = _digest(folder / name)
        except OSError as error:
            raise DamagedCheckpointError(f"{folder}: {name} cannot be read: {error}") from error
        if found != entry.sha256:
            raise DamagedCheckpointError(f"{folder}: {name} was changed after it was written: its SHA-256 differs.")


def _check_sizes(folder: pathlib.Path) -> dict[str, _File]:
    try:
        version = read_document(folder / MANIFEST, _Version, failure=DamagedCheckpointError).format
        if version != _VERSION:
            raise CheckpointError(f"{folder} has the unknown format {version!r}, not {_VERSION}. Update yobx-flatten.")
        files = read_document(folder / MANIFEST, _Manifest, failure=DamagedCheckpointError).files
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{folder}: {MANIFEST} is missing.") from error
    except OSError as error:
        raise DamagedCheckpointError(f"{folder}: {MANIFEST} cannot be read: {error}") from error
    if not files:
        raise DamagedCheckpointError(f"{folder}: {MANIFEST} lists no files.")
    for name, entry in files.items():
        size = inside(folder, name, DamagedCheckpointError).stat().st_size
        if size != entry.bytes:
            raise DamagedCheckpointError(f"{folder}: {name} has {size} bytes, but {entry.bytes} were written.")
    return files


def _digest(path: pathlib.Path) -> str:
    with open_regular(path, failure=DamagedCheckpointError) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_NAME = re.compile(r"checkpoint-(\d{8,})")
_LEFTOVER = re.compile(r"\.checkpoint-\d+\.(writing|leaving)")


def checkpoints_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the checkpoints in a folder, the oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def is_checkpoint(path: pathlib.Path) -> bool:
    return path.is_dir() and (_NAME.fullmatch(path.name) is not None or (path / MANIFEST).exists())


def step_of(checkpoint: pathlib.Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def next_path(folder: pathlib.Path) -> pathlib.Path:
    last = max(map(step_of, checkpoints_in(folder)), default=0)
    return folder / f"checkpoint-{last + 1:08}"


def writing_path(path: pathlib.Path) -> pathlib.Path:
    """Return the hidden path at which a checkpoint is written before it is renamed to ``path``."""
    return path.with_name(f".{path.name}.writing")


@contextlib.contextmanager
def appearing(
    path: pathlib.Path, half: pathlib.Path | None = None, *, seal: Callable[[pathlib.Path], None] = write_manifest
) -> Iterator[pathlib.Path]:
    """Yield a hidden folder that is renamed to ``path`` at the end of the with block, or removed on an exception.

    All files are flushed to the disk before the folder is renamed, so a crash never leaves a partial folder at
    ``path``. If there is an older folder at ``path``, it is removed after the new folder is at ``path``.
    """
    # half: path before the rename, on the same disk. Default: `.{name}.writing` in the same folder.
    half = half or writing_path(path)
    half.mkdir(parents=True)
    before = path.with_name(f".{path.name}.leaving")

    def undo(error: BaseException) -> None:
        shutil.rmtree(half, ignore_errors=True)
        if before.exists() and not path.exists():
            before.rename(path)

    with on_error(undo):
        yield half
        seal(half)
        # A folder cannot be replaced in one step. If the process is killed between the two renames, the new folder is
        # complete under its hidden name.
        if path.exists():
            shutil.rmtree(before, ignore_errors=True)  # a killed run may have left this folder
            path.rename(before)
        half.rename(path)
    flush_folder(path.parent)
    shutil.rmtree(before, ignore_errors=True)


@contextlib.contextmanager
def only_writer(folder: pathlib.Path) -> Iterator[None]:
    """Create a checkpoint folder if it is missing; other processes cannot save to it during the with block."""
    if not folder.is_dir():
        if file := next((one for one in (folder, *folder.parents) if one.is_file()), None):
            path = file.with_name(f"{file.stem}-checkpoints")
            raise CheckpointError(f'{file} is a file. Checkpoints need a folder:\n    save_checkpoint("{path}", model)')
        folder.mkdir(parents=True, exist_ok=True)
        flush_folder(folder.parent)
    if (let_go := hold(folder / ".writing")) is None:
        raise CheckpointError(
            f"Another process is writing a checkpoint into {folder}. Give each training its own folder."
        )
    try:
        yield
    finally:
        let_go()


def remove_leftovers(folder: pathlib.Path) -> None:
    for path in list(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def remove_old(folder: pathlib.Path, keep: int | None) -> None:
    """Remove all checkpoints that are older than the newest ``keep`` complete checkpoints; ``None`` keeps all."""
    if keep is None:
        return
    there = checkpoints_in(folder)
    complete = [path for path in there if is_complete(path)]
    for path in there[: there.index(complete[-keep])] if len(complete) >= keep else ():
        remove_checkpoint(path)


def remove_checkpoint(path: pathlib.Path) -> None:
    """Rename a checkpoint, then delete it, so that an interruption leaves no partial checkpoint under the old name."""
    leaving = path.with_name(f".{path.name}.leaving")
    path.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)
