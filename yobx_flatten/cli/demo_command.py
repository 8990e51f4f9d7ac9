"""``yobx-flatten demo``: export small models, and compare them with eager PyTorch."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from ..terminal.failures import UserError
from ..terminal.output import say_json
from .demo import MODELS, run_demo


def demo(
    output: Annotated[pathlib.Path, typer.Option(metavar="DIR", help="Folder for the ONNX files.")] = pathlib.Path(
        "yobx_flatten_demo"
    ),
    models: Annotated[str, typer.Option(metavar="NAME,...", help=f"Some of {', '.join(MODELS)}.")] = ",".join(MODELS),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Export small models to ONNX, run them in onnxruntime, and compare with eager PyTorch.

    The models have random weights. Each file reads the Zen of Python token by token; each call gets the cache that the
    last one returned. Exit status: 0 all files compute the values of their models; 1 one differs.
    """
    names = list(dict.fromkeys(name.strip() for name in models.split(",")))
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        found = ", ".join(repr(name) for name in unknown)
        raise UserError(f"unknown model {found}; choose from {', '.join(MODELS)}")
    return run_demo(output, names, as_json=say_json if json else None)
