"""The page of error messages has an entry for each message that `explain_error` knows."""

import html
import importlib.util
import re
from pathlib import Path

import pytest

from yobx_flatten.diagnose.export_errors import _TABLE

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "guide" / "errors.md"
TEXT = " ".join(html.unescape(PAGE.read_text(encoding="utf-8")).replace("`", "").split()).lower()


def longest_words(pattern: str) -> list[str]:
    plain = re.sub(r"\\[.()]", lambda found: found[0][1], re.sub(r"\\[a-zA-Z]|\[[^]]*\]|\(\?:", "\0", pattern))
    runs = [re.split(r"[\0^$*+?(){}|<>]", alternative) for alternative in plain.split("|")]
    return [max((run.strip(" '\"`.:") for run in pieces), key=len).replace("`", "").lower() for pieces in runs]


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in _TABLE])
def test_a_message_that_is_explained_is_on_the_page_and_one_of_the_index_is_found(pattern):
    assert any(words in TEXT for words in longest_words(pattern)), longest_words(pattern)
    spec = importlib.util.spec_from_file_location("error_index", DOCS / "error_index.py")
    error_index = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(error_index)
    messages = error_index.messages_of(pattern)
    names = ("2", "MyClass", "inputs['x'][0]")
    assert messages
    pattern = pattern.replace(r"\n", " ")
    tried = {message: [message.replace("...", name) for name in names] for message in messages}
    assert [m for m, ones in tried.items() if not any(re.search(pattern, one, re.DOTALL) for one in ones)] == []
