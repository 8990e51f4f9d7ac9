"""Print tables, progress and one-line errors, for the command lines of both packages."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def handled(
    number: int, handler: Callable[..., object], instead_of: Callable[..., object] | signal.Handlers
) -> Iterator[None]:
    """In a ``with`` block, handle a signal with ``handler`` if the handler was ``instead_of``; else change nothing."""
    # only the main thread receives signals
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(number) is not instead_of:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, instead_of)


def ended_by_ctrl_c(program: str) -> contextlib.AbstractContextManager[None]:
    """In a ``with`` block, make Ctrl-C end the process with exit status 130."""

    def end(*_: object) -> None:  # an imported library may catch KeyboardInterrupt, which is therefore not raised
        sys.stderr.write(f"{program}: interrupted, nothing was written\n")
        sys.stderr.flush()
        os._exit(130)

    return handled(signal.SIGINT, end, instead_of=signal.default_int_handler)
