"""Files of tensors and ONNX files of a stranger are read, or refused. A program that does not fit is an error."""

import os

import pytest
import torch

from tests import fresh_process
from yobx_flatten.errors import DamagedFileError
from yobx_flatten.files.document import file_for_torch, opened_tensors, read_onnx, read_tensors, write_tensor_file


def names_of(path, *, failure):
    with opened_tensors(path, failure=failure) as file:
        return file.keys()


READERS = [
    pytest.param(read_tensors, id="tensors"),
    pytest.param(names_of, id="names"),
    pytest.param(read_onnx, id="onnx"),
]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("read", READERS)
def test_what_has_no_end_is_refused_at_once(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "."):
        with pytest.raises(DamagedFileError, match="is not a regular file"):
            read(tmp_path / name, failure=DamagedFileError)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing", failure=DamagedFileError)


@pytest.mark.parametrize("read", READERS[:2])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"GGUF\x03\0\0\0\x02\0\0\0", "is not a safetensors file"),
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0\0\0", "is not a safetensors file"),
        (b"", "is damaged"),
        (b"\x08", "is damaged"),
        (b"\xff" * 8 + b"{}", "is damaged"),
    ],
)
def test_only_the_rest_of_a_file_is_damaged(read, content, found, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DamagedFileError, match=rf"x {found}"):
        read(tmp_path / "x", failure=DamagedFileError)


def test_a_tensor_that_is_not_in_the_file_is_named(tmp_path):
    """The names may be those of another document."""
    tensors = {"a": torch.arange(3), "b": torch.rand(2, 2).bfloat16()}
    write_tensor_file(tmp_path / "x", tensors)
    found = read_tensors(tmp_path / "x", failure=DamagedFileError)
    assert {name: tensor.dtype for name, tensor in found.items()} == {"a": torch.int64, "b": torch.bfloat16}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with (
        pytest.raises(DamagedFileError, match=r"x is damaged .*File does not contain tensor c"),
        opened_tensors(tmp_path / "x", failure=DamagedFileError) as file,
    ):
        file.get_tensor("c")


FULL = """
import resource, sys, torch
from yobx_flatten import export_program

path, room = sys.argv[1], int(sys.argv[2])
exported = export_program(torch.nn.Linear(64, 64), (torch.zeros(4, 64),), cases=[], proof="none")
resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
try:
    exported.save(path)
except OSError as error:
    print("refused", error.strerror)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="the limit of a process")
@pytest.mark.parametrize("room", [100, 3000, 17_000], ids=["the first entry", "a weight", "the end"])
def test_a_program_that_does_not_fit_leaves_the_old_file(tmp_path, room):
    """torch's writer ends the process where its destructor cannot write the end of the archive."""
    path = tmp_path / "model.pt2"
    path.write_bytes(b"old")
    done = fresh_process.run("-c", FULL, path, str(room))
    assert done.stdout == "refused File too large\n"
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fits_is_what_torch_writes(tmp_path):
    with file_for_torch(tmp_path / "values") as file:
        torch.save({"x": torch.arange(3)}, file)
    assert torch.equal(torch.load(tmp_path / "values")["x"], torch.arange(3))
