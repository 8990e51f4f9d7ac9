"""Parts of messages: an error in one line, a number of bytes."""

from __future__ import annotations

__all__ = ["first_line", "format_bytes"]


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message that is not blank; the name of its class if there is none.

    >>> first_line(ValueError("\n  cannot open model.onnx \nat line 3")), first_line(KeyboardInterrupt())
    ('cannot open model.onnx', 'KeyboardInterrupt')
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def format_bytes(count: float) -> str:
    """Format a number of bytes with the units of SI: 1 kB is 1000 bytes.

    >>> format_bytes(40), format_bytes(2300), format_bytes(8e9), format_bytes(1.38e12)
    ('40 bytes', '2.3 kB', '8 GB', '1.38 TB')
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
