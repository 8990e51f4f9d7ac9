"""Run the command line ``roundpipe`` as ``python -m roundpipe_runtime``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from yobx_flatten.core.terminal import ended_by_ctrl_c


def main(argv: Sequence[str] | None = None) -> int:
    def start() -> Callable[[Sequence[str] | None], int]:
        from .cli.app import run  # torch

        return run

    with ended_by_ctrl_c("roundpipe"):
        from yobx_flatten.core.terminal.command_line import starting

    return starting("roundpipe", start, argv)


if __name__ == "__main__":
    sys.exit(main())
