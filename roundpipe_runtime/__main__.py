"""The command line: ``python -m roundpipe_runtime demo``.

Exit status: 0 when all went well, 1 when the pipeline learns something else, 2 when the request cannot be served.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from yobx_flatten import MissingDependencyError

from .demo import STEPS, run_demo

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments; by default those of the process.
    """
    parser = _parser()
    asked = parser.parse_args(argv)
    if asked.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return run_demo(asked.steps)
    except MissingDependencyError as error:
        print(f"roundpipe_runtime: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("roundpipe_runtime: interrupted", file=sys.stderr)
        return 130  # what a shell reports for a process that SIGINT ended


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m roundpipe_runtime",
        description="Train models larger than the device, and prove that they learn what the plain model learns.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    demo = commands.add_parser(
        "demo",
        help="train a small transformer plainly and through a pipeline, and draw who computed what when",
        description="Train a small transformer on real text, plainly and through a pipeline over two virtual devices.",
        epilog="Exit status: 0 the losses are the same but for rounding; 1 they differ; 2 the demo cannot run.",
        allow_abbrev=False,
    )
    demo.add_argument("--steps", type=_steps, default=STEPS, metavar="N", help="batches to learn (%(default)s)")
    return parser


def _steps(given: str) -> int:
    steps = int(given) if given.isdecimal() else 0
    if steps < 1:
        raise argparse.ArgumentTypeError(f"{given!r} is no number from 1 on")
    return steps


if __name__ == "__main__":
    sys.exit(main())
