"""The command line: ``python -m yobx_flatten demo``.

Exit status: 0 when all went well, 1 when a program differs from its model, 2 when the request cannot be served.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from .demo import MODELS, run_demo
from .errors import MissingDependencyError

__all__ = ["main"]


class _UsageError(Exception):
    """What was asked for does not exist; the message is one line."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing the usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments; by default those of the process.
    """
    parser = _parser()
    try:
        asked = parser.parse_args(argv)
        if asked.command is None:
            parser.print_help(sys.stderr)
            return 2
        return run_demo(asked.output, asked.models)
    except (_UsageError, MissingDependencyError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"cannot write to {asked.output}: {error.strerror or error}")
    except KeyboardInterrupt:
        _refuse("interrupted")
        return 130  # what a shell reports for a process that SIGINT ended


def _refuse(reason: str) -> int:
    print(f"yobx_flatten: {reason}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m yobx_flatten",
        description="Export models with their caches as inputs, and prove that the result does what the model does.",
        allow_abbrev=False,
    )
    version = importlib.metadata.version("yobx-flatten")
    parser.add_argument("--version", action="version", version=f"yobx_flatten {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    demo = commands.add_parser(
        "demo",
        help="export small models to ONNX, decode real text with them in onnxruntime, compare with eager",
        description=(
            "Build small models with random weights, export each one once with its cache as input to ONNX, decode the "
            "Zen of Python with it in onnxruntime, in a loop over its own outputs, and compare with the eager model."
        ),
        epilog="Exit status: 0 all programs do what their models do; 1 one differs; 2 the request cannot be served.",
        allow_abbrev=False,
    )
    demo.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("yobx_flatten_demo"),
        metavar="DIR",
        help="folder for the ONNX files (default: %(default)s)",
    )
    demo.add_argument(
        "--models",
        type=_models,
        default=list(MODELS),
        metavar="NAME,...",
        help=f"which of {', '.join(MODELS)} (default: all)",
    )
    return parser


def _models(given: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in given.split(",")))
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        found = ", ".join(repr(name) for name in unknown)
        raise argparse.ArgumentTypeError(f"unknown model {found}; there are {', '.join(MODELS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
