"""The reference lists every public name, once."""

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

import roundpipe_runtime
import yobx_flatten
from roundpipe_runtime import huggingface
from tests import old_names

API = Path(__file__).parent.parent / "docs" / "api"
DIRECTIVE = re.compile(r"^\.\. (?:autofunction|autoclass|autoexception|py:data):: ([\w.]+)$", re.MULTILINE)
FOLDERS = [importlib.import_module(f"yobx_flatten.{home}") for home in yobx_flatten._HOMES]
# `__version__` is a sentence on the first page, and a name of the package is not listed again with its folder.
PUBLIC = {f"yobx_flatten.{name}" for name in yobx_flatten.__all__ if name != "__version__"} | {
    f"{folder.__name__}.{name}" for folder in FOLDERS for name in folder.__all__ if name not in yobx_flatten.__all__
}


def documented() -> Counter[str]:
    names: Counter[str] = Counter()
    for page in API.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if ".. currentmodule:: yobx_flatten" in text:
            full = (name if "." in name else f"yobx_flatten.{name}" for name in DIRECTIVE.findall(text))
            names.update(name for name in full if not name.startswith("yobx_flatten.testing."))
    return names


def test_the_package_has_few_names():
    assert len(yobx_flatten.__all__) <= 58


def test_a_folder_lists_only_names_of_its_own():
    """A name of two folders would have two homes."""
    names = Counter(name for folder in FOLDERS for name in folder.__all__)
    assert [name for name, count in names.items() if count > 1] == []


def test_names_that_moved_are_still_names_of_the_package():
    homes = {name: folder for folder in FOLDERS for name in folder.__all__}
    for name in old_names.__all__:
        assert getattr(old_names, name) is getattr(homes[name], name)
    assert set(old_names.__all__) <= set(dir(yobx_flatten))


def test_a_name_that_never_was_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'yobx_flatten' has no attribute 'Undoo'"):
        yobx_flatten.Undoo  # noqa: B018 # the lookup is the test


def test_every_public_name_is_in_the_reference():
    assert not PUBLIC - set(documented())


def test_the_reference_lists_no_other_name():
    assert not set(documented()) - PUBLIC


def test_no_name_is_listed_twice():
    assert [name for name, count in documented().items() if count > 1] == []


def test_the_reference_of_the_runtime_lists_every_public_name_once():
    text = "\n".join(page.read_text(encoding="utf-8") for page in API.glob("runtime_*.md"))
    listed = Counter(re.findall(r"^\.\. auto\w+:: roundpipe_runtime\.(\S+)$", text, re.MULTILINE))
    more = [f"huggingface.{name}" for name in huggingface.__all__ if name not in roundpipe_runtime.__all__]
    public = {*roundpipe_runtime.__all__, *roundpipe_runtime._TRAINERS, *more} - {"optim"}
    assert public - set(listed) == set()
    assert [name for name, count in listed.items() if count > 1] == []


def test_the_guide_lists_every_error_and_warning_of_the_runtime():
    text = (API.parent / "guide" / "errors.md").read_text(encoding="utf-8")
    assert [name for name in roundpipe_runtime.__all__ if name.endswith("Error") and f"`{name}`" not in text] == []
    warnings = [name for name in roundpipe_runtime.__all__ if name.endswith("Warning") and name != "RoundPipeWarning"]
    assert [name for name in warnings if f"`{name}`" not in text] == []


def test_every_page_is_in_the_table_of_contents():
    """Sphinx would warn, and say it minutes later."""
    contents = (API / "index.md").read_text(encoding="utf-8").split()
    assert {page.stem for page in API.glob("*.md")} - {"index"} <= set(contents)
