"""Weights that a library allocates come to lie in huge pages, and stay as they are."""

import ctypes
import mmap
import pathlib

import pytest

from yobx_flatten.runners import onnx_session
from yobx_flatten.runners.onnx_session import in_huge_pages

SETTING = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIZE = 64 * 2**20


def _huge_bytes(address):
    """The bytes in huge pages of the mapping that an address is in."""
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *others = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "AnonHugePages:":
            return int(others[0]) * 1024
    return 0


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(encoding="utf-8"), reason="Linux gives no huge pages here"
)
def test_memory_of_the_block_is_in_huge_pages_with_its_contents():
    """Most of 64 MB that were written in the block; what they hold stays."""
    with in_huge_pages():
        memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(bytes(range(256)) * (SIZE // 256))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert _huge_bytes(address) >= SIZE // 2
    assert memory[:] == bytes(range(256)) * (SIZE // 256)


@pytest.mark.parametrize(
    ("ranges", "others", "expected"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 4)], [(4, 10)]),
        ([(0, 10)], [(6, 12)], [(0, 6)]),
        ([(0, 10), (20, 30)], [(22, 24), (2, 3)], [(0, 2), (3, 10), (20, 22), (24, 30)]),
        ([(0, 10)], [(0, 10)], []),
    ],
)
def test_what_was_there_before_is_left_out(ranges, others, expected):
    """Linux joins new memory to its neighbours, which may be of others."""
    assert [*onnx_session._without(ranges, others)] == expected


def test_without_a_list_of_memory_nothing_is_asked_for(tmp_path, monkeypatch):
    """As on systems that are not Linux."""
    monkeypatch.setattr(onnx_session, "_MAPS", tmp_path / "maps")
    monkeypatch.setattr(onnx_session, "_advise", lambda *_: pytest.fail("asked"))
    with in_huge_pages():
        pass
