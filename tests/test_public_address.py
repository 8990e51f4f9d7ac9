"""What follows from the public addresses of the project, and archives that `make release-check` refuses."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import release_check
from tests.release_check import wrong_in_metadata, wrong_in_sdist, wrong_in_wheel

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_of_the_index_has_links_to_the_repository_or_words_without_an_address(monkeypatch):
    hook = type(sys)("hatchling.metadata.plugin.interface")
    hook.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, hook.__name__, hook)
    readme_of_index = loaded(ROOT / "hatch_build.py").readme_of_index
    text = readme_of_index(README, "https://example.org/flatten")
    assert re.findall(r"\]\((?!https?:)[^)]+\)", text) == []
    paths = re.findall(r"https://example.org/flatten/(?:blob|raw)/main/([^)\"#]+)", text)
    assert {"docs/guide/install.md", "docs/_static/overview_export.svg"} <= set(paths)
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    text = readme_of_index(README, None)
    assert "<img" not in text
    assert "[FAQ]" not in text
    assert re.findall(r"\]\((?!https?:)[^)]+\)", text) == []
    assert text.count("](https://") == README.count("](https://")


def test_a_shared_page_names_its_picture_and_404_where_its_files_are():
    address = loaded(ROOT / "docs" / "public_address.py")
    tags = address.head_tags("https://example.org/", "guide/export", 'A "page"', "What it is")
    shown = dict(re.findall(r'<meta property="([^"]+)" content="([^"]*)">', tags))
    assert shown["og:url"] == "https://example.org/guide/export.html"
    assert shown["og:title"] == "A &quot;page&quot;"
    assert (ROOT / "docs" / shown["og:image"].removeprefix("https://example.org/")).is_file()
    assert address.head_tags("https://example.org/", "404", "", "") == '<base href="https://example.org/">'


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


def test_archives_that_are_incomplete_or_hold_other_files_are_refused():
    """Without the mark of types also where the repository lost it: type checkers would ignore all annotations."""
    assert wrong_in_wheel([*SOURCES[1:], *INFO], SOURCES) == ["missing: yobx_flatten/__init__.py"]
    assert wrong_in_wheel([*SOURCES, INFO[0]], SOURCES) == ["missing: LICENSE"]
    other = "tests/conftest.py"
    assert wrong_in_wheel([*SOURCES, *INFO, other], SOURCES) == [f"not a file of the repository: {other}"]
    left = [name for name in SOURCES if name != "roundpipe_runtime/py.typed"]
    assert wrong_in_wheel([*left, *INFO], left) == ["missing: roundpipe_runtime/py.typed"]
    for name in ("tests/__pycache__/a.pyc", ".pytest_cache/x", "docs/build/index.html", "model.onnx.data"):
        assert wrong_in_sdist([*SDIST, name], SOURCES) == [f"leftover: {name}"]
    left = [name for name in SDIST if name != "hatch_build.py"]
    assert wrong_in_sdist(left, SOURCES) == ["missing: hatch_build.py"]


def test_metadata_that_an_index_cannot_show_are_refused():
    plain = METADATA.replace("text/markdown", "text/plain")
    assert wrong_in_metadata(plain) == ["the description is not the README"]
    assert wrong_in_metadata(METADATA.replace("Requires-Python: >=3.11\n", "")) == ["no Requires-Python"]
    linked, shown = METADATA + "[guide](docs/guide.md)", METADATA + '<img src="docs/a.svg">'
    assert wrong_in_metadata(linked) == ["a link into the repository: docs/guide.md"]
    assert wrong_in_metadata(shown) == ["a picture of the repository: docs/a.svg"]
