"""Store tensors in a memory-mapped file on a disk; the tensors occupy memory only while they are used."""

# tensor ──> pages of this process ──> page cache ──> file
#            `fetch`: a separate thread reads the pages from the file before they are used
#            `leave`: unmaps the pages at once; another thread writes them to the file and frees the page cache

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import math
import mmap
import os
import pathlib
import shutil
import tempfile
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import nn

from yobx_flatten.errors.failures import format_bytes

from ..errors import ConfigError
from .worker import Worker

_ALIGNMENT = 64  # bytes; tensors of at least one page are aligned to pages
_LEAST = 2**20  # bytes by which the file grows at least; a large file grows by an eighth
# bytes that are written together, since each wait for a disk takes milliseconds; as many stay in the page cache
_TOGETHER = 16 * 2**20
_BACKLOG = 256 * 2**20  # largest number of released bytes that wait to be written, so that they do not fill the memory
_GROUP = 32 * 2**20  # bytes of tensors that are read ahead together, without groups by layer


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    memory: mmap.mmap
    address: int
    offset: int
    nbytes: int


@dataclasses.dataclass(slots=True)
class _Place:
    part: _Part
    offset: int
    nbytes: int
    holder: weakref.ref[memoryview] | None = None

    @property
    def is_taken(self) -> bool:
        return self.holder is not None and self.holder() is not None


class DiskMemory:
    """Stores tensors by key in a memory-mapped scratch file."""

    def __init__(self, folder: pathlib.Path, *, together: int = _TOGETHER, backlog: int = _BACKLOG) -> None:
        self.folder = folder
        self._file = open_scratch(folder)
        self._closing = weakref.finalize(self, os.close, self._file)
        self._closing.atexit = False
        self._together, self._backlog = together, backlog
        self._users = 0
        # starts and ends in the file of released ranges that are not submitted to the writer yet
        self._written: list[tuple[int, int]] = []
        self._unchanged: list[tuple[int, int]] = []
        self._parts: list[_Part] = []  # a new list for each change, since other threads read it without the lock
        self._open: tuple[_Part, int] | None = None  # end of the used part
        self._places: dict[Hashable, _Place] = {}
        self._lock = threading.Lock()
        self._reader, self._writer = Worker("disk reader"), Worker("disk writer")
        self._writing: collections.deque[tuple[Future[None], int]] = collections.deque()
        _MEMORIES.add(self)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def reserve(self, nbytes: int) -> None:
        with self._lock:
            self._grow(nbytes)

    def empty(
        self, key: Hashable, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> torch.Tensor | None:
        """Return an uninitialised tensor on the disk, stored under a key; ``None`` if the key already has a tensor."""
        # stride: strides that leave no gaps; by default those of a contiguous tensor
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            place = self._places.get(key)
            if place is None or (place.nbytes != nbytes and not place.is_taken):
                part, at = self._open or (None, 0)
                at = _rounded(at, mmap.PAGESIZE if nbytes >= mmap.PAGESIZE else _ALIGNMENT)
                if part is None or at + nbytes > part.nbytes:
                    part, at = self._grow(max(nbytes, _LEAST, self.nbytes // 8)), 0
                self._open = part, at + nbytes
                place = self._places[key] = _Place(part, at, nbytes)
            if place.is_taken or place.nbytes != nbytes:
                return None
            held = memoryview(place.part.memory)[place.offset : place.offset + nbytes]
            place.holder = weakref.ref(held)
        # the storage keeps `held` alive as long as a tensor uses the storage
        flat = torch.frombuffer(held, dtype=torch.uint8).view(dtype)
        return flat.view(tuple(shape)) if stride is None else flat.as_strided(tuple(shape), tuple(stride))

    def copy(self, key: Hashable, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Copy a host tensor to the disk, and return the tensor on the disk."""
        place = self.next_empty(key, tensor, dtype)
        self.write(place, tensor.detach())
        return place

    def next_empty(self, key: Hashable, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialised tensor on the disk with the layout of ``like``; ``key`` may already have a tensor."""
        number = 0
        while (place := self.empty((key, number), like.shape, dtype or like.dtype, like.stride())) is None:
            number += 1  # a key has as many places as it had tensors at the same time
        return place

    def write(self, place: torch.Tensor, tensor: torch.Tensor) -> None:
        part = self._part_at(place.data_ptr())
        is_alike = tensor.dtype == place.dtype and tensor.stride() == place.stride() and tensor.device.type == "cpu"
        is_alike = is_alike and not tensor.is_conj() and not tensor.is_neg()
        if part is None or not is_alike or place.nbytes < mmap.PAGESIZE:
            place.copy_(tensor)
            return
        # not through the mapping, which would first read each page from the disk
        buffer = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
        offset, written = part.offset + place.data_ptr() - part.address, 0
        while written < len(buffer):
            written += os.pwrite(self._file, buffer[written:], offset + written)

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._part_at(tensor.data_ptr()) is not None

    def _grow(self, nbytes: int) -> _Part:
        nbytes = _rounded(max(nbytes, 1), mmap.ALLOCATIONGRANULARITY)
        offset, file = self.nbytes, self._file
        try:
            os.posix_fallocate(file, offset, nbytes)  # an error now if the disk is full, instead of SIGBUS later
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            raise ConfigError(
                f"The disk of {self.folder} is too small for this training ({error.strerror}): {format_bytes(nbytes)} "
                f"more are needed, and {format_bytes(free)} are free. Free some space, or name a folder on another "
                'disk:\n    RoundPipe(model, host="disk:DIR")'
            ) from error
        memory = mmap.mmap(file, nbytes, offset=offset)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        part = _Part(memory, address, offset, nbytes)
        self._parts = [*self._parts, part]
        self._open = part, 0
        return part

    def _part_at(self, address: int) -> _Part | None:
        return next((one for one in self._parts if one.address <= address < one.address + one.nbytes), None)

    def fetch(self, tensors: Iterable[torch.Tensor]) -> Future[None]:
        return self._reader.submit(self._read_ranges, self._ranges(tensors))

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        self._read_ranges(self._ranges(tensors))

    def _read_ranges(self, ranges: Sequence[tuple[_Part, int, int]]) -> None:
        for part, start, end in ranges:
            if fetch(start, end):
                continue
            # a kernel without `MADV_POPULATE_READ`: read the range of the file into the page cache
            offset, buffer = part.offset + start - part.address, bytearray(min(end - start, _LEAST))
            for at in range(offset, offset + end - start, len(buffer)):
                os.preadv(self._file, [buffer], at)

    def leave(self, tensors: Iterable[torch.Tensor], *, written: bool = True) -> None:
        # written: whether the tensors may have changed since the last `leave`
        of_file = []
        for part, start, end in self._ranges(tensors):
            # the pages leave this process; written data stays in the page cache
            _libc().madvise(start, end - start, mmap.MADV_DONTNEED)
            of_file.append((part.offset - part.address + start, part.offset - part.address + end))
        with self._lock:
            kind = self._written if written else self._unchanged
            kind += of_file
            if sum(end - start for start, end in kind) < self._together:
                return
            self._begin_writing()
        self._wait(self._backlog)

    def _begin_writing(self) -> None:
        written, unchanged = self._written, self._unchanged
        self._written, self._unchanged = [], []
        writing = self._writer.submit(self._write, written, unchanged)
        self._writing.append((writing, sum(end - start for start, end in written)))

    def settle(self) -> None:
        with self._lock:
            self._begin_writing()
        self._wait(-1)

    def _wait(self, most: int) -> None:
        """Wait until at most ``most`` bytes remain to be written to the disk; -1 waits until all writes have ended."""
        while True:
            with self._lock:
                waiting = sum(nbytes for _, nbytes in self._writing)
                if not self._writing or (waiting <= most and not self._writing[0][0].done()):
                    return
                oldest, _ = self._writing.popleft()
            oldest.result()

    def _write(self, written: Sequence[tuple[int, int]], unchanged: Sequence[tuple[int, int]]) -> None:
        file = self._file
        for start, end in _joined(written):
            write_out(file, start, end - start)
        for start, end in _joined([*written, *unchanged]):
            os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)  # unwritten pages stay
        return_freed()

    def _ranges(self, tensors: Iterable[torch.Tensor]) -> list[tuple[_Part, int, int]]:
        held = [tensor for tensor in tensors if tensor.numel() and self.holds(tensor)]
        found = []
        for start, end in pages_of(held):
            part = self._part_at(start)
            while part is not None and start < end:  # parts may be adjacent in memory
                stop = min(end, part.address + part.nbytes)
                found.append((part, start, stop))
                start, part = stop, self._part_at(stop)
        return found

    def acquire(self) -> None:
        with self._lock:
            self._users += 1

    def close(self) -> None:
        """End one use of this disk memory; after the last use, the threads end and the scratch file is closed."""
        with self._lock:
            self._users -= 1
            if self._users > 0 or self._writer.is_closed:
                return
        with contextlib.suppress(OSError):  # nothing reads the file any more
            self.settle()
        self._reader.close()
        self._writer.close()
        self._parts = []
        self._closing()  # mappings keep the file until the last tensor is deleted
        _MEMORIES.discard(self)


_MEMORIES: weakref.WeakSet[DiskMemory] = weakref.WeakSet()
_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, DiskMemory] = weakref.WeakKeyDictionary()


def disk_of(tensor: torch.Tensor) -> DiskMemory | None:
    if not _MEMORIES or type(tensor.data) is not torch.Tensor or tensor.device.type != "cpu":
        return None
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    return next((memory for memory in list(_MEMORIES) if memory.holds(tensor)), None)


def leave(tensors: Iterable[torch.Tensor], *, written: bool = False) -> None:
    for tensor in tensors:
        if (memory := disk_of(tensor)) is not None:
            memory.leave([tensor], written=written)


def keep_with(model: nn.Module, memory: DiskMemory) -> None:
    _OF_MODELS[model] = memory


def in_groups(tensors: Iterable[torch.Tensor], nbytes: int = _GROUP) -> list[list[torch.Tensor]]:
    groups: list[list[torch.Tensor]] = []
    size = nbytes
    for tensor in tensors:
        if size >= nbytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def passing(groups: Sequence[Sequence[torch.Tensor]], *, written: bool) -> Iterator[int]:
    """Load groups of tensors from disk one after the other, and yield the index of the group that is in memory."""
    memory = next((found for group in groups for tensor in group if (found := disk_of(tensor)) is not None), None)
    if memory is None:
        yield from range(len(groups))
        return
    ahead = memory.fetch(groups[0])
    for number, group in enumerate(groups):
        ahead.result()
        if number + 1 < len(groups):
            ahead = memory.fetch(groups[number + 1])
        try:
            yield number
        finally:
            memory.leave(group, written=written)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges of bytes that touch or overlap: two tensors may lie on the same page of memory."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


HOST_IN_MEMORY = "memory"
_PREFIX = "disk:"
_OF_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")  # file systems in memory


def disk_folder(host: object) -> pathlib.Path | None:
    """Return the folder ``DIR`` of an argument ``host="disk:DIR"``; ``None`` for ``host="memory"``."""
    if host == HOST_IN_MEMORY:
        return None
    if not isinstance(host, str) or not host.startswith(_PREFIX) or not host.removeprefix(_PREFIX):
        raise ConfigError(f'host must be "memory" or "disk:DIR", like "disk:/mnt/nvme", found {host!r}.')
    return pathlib.Path(host.removeprefix(_PREFIX)).absolute()


def open_scratch(folder: pathlib.Path) -> int:
    host = f"{_PREFIX}{folder}"
    if not hasattr(os, "posix_fallocate") or not hasattr(os, "posix_fadvise"):
        raise ConfigError(f'host="{host}" needs Linux. Train in memory:\n    RoundPipe(model, host="memory")')
    if not folder.is_dir():
        raise ConfigError(f'The folder of host="{host}" does not exist. Create the folder:\n    mkdir -p {folder}')
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


def _file_system(folder: pathlib.Path) -> str:
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        text = pathlib.Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = (line.partition(" - ") for line in text.splitlines())
    return next((after.split(" ", 1)[0] for before, _, after in lines if before.split(" ")[2:3] == [number]), "")


# Constants of Linux that the module mmap lacks.
_PAGE_OUT, _POPULATE_READ = 21, 22
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


# Pages of mapped memory: read ahead, release from this process, write to the disk, and drop from the page cache.
#
# The calls never change the contents of pages, so they are safe at any time and in any thread.


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if hasattr(library, "sync_file_range"):
        library.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return library


def pages_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    size, held = mmap.PAGESIZE, [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    return _joined((start // size * size, _rounded(start + nbytes, size)) for start, nbytes in held if nbytes)


def fetch(start: int, end: int) -> bool:
    """Read the mapped pages of an address range from the disk; return ``False`` on Linux older than 5.14."""
    return int(_libc().madvise(start, end - start, _POPULATE_READ)) == 0


def page_out(tensor: torch.Tensor) -> None:
    """Remove the pages of a tensor from memory; unchanged pages of a mapped file are not written."""
    if hasattr(mmap, "MADV_DONTNEED"):  # Linux, on which _PAGE_OUT is defined
        for start, end in pages_of([tensor]):
            _libc().madvise(start, end - start, _PAGE_OUT)


def write_out(file: int, offset: int, nbytes: int) -> None:
    library = _libc()
    if not hasattr(library, "sync_file_range"):
        os.fdatasync(file)
    elif library.sync_file_range(file, offset, nbytes, _WAIT_BEFORE | _WRITE | _WAIT_AFTER):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def return_freed() -> None:
    """Return freed memory to the system: glibc keeps freed memory of tensors of up to 32 MiB for itself."""
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)
