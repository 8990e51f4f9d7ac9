"""Check that a folder can be written, before the export begins."""

from __future__ import annotations

import errno
import os
import pathlib
import tempfile

__all__ = ["check_writable"]


def check_writable(folder: str | os.PathLike[str], *, in_parent: bool = False) -> None:
    """Refuse a folder that cannot be made, or in which nothing can be written.

    A folder is made where this one, or the nearest that is there above it, stands, and taken away again: permissions
    alone state nothing of a disk that is read-only.
    """
    # in_parent: check the folder that holds it, where it is made under another name first
    path = pathlib.Path(folder)
    wanted = path.absolute().parent if in_parent else path.absolute()
    there = next(place for place in (wanted, *wanted.parents) if os.path.lexists(place))
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"it cannot be written: {there.name} is not a folder", str(path))
    try:
        pathlib.Path(tempfile.mkdtemp(prefix=".yobx_flatten-", dir=there)).rmdir()
    except OSError as error:
        raise OSError(error.errno, f"it cannot be written: {error.strerror or error}", str(path)) from error
