"""Why a type does not pass in a runtime where the cause lies outside of this package, as far as it is known.

What is not here is listed in the page with the first line of its error.
"""

from __future__ import annotations

from .causes import CAUSES
from .page import cleaned

__all__ = ["RUNTIME_CAUSES", "cause_of"]

# column, text of the error -> cause
RUNTIME_CAUSES: dict[tuple[str, str], str] = {}


def cause_of(name: str, column: str, why: str) -> str:
    """Return the cause of a failure, or what was reported.

    Args:
        name: the type.
        column: where it failed.
        why: first line of the error.
    """
    if column == "program" and name in CAUSES:
        return CAUSES[name]
    known = (cause for (where, text), cause in RUNTIME_CAUSES.items() if column.startswith(where) and text in why)
    return next(known, f"`{cleaned(why)}`")
