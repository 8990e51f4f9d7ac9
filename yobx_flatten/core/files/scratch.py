"""Write a file or folder under a hidden name, and rename it when it is complete.

If a process is killed while it writes, its hidden folder remains, without a lock. The next process that writes or opens
the same target moves the new files into place if they are complete, and removes the hidden folder.
"""

# runs/model.onnx                          always complete
# runs/.model.onnx.writing-x7_k2/          what one process writes
#     lock/held                            locked until the process ends
#     new/                                 the new files
#     others                               names of files that are moved next to the target, before the target
#     stale                                names of files that the new target no longer refers to
#     old/                                 the former folder, during the two renames that replace it

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import os
import pathlib
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from ...errors import StoredFileError
from ...errors.failures import undone_on_failure

if TYPE_CHECKING:
    from filelock import BaseFileLock

_LOCK = "lock/held"  # filelock creates the parent folder of its file, and must not recreate the hidden folder
_NEW, _OLD, _OTHERS, _STALE = "new", "old", "others", "stale"


@contextlib.contextmanager
def scratch_for(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield an empty hidden folder next to the target; remove the hidden folder after the ``with`` block."""
    target.parent.mkdir(parents=True, exist_ok=True)
    settle(target)
    lock = None
    while lock is None:  # until no other process removes the folder as a leftover before the lock is acquired
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.writing-", dir=target.parent))
        with undone_on_failure(functools.partial(shutil.rmtree, folder, ignore_errors=True)):
            lock = _lock_of(folder)
        if lock is not None:
            try:
                (folder / _NEW).mkdir()
            except FileNotFoundError:
                lock.release()
                lock = None
    try:
        yield folder / _NEW
    finally:
        if target.exists() or not (folder / _OLD).exists():  # the only copy of a former folder is not removed
            _remove(folder, lock)
        lock.release()


def check_writable(target: str | os.PathLike[str], *, in_parent: bool = True) -> None:
    """Raise an error if a file or folder cannot be written; call the function before a long computation."""
    # a trial folder is created and removed, since the permissions of a folder do not show a read-only disk
    # in_parent: whether to check the parent folder, where the target is first written under a hidden name
    import psutil

    path = pathlib.Path(target)
    wanted = path.absolute().parent if in_parent else path.absolute()
    there = next(place for place in (wanted, *wanted.parents) if os.path.lexists(place))
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"it cannot be written: {there.name} is not a folder", str(path))
    if in_parent and os.fspath(path.resolve()) in {part.mountpoint for part in psutil.disk_partitions(all=True)}:
        raise OSError(
            errno.EBUSY, "it is a mount point, which cannot be replaced. Name a folder in the mount point", str(path)
        )
    try:
        pathlib.Path(tempfile.mkdtemp(prefix=".trial-", dir=there)).rmdir()
    except OSError as error:
        raise OSError(error.errno, f"it cannot be written: {error.strerror or error}", str(path)) from error


def data_path(written: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Return an unused path for the external data of an ONNX file, such as ``model.onnx.data``."""
    # an existing file keeps its own data until the file itself is replaced
    name = f"{target.name}.data"
    if target.exists() or (target.parent / name).exists():
        name = f"{target.name}.{secrets.token_hex(4)}.data"
    return written.with_name(name)


def is_data_of(name: str, target: pathlib.Path) -> bool:
    """Return whether a name is one that :func:`data_path` gives to the external data of ``target``."""
    return re.fullmatch(re.escape(target.name) + r"(\.[0-9a-f]{8})?\.data", name) is not None


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yield a temporary path; the file is moved to ``path`` at the end of the ``with`` block, except after an error."""
    target = pathlib.Path(path)
    if target.exists() and not target.is_file():  # /dev/stdout and pipes are written directly
        yield target
        return
    with scratch_for(target) as folder:
        yield folder / target.name
        publish_files(folder, target)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text file atomically: after an error, the former file is unchanged."""
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")


def copy_links(folder: pathlib.Path, to: pathlib.Path) -> None:
    """Hard-link the files of a folder into another folder; copy files that cannot be linked."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)

    left = shutil.ignore_patterns(".*.writing-*")
    shutil.copytree(folder, to, symlinks=True, dirs_exist_ok=True, copy_function=link, ignore=left)


def hold(folder: pathlib.Path) -> Callable[[], None] | None:
    """Lock a hidden folder; return a function that removes the folder, or ``None`` if another process has the lock."""
    folder.mkdir(exist_ok=True)
    lock = _lock_of(folder)
    if lock is None:
        return None

    def let_go() -> None:
        _remove(folder, lock)
        lock.release()

    return let_go


def publish_files(new: pathlib.Path, target: pathlib.Path, stale: Collection[str] = ()) -> None:
    """Move files to their final paths, the target file last, and remove the files named in ``stale``."""
    others = [file.name for file in sorted(new.iterdir()) if file.name != target.name]
    for name, files in ((_OTHERS, others), (_STALE, stale)):
        (new.parent / name).write_text("\n".join(files), encoding="utf-8")
    flush_tree(new.parent)
    moved: list[str] = []
    with opened_folder(target.parent) as flush:
        with undone_on_failure(lambda: _unlink(target.parent, moved)):
            for name in others:
                os.replace(new / name, target.parent / name)
                moved.append(name)
            flush()
            os.replace(new / target.name, target)
        # the new file is in place: later failures need no error
        with contextlib.suppress(OSError):
            flush()
    _unlink(target.parent, stale)


def publish_folder(new: pathlib.Path, target: pathlib.Path) -> None:
    """Rename a folder to its final name, replacing a folder of that name."""
    flush_tree(new.parent)
    old = new.parent / _OLD
    with opened_folder(target.parent) as flush:
        if target.exists():
            os.replace(target, old)
        try:
            os.replace(new, target)
        except OSError as error:
            if old.exists() and not target.exists():
                try:
                    os.replace(old, target)
                except OSError:
                    left = (
                        f"the former contents of {target} are in {old} until {target.name} is written or opened again"
                    )
                    raise OSError(error.errno, f"{error.strerror}; {left}") from error
            raise
        with contextlib.suppress(OSError):
            flush()


def move_in(new: pathlib.Path, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(new.iterdir()):
        os.replace(file, folder / file.name)


def settle(target: pathlib.Path) -> None:
    """Finish or undo writes of ``target`` by processes that were killed; skip writes of running processes."""
    for left in _left_of(target):
        try:
            lock = _lock_of(left)
        except OSError:
            continue  # a read-only disk, or too many open files; the next process tries again
        if lock is None:
            continue  # another process writes to this folder
        try:
            new, old = left / _NEW, left / _OLD
            if old.is_dir() and not target.exists():  # its complete replacement is ready
                os.replace(new if new.is_dir() else old, target)
            # a write that ended before the last rename leaves new data without a file; after the rename, the old data
            # is unused
            names = left / (_OTHERS if (new / target.name).exists() else _STALE)
            listed = names.read_text(encoding="utf-8", errors="replace").split("\n") if names.is_file() else []
            # the list is untrusted, so it can only remove files with names from `data_path`
            unused = [name for name in listed if is_data_of(name, target) and not (new / name).exists()]
            _unlink(target.parent, unused)
            _remove(left, lock)
        finally:
            lock.release()


def is_folder(path: pathlib.Path) -> bool:
    """Return whether a folder exists, after restoring the folder if a process was killed while replacing it."""
    if not path.exists() and path.name:
        reason = ""
        try:
            settle(path)
        except OSError as error:
            reason = f" ({error})"
        hidden = [left / _OLD for left in _left_of(path) if (left / _OLD).is_dir()]
        if hidden and not path.exists():
            raise StoredFileError(
                f"A process is replacing {path}, or was killed during the replacement{reason}. Try again when no "
                f"process writes there. The former contents are in {hidden[0]}."
            )
    return path.is_dir()


def _left_of(target: pathlib.Path) -> list[pathlib.Path]:
    pattern = f".{glob.escape(target.name)}.writing-*"
    return [path for path in sorted(target.parent.glob(pattern)) if path.is_dir() and not path.is_symlink()]


def _remove(folder: pathlib.Path, lock: BaseFileLock) -> None:
    # the caller holds the lock, so that no other process writes to the folder
    if os.name == "nt":  # Windows cannot remove an open file
        lock.release()
    # The lock is removed last: after its removal, another process can acquire a new lock and write to this folder.
    above = folder / pathlib.PurePath(_LOCK).parts[0]
    with contextlib.suppress(OSError):
        for path in [*folder.iterdir()]:
            if path.is_dir() and not path.is_symlink() and path != above:
                shutil.rmtree(path, ignore_errors=True)
            elif path != above:
                path.unlink(missing_ok=True)
    shutil.rmtree(above, ignore_errors=True)
    with contextlib.suppress(OSError):  # another thread or process has started to use the folder
        folder.rmdir()


def _unlink(folder: pathlib.Path, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _lock_of(folder: pathlib.Path) -> BaseFileLock | None:
    """Acquire the lock of a hidden folder; return ``None`` if another process has the lock or removed the folder."""
    import filelock

    lock = filelock.FileLock(folder / _LOCK, timeout=0, thread_local=False, is_singleton=False)
    try:
        lock.acquire()
    except (filelock.Timeout, FileNotFoundError, FileExistsError):  # the latter two: another process removes the folder
        return None
    if (folder / _LOCK).exists():
        return lock
    lock.release()
    return None


def flush_tree(folder: pathlib.Path) -> None:
    """Flush a folder and everything inside the folder to the disk."""
    for path in sorted([folder, *folder.rglob("*")], reverse=True):  # the contents of a folder before the folder itself
        if path.is_symlink():
            continue
        if path.is_dir():
            flush_folder(path)
        else:
            # safetensors writes through a temporary file, which only its owner may read
            # Windows flushes only files that are open for writing, and a copied file may be read-only
            if os.name != "nt" and stat.S_IMODE(path.stat().st_mode) == 0o600:
                path.chmod(path.parent.stat().st_mode & 0o666)
            number = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)


def flush_folder(folder: pathlib.Path) -> None:
    with opened_folder(folder) as flush:
        flush()


@contextlib.contextmanager
def opened_folder(folder: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Open a folder, and yield a function that flushes the folder's list of file names to the disk."""
    if os.name == "nt":  # Windows opens no folders
        yield lambda: None
        return
    number = os.open(folder, os.O_RDONLY)  # before files are moved: later there may be no free file descriptor
    try:
        yield functools.partial(os.fsync, number)
    finally:
        os.close(number)
