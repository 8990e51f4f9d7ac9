"""Print tables, progress and one-line errors, for the command lines of both packages."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ended_by_ctrl_c(program: str) -> Iterator[None]:
    """In a ``with`` block, make Ctrl-C end the process with exit status 130."""
    # an imported library may catch KeyboardInterrupt, so the handler does not raise it
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(*_: object) -> None:
        sys.stderr.write(f"{program}: interrupted, nothing was written\n")
        sys.stderr.flush()
        os._exit(130)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
