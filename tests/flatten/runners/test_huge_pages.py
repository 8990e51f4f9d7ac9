"""Weights that a library allocates come to lie in huge pages, and stay as they are."""

import ctypes
import mmap
import pathlib

import pytest
import torch

from yobx_flatten import export_onnx
from yobx_flatten.runners import onnx_runner, onnx_session
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


class _Loop(torch.nn.Module):
    def forward(self, tokens, past):
        return tokens + 1, torch.cat([past, tokens], 2)


def test_only_a_long_loop_asks_for_huge_pages(tmp_path, monkeypatch):
    """Opening a file is as fast as without; the memory of one session is asked for once."""
    asked = []
    monkeypatch.setattr(onnx_session, "_advise", lambda start, end: asked.append((start, end)))
    free = ({2: torch.export.Dim.DYNAMIC}, {2: torch.export.Dim.DYNAMIC})
    x = torch.zeros(1, 2, 3, 4)
    export_onnx(_Loop(), (x, x), path=tmp_path / "m.onnx", dynamic_shapes=free, cases=[])
    session = onnx_session.open_session(tmp_path / "m.onnx", caller="test")
    onnx_session._MEMORY[session] = [(0, 2**30)]
    runner = onnx_runner.OnnxRunner(session, "m.onnx")
    for step in range(2 * onnx_runner._LONG):
        outputs, _ = runner.step({"tokens": x, "past": x}, {})
        assert bool((outputs[runner.outputs[0]] == 1).all())
        assert asked == ([] if step + 1 < onnx_runner._LONG else [(0, 2**30)])


def test_without_a_list_of_memory_nothing_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_session, "_MAPS", tmp_path / "maps")
    monkeypatch.setattr(onnx_session, "_advise", lambda *_: pytest.fail("asked"))
    with in_huge_pages():
        pass
