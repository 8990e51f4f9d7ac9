"""What is said of names that a library has renamed, while a test runs: of transformers' words for a cache, so far.

A warning of Python is an error in the tests anyway, and two ways lead past it. transformers also logs such a line, once
in a process. And code that tries a model, and goes on without it where the model fails, would take the error for a
failure of the model. So both are heard here, in any thread, and what programs of tests write to stderr as well; a
fixture in ``conftest.py`` fails the test. A test that means to use an old name asks for the fixture ``old_names_said``.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from typing import Any

# "`x` is deprecated ... Use `cache` instead.", "Both `x` and `cache` are set ... ignoring deprecated `x`=..."
_LINE = re.compile(r"deprecated\b.*Use `cache` instead|Using `cache=.*ignoring deprecated")

heard: list[str] = []  # the lines so far


def hear(text: str) -> None:
    """Keep the lines of a text that are about an old name."""
    heard.extend(line for line in text.splitlines() if _LINE.search(line))


def said() -> list[str]:
    """Return the lines so far, and begin anew: the next test with an old name hears them again."""
    lines = list(heard)
    heard.clear()
    if lines and "transformers.utils.logging" in sys.modules:
        sys.modules["transformers.utils.logging"].warning_once.cache_clear()
    return lines


def listen() -> None:
    """Hear transformers from now on, if it is imported; it is no harm to call this again."""
    logger = logging.getLogger("transformers")
    if _HANDLER not in logger.handlers:
        logger.addHandler(_HANDLER)
    module: Any = sys.modules.get("transformers.utils.deprecation")
    if module is not None and module.warnings is warnings:
        module.warnings = _Warnings()


_HANDLER = logging.Handler(logging.WARNING)
_HANDLER.emit = lambda record: hear(record.getMessage())


class _Warnings:
    """The module ``warnings`` as another module sees it: what it warns of is heard, also where the error is caught."""

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(self, message: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
        hear(str(message))
        warnings.warn(message, category, stacklevel + 1)
