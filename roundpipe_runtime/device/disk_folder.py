"""Open the scratch file of a training on a disk: ``host="disk:DIR"`` names the folder.

The file has no name, so nothing is left of it when the process ends, in whatever way: it is opened with ``O_TMPFILE``,
or unlinked at once where the file system has no such files.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile

from yobx_flatten.errors.messages import format_bytes

from ..errors import ConfigError

HOST_IN_MEMORY = "memory"
_PREFIX = "disk:"

# File systems whose files are memory.
_OF_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


def check_host(host: object) -> None:
    """Check the value of ``host``."""
    disk_folder(host)


def disk_folder(host: object) -> pathlib.Path | None:
    """Return the folder that ``host`` names; ``None`` for memory."""
    if host == HOST_IN_MEMORY:
        return None
    if not isinstance(host, str) or not host.startswith(_PREFIX) or not host.removeprefix(_PREFIX):
        raise ConfigError(f'host must be "memory" or "disk:DIR", like "disk:/mnt/nvme", found {host!r}.')
    return pathlib.Path(host.removeprefix(_PREFIX)).absolute()


def open_scratch(folder: pathlib.Path) -> int:
    """Return the descriptor of a new file without a name, in a folder that is on a disk."""
    host = f"{_PREFIX}{folder}"
    if not hasattr(os, "posix_fallocate") or not hasattr(os, "posix_fadvise"):
        raise ConfigError(f'host="{host}" needs Linux. Train in memory:\n    RoundPipe(model, host="memory")')
    if not folder.is_dir():
        raise ConfigError(f'host="{host}": there is no such folder. Create it:\n    mkdir -p {folder}')
    kind = _file_system(folder)
    if kind in _OF_MEMORY:
        raise ConfigError(
            f'host="{host}": {folder} is on a {kind}, which is memory. Name a folder on a disk:\n'
            '    RoundPipe(model, host="disk:DIR")'
        )
    try:
        with tempfile.TemporaryFile(prefix=".roundpipe-", dir=folder) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise ConfigError(
            f'host="{host}": {error.strerror or error}. Name a folder that can be written:\n'
            '    RoundPipe(model, host="disk:DIR")'
        ) from error


def full_disk(folder: pathlib.Path, nbytes: int, error: OSError | None = None) -> ConfigError:
    """Return the error for a disk that has no room for so many more bytes."""
    free = shutil.disk_usage(folder).free
    why = f" ({error.strerror})" if error is not None else ""
    return ConfigError(
        f"The disk of {folder} is too small for this training{why}: it takes {format_bytes(nbytes)} more there, and "
        f"{format_bytes(free)} are free. Make room, or name a folder on another disk:\n"
        '    RoundPipe(model, host="disk:DIR")'
    )


def _file_system(folder: pathlib.Path) -> str:
    """The kind of a folder's file system; empty where the system does not state it."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        text = pathlib.Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        if before.split(" ")[2:3] == [number]:
            return after.split(" ", 1)[0]
    return ""
