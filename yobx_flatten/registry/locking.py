"""The global lock, which a fork waits for.

A child process has the thread that forked and no other. A lock that another thread held at that moment would never be
released in the child, and what it guards would stay half done. So a thread that forks takes the lock first, and both
processes have it free and everything whole.

One lock for all, because a fork can only wait for several in one order. It is held for a few lines at a time: no import
and no code of a user runs under it, since these could wait for a thread that waits for the lock.
"""

from __future__ import annotations

import os
import threading

LOCK = threading.RLock()

if hasattr(os, "register_at_fork"):  # not on Windows, where processes are made otherwise
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
