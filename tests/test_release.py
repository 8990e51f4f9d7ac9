"""`make release-check` refuses archives that are incomplete, or that hold anything else; here with invented ones."""

import subprocess
import sys

import pytest

from tests import release_check
from tests.release_check import wrong_in_metadata, wrong_in_sdist, wrong_in_wheel

SOURCES = ["yobx_flatten/__init__.py", "yobx_flatten/py.typed", "roundpipe_runtime/py.typed"]
INFO = ["yobx_flatten-0.1.0.dist-info/METADATA", "yobx_flatten-0.1.0.dist-info/licenses/LICENSE"]
SDIST = [*SOURCES, *release_check.IN_SDIST]
METADATA = (
    "Metadata-Version: 2.4\nName: yobx-flatten\nVersion: 0.1.0\nSummary: x\nRequires-Python: >=3.11\n"
    "License-Expression: MIT\nDescription-Content-Type: text/markdown\n\n" + "A sentence of the README. " * 50
)


def test_complete_archives_pass_and_a_command_that_fails_ends_the_check_with_what_it_printed(tmp_path):
    assert wrong_in_wheel([*SOURCES, *INFO], SOURCES) == []
    assert wrong_in_sdist(SDIST, SOURCES) == []
    assert wrong_in_metadata(METADATA) == []
    assert release_check.run("echo", "done", cwd=tmp_path) == "done\n"
    with pytest.raises(SystemExit, match=r"ls no-such-file failed:\n.*no-such-file"):
        release_check.run("ls", "no-such-file", cwd=tmp_path)
    assert release_check.interpreter("3.999") is None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = release_check.interpreter(version)
    assert found is None or version in subprocess.run([found, "--version"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([*SOURCES[1:], *INFO], "missing: yobx_flatten/__init__.py"),
        ([*SOURCES, INFO[0]], "missing: LICENSE"),
        ([*SOURCES, *INFO, "tests/conftest.py"], "not a file of the repository: tests/conftest.py"),
    ],
)
def test_a_wheel_with_other_files_is_refused(names, reason):
    """Without the mark of types also where the repository lost it: type checkers would ignore all annotations."""
    assert wrong_in_wheel(names, SOURCES) == [reason]
    left = [name for name in SOURCES if name != "roundpipe_runtime/py.typed"]
    assert wrong_in_wheel([*left, *INFO], left) == ["missing: roundpipe_runtime/py.typed"]


@pytest.mark.parametrize(
    "name", ["tests/__pycache__/a.pyc", ".pytest_cache/x", "docs/build/index.html", "model.onnx.data"]
)
def test_a_source_archive_with_leftovers_is_refused(name):
    assert wrong_in_sdist([*SDIST, name], SOURCES) == [f"leftover: {name}"]
    left = [name for name in SDIST if name != "hatch_build.py"]
    assert wrong_in_sdist(left, SOURCES) == ["missing: hatch_build.py"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (METADATA.replace("text/markdown", "text/plain"), "the description is not the README"),
        (METADATA.replace("Requires-Python: >=3.11\n", ""), "no Requires-Python"),
        (METADATA + "[guide](docs/guide.md)", "a link into the repository: docs/guide.md"),
        (METADATA + '<img src="docs/a.svg">', "a picture of the repository: docs/a.svg"),
    ],
)
def test_metadata_that_an_index_cannot_show_are_refused(text, reason):
    assert wrong_in_metadata(text) == [reason]
