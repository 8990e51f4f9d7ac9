"""``roundpipe demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from yobx_flatten.terminal.output import say_json

from .demo import STEPS, run_demo

__all__ = ["demo"]


def demo(
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Batches to train on.")] = STEPS,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; the tables go to stderr.")] = False,
) -> int:
    """Train a transformer larger than its devices next to plain PyTorch, and draw a timeline.

    The pipeline runs over two virtual devices with less memory than the weights take; plain training is refused there,
    and has the memory of the host. Exit status: 0 the losses are the same but for rounding; 1 they differ;
    2 the demo cannot run.
    """
    return run_demo(steps, as_json=say_json if json else None)
