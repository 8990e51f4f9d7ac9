"""The command line ``roundpipe``, also ``python -m roundpipe_runtime``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from yobx_flatten.terminal.running import has_libraries

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments; by default those of the process.
    """
    if not has_libraries("roundpipe"):
        return 2
    try:
        from .cli.app import run  # torch, which takes seconds
    except KeyboardInterrupt:
        sys.stderr.write("roundpipe: interrupted, nothing was written\n")
        return 130
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
