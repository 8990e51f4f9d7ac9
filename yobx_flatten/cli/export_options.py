"""Options of ``yobx-flatten export``, with their help texts."""

from __future__ import annotations

import pathlib
from typing import Annotated, Literal

import typer

from ..model_folder.pieces.tasks import TASKS
from ..model_folder.source.find import MODEL_NAMES

_TASKS = ", ".join(("auto", *TASKS))
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=MODEL_NAMES,
    ),
]
Output = Annotated[pathlib.Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")]
Target = Annotated[
    Literal["onnxruntime", "torch", "aotinductor", "executorch", "openvino"] | None,
    typer.Option(help="Target runtime (default: the runtime of --to)."),
]
Task = Annotated[str, typer.Option(metavar="TASK", help=f"One of {_TASKS}.")]
To = Annotated[Literal["onnx", "program"], typer.Option(help="Write ONNX files or torch.export programs.")]
Dtype = Annotated[
    Literal["float32", "float16", "bfloat16"],
    typer.Option(help="Data type of the weights; bfloat16 only for programs, or with --proof none."),
]
Opset = Annotated[int | None, typer.Option(min=18, help="ONNX opset (default: the fastest that passes the proof).")]
Dynamic = Annotated[Literal["all", "length"], typer.Option(help="Dynamic sizes: batch and lengths, or lengths only.")]
Batch = Annotated[int, typer.Option(min=1, help="Batch size, with --dynamic length.")]
MaxBatch = Annotated[int, typer.Option(min=1, help="Largest batch size, with --max-length.")]
MaxLength = Annotated[
    int | None, typer.Option(min=1, help="Largest number of tokens in the cache; ExecuTorch plans memory for it.")
]
Proof = Annotated[
    Literal["auto", "full", "sample", "none"],
    typer.Option(help="How much is checked against the model; auto: full below 1 GB of weights, sample above."),
]
Quantize = Annotated[
    Literal["int8", "int4", "keep"] | None,
    typer.Option(
        help="Weights of projections in 8 or 4 bits, compared with the model in scores, greedy tokens and perplexity "
        "on a text of Python; keep: the integers that they were made of."
    ),
]
PerplexityRatio = Annotated[
    float | None,
    typer.Option(help="With --quantize: largest allowed perplexity relative to the model (int8: 1.01, int4: 1.1)."),
]
Activations = Annotated[
    Literal["auto", "float", "int8", "token"],
    typer.Option(
        help="With --quantize: what is multiplied with the weights. int8 is faster, token fastest for encoders."
    ),
]
Calibration = Annotated[
    pathlib.Path | None,
    typer.Option(metavar="FILE", help="With --quantize: your prompts, one in each line, to measure it by."),
]
Optimize = Annotated[
    Literal["onnxruntime"] | None,
    typer.Option(help="Use onnxruntime's own attention, which writes the cache in place."),
]
Logits = Annotated[
    Literal["all", "last"],
    typer.Option(help="Return the scores of all tokens, or of the last one, which generation needs."),
]
Weights = Annotated[
    Literal["auto", "memory", "stream"],
    typer.Option(help="Load all weights, or read them layer by layer; auto: by free memory."),
]
UnmatchedWeights = Annotated[
    Literal["refuse", "unused", "random"],
    typer.Option(help="Weights that do not match the model class: refuse, drop unused ones, or use random ones."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the Python files of MODEL (auto_map). Only if you trust their author."
    ),
]
WordTimes = Annotated[
    bool,
    typer.Option("--word-times", help="Let the files of a Whisper return what times of words are read off."),
]
Layout = Annotated[
    Literal["flat", "transformers.js", "genai"],
    typer.Option(
        help="How the files are laid out: flat, as transformers.js looks for them (onnx/model_q4.onnx), or split as "
        "onnxruntime-genai runs them (Whisper)."
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="A LoRA adapter that generate --adapter NAME switches on; several for several.",
    ),
]
RoomForAdapters = Annotated[
    bool,
    typer.Option("--room-for-adapters", help="Leave room in all linear layers for adapters that are added later."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the contents of DIR.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
