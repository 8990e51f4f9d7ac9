"""The command line: ``yobx-flatten``, which is ``python -m yobx_flatten``, too."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments; by default those of the process.
    """
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        wanted = " and ".join(missing)
        print(f"yobx-flatten: the command line needs {wanted}: pip install 'yobx-flatten[cli]'", file=sys.stderr)
        return 2
    from .cli.app import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
