"""A timeline as a picture."""

import sys

import pytest

from roundpipe_runtime import Record
from roundpipe_runtime.timeline.drawing import save_picture
from roundpipe_runtime.timeline.record import TimelineFileError
from yobx_flatten import MissingDependencyError

RECORDS = [Record(0, 0, "a", "forward", 5.0, 5.5), Record(1, 0, "b", "upload", 5.5, 6.0)]


@pytest.mark.parametrize(("name", "start"), [("run.png", b"\x89PNG"), ("run.svg", b"<?xml"), ("run.PDF", b"%PDF")])
def test_the_end_of_the_name_says_the_format(tmp_path, name, start):
    """Pixels, or lines."""
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    save_picture(RECORDS, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_name_without_a_known_end_is_refused(tmp_path):
    """Nothing is written then."""
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    with pytest.raises(TimelineFileError, match=r"must end in .png"):
        save_picture(RECORDS, tmp_path / "run.xyz")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    """It is not a library that everybody has."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match="pip install matplotlib"):
        save_picture(RECORDS, tmp_path / "run.png")
