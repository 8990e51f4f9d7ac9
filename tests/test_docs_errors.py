"""The page of error messages has an entry for each message that `explain_error` knows."""

import html
import re
from pathlib import Path

import pytest

from yobx_flatten.diagnose.export_errors import _TABLE

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "errors.md"
TEXT = " ".join(html.unescape(PAGE.read_text(encoding="utf-8")).replace("`", "").split()).lower()


def longest_words(pattern: str) -> list[str]:
    """The longest run of plain words in each alternative of a pattern."""
    plain = re.sub(r"\\[.()]", lambda found: found[0][1], re.sub(r"\\[a-zA-Z]|\[[^]]*\]|\(\?:", "\0", pattern))
    runs = [re.split(r"[\0^$*+?(){}|<>]", alternative) for alternative in plain.split("|")]
    return [max((run.strip(" '\"`.:") for run in pieces), key=len).replace("`", "").lower() for pieces in runs]


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in _TABLE])
def test_a_message_that_is_explained_is_on_the_page(pattern):
    """In the words of torch, for which a user searches."""
    assert any(words in TEXT for words in longest_words(pattern)), longest_words(pattern)
