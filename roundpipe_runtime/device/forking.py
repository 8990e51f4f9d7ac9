"""Locks that are released in a forked child process."""

from __future__ import annotations

import os
from typing import Any, TypeVar

L = TypeVar("L")

_LOCKS: list[Any] = []


def free_after_fork(lock: L) -> L:
    """Return a lock that is free in a forked child, whichever thread held it: the child does not have that thread."""
    _LOCKS.append(lock)
    return lock


def _free() -> None:
    for lock in _LOCKS:
        lock._at_fork_reinit()  # as the standard library does with the locks of its modules


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_free)
