"""Options that several commands have."""

from __future__ import annotations

import pathlib
from typing import Annotated, Literal

import typer

Folder = Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="A folder that export wrote.")]
AdapterName = Annotated[
    str | None, typer.Option("--adapter", metavar="NAME", help="LoRA adapter of the folder to use (default: none).")
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; below 1, likely tokens become likelier.")]
TopK = Annotated[int | None, typer.Option(help="Sample among this many likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest tokens with this total probability.")]
Seed = Annotated[int | None, typer.Option(help="Random seed of sampling.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of threads of onnxruntime, OpenVINO or ExecuTorch.")]
Runtime = Annotated[
    Literal["onnxruntime", "torch", "aotinductor", "executorch", "openvino"] | None,
    typer.Option(help="Runtime (default: the one the folder was exported for). openvino also runs ONNX files."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Load files that may run code (AOTInductor, pickles); use only if you trust their author."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Device on which onnxruntime runs: cpu, cuda, cuda:1, directml, coreml, openvino ...")
]
