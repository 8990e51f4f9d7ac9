"""Tests of roundpipe_runtime.device.disk: tensors of a file, of which memory has what is used."""

import errno
import os
import pathlib
import threading

import pytest
import torch

from roundpipe_runtime import ConfigError
from roundpipe_runtime.device import disk
from roundpipe_runtime.device.disk import DiskMemory, disk_of, in_groups, passing

MIB = 2**20


@pytest.fixture
def memory(folder_on_disk):
    made = DiskMemory(folder_on_disk, together=1)
    yield made
    made.close()


def resident() -> int:
    """Bytes of files that are mapped and resident in this process."""
    text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(text.partition("RssFile:")[2].split()[0])


def failing(number):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    return fails


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_copy_holds_the_numbers(memory, dtype):
    for number, tensor in enumerate([torch.arange(5), torch.arange(70_000), torch.arange(6000).reshape(60, 100).T]):
        copy = memory.copy(("a", number), tensor.to(dtype))
        assert torch.equal(copy, tensor.to(dtype))
        assert copy.stride() == tensor.stride()
        assert disk_of(copy) is memory
        assert disk_of(tensor) is None


def test_what_was_left_is_read_again_also_by_a_kernel_without_the_request(memory, monkeypatch):
    """Linux before 5.14 refuses the request: the file is read into the page cache instead."""
    tensor = memory.copy(("a",), torch.zeros(16 * MIB))
    before = resident()
    tensor.fill_(3.0)
    assert resident() - before > 60 * MIB
    memory.leave([tensor])
    assert resident() - before < 4 * MIB
    memory.settle()
    memory.fetch([tensor]).result()
    assert tensor.eq(3.0).all()
    tensor.add_(1.0)
    memory.leave([tensor])
    memory.settle()
    assert tensor.eq(4.0).all()
    tensor = memory.copy(("a",), torch.arange(MIB))
    memory.leave([tensor])
    memory.settle()
    monkeypatch.setattr(disk, "fetch", lambda start, end: False)
    memory.fetch([tensor]).result()
    assert torch.equal(tensor, torch.arange(MIB))


def test_a_place_is_free_when_its_tensor_is_gone_and_groups_pass_one_after_the_other(memory):
    first = memory.copy(("a",), torch.ones(3000))
    assert list(memory.folder.iterdir()) == []  # so nothing is left when the process is killed
    assert memory.nbytes >= first.nbytes
    second = memory.copy(("a",), torch.full((3000,), 2.0))
    assert first.eq(1.0).all()
    address = first.data_ptr()
    del first
    assert memory.copy(("a",), torch.full((3000,), 3.0)).data_ptr() == address
    assert second.eq(2.0).all()
    tensors = [memory.copy(("a", number), torch.full((MIB,), float(number))) for number in range(5)]
    groups = in_groups([*tensors, torch.full((3,), 5.0)], nbytes=8 * MIB)
    assert list(map(len, groups)) == [2, 2, 2]
    seen = [tensor.mean().item() for number in passing(groups, written=False) for tensor in groups[number]]
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_threads_may_leave_what_others_use(memory):
    tensors = [memory.copy(("a", number), torch.zeros(5000)) for number in range(2)]
    ended = threading.Event()

    def count(tensor):
        for _ in range(200):
            tensor.add_(1.0)

    def leave():
        while not ended.is_set():
            memory.leave(tensors)

    counting = [threading.Thread(target=count, args=[tensor]) for tensor in tensors]
    leaving = threading.Thread(target=leave)
    for thread in [leaving, *counting]:
        thread.start()
    for thread in counting:
        thread.join()
    ended.set()
    leaving.join()
    assert all(tensor.eq(200.0).all() for tensor in tensors)


def test_the_last_user_closes_it_and_tensors_outlive_it(folder_on_disk):
    memory = DiskMemory(folder_on_disk)
    memory.acquire()
    memory.acquire()
    tensor = memory.copy(("a",), torch.arange(MIB))
    memory.close()
    assert disk_of(tensor) is memory
    memory.close()
    assert disk_of(tensor) is None
    memory.close()
    assert torch.equal(tensor, torch.arange(MIB))


def test_a_full_disk_is_one_line_and_an_error_of_the_disk_is_raised(folder_on_disk, monkeypatch, memory):
    """The file grows before anything is written into it: a mapped page without room would be a signal."""
    full = DiskMemory(folder_on_disk)
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(ConfigError, match=r"No space left on device\): 4\.\d+ MB more are needed.*\n.*disk:DIR"):
        full.copy(("a",), torch.ones(MIB))
    full.close()
    monkeypatch.undo()
    tensor = memory.copy(("a",), torch.ones(MIB))
    monkeypatch.setattr(disk, "write_out", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):  # noqa: PT012 # by either of the two
        memory.leave([tensor])
        memory.settle()
    monkeypatch.undo()


def test_any_other_place_is_refused(tmp_path, monkeypatch):
    """A tmpfs has the capacity of the memory that is to be saved; other systems have none of the calls."""
    for host in ("disk", "disk:", "ssd:/tmp", None):
        with pytest.raises(ConfigError, match=r'host must be "memory" or "disk:DIR"'):
            disk.disk_folder(host)
    with pytest.raises(ConfigError, match=r"does not exist\. Create the folder:\n    mkdir -p .*nowhere"):
        DiskMemory(tmp_path / "nowhere")
    shared = pathlib.Path("/dev/shm")
    if shared.is_dir() and disk._file_system(shared) == "tmpfs":
        with pytest.raises(ConfigError, match="on a tmpfs, which is memory"):
            DiskMemory(shared)
    monkeypatch.delattr(os, "posix_fadvise")
    with pytest.raises(ConfigError, match="needs Linux"):
        DiskMemory(tmp_path)
