"""The reference lists every public name, once."""

import re
from collections import Counter
from pathlib import Path

import yobx_flatten

API = Path(__file__).parent.parent / "docs" / "api"
DIRECTIVE = re.compile(r"^\.\. (?:autofunction|autoclass|autoexception|py:data):: (\w+)$", re.MULTILINE)
# `__version__` is a sentence on the first page.
PUBLIC = {name for name in yobx_flatten.__all__ if name != "__version__"}


def documented() -> Counter[str]:
    names: Counter[str] = Counter()
    for page in API.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if ".. currentmodule:: yobx_flatten" in text:
            names.update(DIRECTIVE.findall(text))
    return names


def test_every_public_name_is_in_the_reference():
    """The missing ones are in the message."""
    assert not PUBLIC - set(documented())


def test_the_reference_lists_no_other_name():
    """A name that went away goes away here, too."""
    assert not set(documented()) - PUBLIC


def test_no_name_is_listed_twice():
    assert [name for name, count in documented().items() if count > 1] == []


def test_every_page_is_in_the_table_of_contents():
    """Sphinx would warn, and say it minutes later."""
    contents = (API / "index.md").read_text(encoding="utf-8").split()
    assert {page.stem for page in API.glob("*.md")} - {"index"} <= set(contents)
