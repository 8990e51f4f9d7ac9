"""Flush files to the disk, with the usual permissions. Without this, a crash may leave empty files."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat


def flush_tree(folder: pathlib.Path) -> None:
    """Flush a folder and everything in it to the disk; files get the permissions of new files in their folder.

    Libraries that write through a temporary file, as safetensors does, leave one that only its owner may read.
    """
    for path in sorted([folder, *folder.rglob("*")], reverse=True):  # what is in a folder before the folder
        if path.is_symlink():
            continue
        if path.is_dir():
            flush_folder(path)
        else:
            # Windows flushes only what is opened for writing, and a file may be read-only, as its source was
            if os.name != "nt" and stat.S_IMODE(path.stat().st_mode) == 0o600:
                path.chmod(path.parent.stat().st_mode & 0o666)
            number = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)


def flush_folder(folder: pathlib.Path) -> None:
    """Flush the names in a folder to the disk."""
    with opened_folder(folder) as flush:
        flush()


class opened_folder(contextlib.AbstractContextManager["opened_folder"]):  # noqa: N801 # used like a function
    """A folder whose names can be flushed later, when no file can be opened any more."""

    def __init__(self, folder: pathlib.Path) -> None:
        # Windows opens no folders
        self._number = None if os.name == "nt" else os.open(folder, os.O_RDONLY)

    def __call__(self) -> None:
        """Flush the names."""
        if self._number is not None:
            os.fsync(self._number)

    def __exit__(self, *exception: object) -> None:
        if self._number is not None:
            os.close(self._number)
