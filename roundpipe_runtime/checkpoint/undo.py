"""Restore the state of small objects when a later step fails."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

__all__ = ["undo_of"]


def undo_of(part: Any) -> Callable[[], None]:
    """Return a function that gives an optimizer, scheduler or scaler the state that it has now.

    The tensors of an optimizer are not copied: a load replaces them, and does not write to them.
    """
    # part: object with `state_dict` and `load_state_dict`
    if hasattr(part, "param_groups") and hasattr(part, "state"):
        state, groups = part.state, part.param_groups

        def put_back() -> None:
            part.__setstate__({"state": state, "param_groups": groups})

        return put_back
    before = copy.deepcopy(part.state_dict())

    def load_back() -> None:
        with contextlib.suppress(Exception):  # it may be what failed
            part.load_state_dict(before)

    return load_back
