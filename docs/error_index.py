"""The index of the FAQ: every message that `explain_error` knows, with what it answers and the line to type."""

from __future__ import annotations

import re._constants as codes
import re._parser as parser
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The text of such a message does not name the cause, so the FAQ has an entry for each of these messages.
NEEDS_THE_CALL = (
    "The FAQ has an entry for each message in this list. With what was exported or called, "
    "`explain_error(error, module, args, kwargs, dynamic_shapes)` names the place and the line to type."
)


def messages_of(pattern: str) -> list[str]:
    """Return what a pattern finds, in words: one message per alternative, ``...`` for what differs.

    Args:
        pattern: a regular expression of the table of messages.
    """
    parsed = parser.parse(pattern)
    if len(parsed) == 1 and parsed[0][0] is codes.BRANCH:
        alternatives = parsed[0][1][1]
    else:
        alternatives = [parsed]
    return [" ".join(_words(alternative).split()) for alternative in alternatives]


def _words(parsed: Iterable[tuple[Any, Any]]) -> str:
    found = ""
    for code, argument in parsed:
        if code is codes.LITERAL:
            found += chr(argument)
        elif code is codes.SUBPATTERN:
            found += _words(argument[3])
        elif code is codes.BRANCH:
            found += _words(argument[1][0])
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, repeated = argument
            inside = _words(repeated)
            if most == 1:  # a letter that may be there is shown, more of them are not
                found += inside if least or len(inside) == 1 else ""
            else:
                found += inside if inside == " " else "..."
        elif code is codes.IN:
            first, letter = argument[0]
            is_space = len(argument) == 1 and letter is codes.CATEGORY_SPACE
            found += " " if is_space else chr(letter) if first is codes.LITERAL else "..."
        elif code is codes.ANY:
            found += "..."
    while "......" in found:
        found = found.replace("......", "...")
    return found


def index() -> list[str]:
    """Return the lines of the index: messages with one meaning together, in the order of the table."""
    from yobx_flatten import explain_error
    from yobx_flatten.diagnose.export_errors import _TABLE

    entries: dict[str, list[str]] = {NEEDS_THE_CALL: []}
    for pattern, _ in _TABLE:
        for message in messages_of(pattern):
            found = explain_error(RuntimeError(message.replace("...", "MyClass")))
            is_general = found.known and "MyClass" not in found.text and found.text[0] != " "
            text = found.text.replace(message, "...")
            answer = f"{text}\n\n```{{code-block}} python\n{found.remedy}\n```" if is_general else NEEDS_THE_CALL
            # a KeyError has an entry; rows without a pattern look at the error itself
            if message not in ("", "<class '...'>"):
                entries.setdefault(answer, []).append(message)
    lines = []
    for answer, messages in entries.items():
        lines += [*(f"- `` {message} ``" for message in messages), "", answer, ""]
    return lines


def write_error_index(folder: Path) -> None:
    """Write the index in Markdown into ``folder``."""
    text = "\n".join(index())
    path = folder / "error_index.md"
    if not path.exists() or path.read_text(encoding="utf-8") != text:  # an untouched file is not built again
        path.write_text(text, encoding="utf-8")
