"""The command line ``yobx-flatten``, also run by ``python -m yobx_flatten``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from .core.terminal import ended_by_ctrl_c


def main(argv: Sequence[str] | None = None) -> int:
    # argv: the arguments; by default the arguments of the process

    def start() -> Callable[[Sequence[str] | None], int]:
        from .cli.app import run  # imports torch

        return run

    with ended_by_ctrl_c("yobx-flatten"):
        from .core.terminal.command_line import starting

    return starting("yobx-flatten", start, argv)


if __name__ == "__main__":
    sys.exit(main())
