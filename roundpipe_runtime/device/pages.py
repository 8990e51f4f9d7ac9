"""Pages of mapped memory: read ahead, release from this process, write to the disk, and drop from the page cache.

Each call changes where pages are and never what they hold, so it is right at any time and in any thread.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Iterable

import torch

# Constants of Linux that the mmap module does not have.
_PAGE_OUT, _POPULATE_READ = 21, 22
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if hasattr(library, "sync_file_range"):
        library.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return library


def ranges_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the addresses of whole pages that contain tensors, as ``(start, end)``; adjacent ones are joined."""
    size = mmap.PAGESIZE
    found: list[tuple[int, int]] = []
    for start, nbytes in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        first, end = start // size * size, -(-(start + nbytes) // size) * size
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > first:
            found.append((first, end))
    return found


def fetch(start: int, end: int) -> bool:
    """Read pages from the disk and map them; report whether the kernel can do so (Linux 5.14)."""
    return int(_libc().madvise(start, end - start, _POPULATE_READ)) == 0


def release(start: int, end: int) -> None:
    """Remove pages of a shared file mapping from this process; written data stays in the page cache."""
    _libc().madvise(start, end - start, mmap.MADV_DONTNEED)


def page_out(tensor: torch.Tensor) -> None:
    """Remove the pages of a tensor from memory, whatever it is; of a file that was only read, nothing is written."""
    if hasattr(mmap, "MADV_DONTNEED"):  # of any other kernel it is not known what the number means
        for start, end in ranges_of([tensor]):
            _libc().madvise(start, end - start, _PAGE_OUT)


def write_out(file: int, offset: int, nbytes: int) -> None:
    """Write the changed pages of a part of a file to the disk, and wait for it."""
    library = _libc()
    if not hasattr(library, "sync_file_range"):
        os.fdatasync(file)
    elif library.sync_file_range(file, offset, nbytes, _WAIT_BEFORE | _WRITE | _WAIT_AFTER):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def drop_cached(file: int, offset: int, nbytes: int) -> None:
    """Drop pages of a part of a file from the page cache, except unwritten pages."""
    os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_DONTNEED)


def return_freed() -> None:
    """Return freed memory to the system, as glibc keeps that of tensors up to 32 MiB."""
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)
