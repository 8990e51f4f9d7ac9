"""Find the line of the user's own code in which an error began."""

from __future__ import annotations

import linecache
import os
import traceback

import torch

_TORCH = os.path.dirname(torch.__file__)
_OURS = os.path.dirname(os.path.dirname(__file__))


def place_of(error: BaseException) -> str:
    """Return ``" in forward, model.py:12: x + y"`` for the innermost line of the code of a model."""
    # returns: `""` where the code that called torch or this package is all that is known
    rows = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    inside = [number for number, (code, _) in enumerate(rows) if code.co_filename.startswith((_TORCH, _OURS))]
    # what is above the first of them is the program that was to be exported from
    below = rows[inside[0] :] if inside else []
    own = [row for row in below if not row[0].co_filename.startswith((_TORCH, _OURS, "<"))]
    if not own:
        return ""
    code, line = own[-1]
    text = linecache.getline(code.co_filename, line).strip()
    return f" in {code.co_name}, {code.co_filename}:{line}{': ' + text if text else ''}"
