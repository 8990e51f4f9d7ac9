"""Print for both command lines: tables, progress, and errors as one line."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ended_by_ctrl_c(program: str) -> Iterator[None]:
    """End the process with status 130 at Ctrl-C in the with block."""
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
