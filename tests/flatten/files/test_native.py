"""A program that does not fit on the disk is an error, and not the end of the process."""

import os

import pytest
import torch

from tests import fresh_process
from yobx_flatten.files.tensors import file_for_torch

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
