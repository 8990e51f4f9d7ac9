"""Ctrl-C before a chosen line of Python, so that no moment is left to chance."""

import dis
import itertools
import signal
import sys
from collections.abc import Callable

# A block `with` ends in a call with three times None. Its line comes again before that, and Python looks for signals
# after calls, but not there.
_WITH_ENDS = bytes([dis.opmap["LOAD_CONST"]]) * 3


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupt_at_line(number: int, call: Callable[[], object], *, files: tuple[str, ...] = ("",)) -> bool:
    """Call, with SIGINT before the given line that runs in this thread, of files with these parts of a path.

    It returns whether there were so many lines.
    """
    lines = itertools.count()
    pressed = False

    def trace(frame, event, argument):
        nonlocal pressed
        code = frame.f_code
        if event == "call":
            if code.co_name in ("_remove", "remove") and "weakref" in code.co_filename:
                return None  # called by the garbage collector: Python prints an exception there, and goes on
            return trace if any(part in code.co_filename for part in files) else None
        ends_with = code.co_code[frame.f_lasti : frame.f_lasti + 10 : 2].find(_WITH_ENDS) >= 0
        if event == "line" and not ends_with and next(lines) == number:
            pressed = True
            press()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return pressed
