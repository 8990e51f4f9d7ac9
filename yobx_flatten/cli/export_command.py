"""``yobx-flatten export``."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Literal

import typer

from ..export.quantization import Quantization
from ..model_folder.source import MODEL_NAMES, FoundModel, find_model
from ..model_folder.tasks import TASKS
from ..model_folder.write import ExportedFolder, check_target, export_folder
from ..terminal.failures import UserError
from ..terminal.output import progress, say, say_json

__all__ = ["export"]

_TASKS = ", ".join(("auto", *TASKS))


def export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=MODEL_NAMES,
        ),
    ],
    output: Annotated[pathlib.Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")],
    target: Annotated[
        Literal["onnxruntime", "torch", "aotinductor", "executorch", "openvino"] | None,
        typer.Option(help="Runtime of the files; by default that of --to."),
    ] = None,
    task: Annotated[str, typer.Option(metavar="TASK", help=f"One of {_TASKS}.")] = "auto",
    to: Annotated[Literal["onnx", "program"], typer.Option(help="onnxruntime's files, or torch.export's.")] = "onnx",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"],
        typer.Option(help="Type of the weights; bfloat16 for programs, or with --proof none."),
    ] = "float32",
    opset: Annotated[
        int | None, typer.Option(min=18, help="Operators of ONNX; by default the fastest that are right.")
    ] = None,
    dynamic: Annotated[
        Literal["all", "length"], typer.Option(help="What may vary: batch and lengths, or lengths only.")
    ] = "all",
    batch: Annotated[int, typer.Option(min=1, help="Number of rows, with --dynamic length.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Most rows, with --max-length.")] = 4,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Most tokens in the cache: ExecuTorch plans its memory for them.")
    ] = None,
    proof: Annotated[
        Literal["auto", "full", "sample", "none"],
        typer.Option(help="What is replayed; auto: full below 1 GB of weights, sample above. none: unproven."),
    ] = "auto",
    quantize: Annotated[
        Literal["int8", "int4", "keep"] | None,
        typer.Option(help="Weights of projections in 8 or 4 bits; keep: the integers that they were made of."),
    ] = None,
    perplexity_ratio: Annotated[
        float | None,
        typer.Option(help="With --quantize: largest perplexity, relative to the model's; int8 1.01, int4 1.1."),
    ] = None,
    optimize: Annotated[
        Literal["onnxruntime"] | None,
        typer.Option(help="Attention of that library, which writes into the memory of the cache."),
    ] = None,
    logits: Annotated[
        Literal["all", "last"], typer.Option(help="Scores of all tokens, or of the last, which generation needs.")
    ] = "all",
    weights: Annotated[
        Literal["auto", "memory", "stream"],
        typer.Option(help="Load all weights, or read them layer by layer; auto: by the free memory."),
    ] = "auto",
    unmatched_weights: Annotated[
        Literal["refuse", "unused", "random"],
        typer.Option(help="Weights that MODEL has and its class not: left out; or lacks: random. refuse: an error."),
    ] = "refuse",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python files of MODEL (auto_map): you know who wrote them.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what DIR holds.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Export a model of transformers to a folder that generates, and prove that it does.

    The files have the names and inputs that generation tools know; configuration and tokenizer are next to them. Each
    file is replayed against the model below, at and past its window, and 40 tokens are generated as model.generate
    does. DIR appears when all of that is right. Exit status: 0 right; 1 a file differs from the model, nothing written.
    With --quantize a file is also compared with the model in scores, greedy tokens and perplexity on a text of Python.
    Of a model with 1 GB of weights or more a sample is replayed, and 8 tokens are generated (--proof).
    """
    if perplexity_ratio is not None and quantize is None:
        raise UserError("--perplexity-ratio is of quantised weights. Add --quantize int8 or --quantize int4.")
    check_target(output, overwrite)
    with progress(f"loading {model}"):
        found = find_model(model, trust_remote_code=trust_remote_code)
        done = export_folder(
            found,
            output,
            task=task,
            to=to,
            opset_version=opset,
            batch=None if dynamic == "all" else batch,
            overwrite=overwrite,
            proof=proof,
            quantize=None if quantize is None else Quantization(quantize, perplexity_ratio=perplexity_ratio),
            optimize=optimize,
            logits=logits,
            target=target,
            bounds=None if max_length is None else {"batch": max_batch, "length": max_length},
            dtype=dtype,
            weights=weights,
            unmatched_weights=unmatched_weights,
        )
    if json:
        say_json(_as_dict(done, found))
    else:
        if not found.has_weights:
            say(f"{found}\n")
        say(str(done))
        say(f"\nNext:  yobx-flatten verify {output}" + _next(done, output))
    return 0


def _next(done: ExportedFolder, output: pathlib.Path) -> str:
    return f'\n       yobx-flatten generate {output} --prompt "..."' if "text" in done.task else ""


def _as_dict(done: ExportedFolder, found: FoundModel) -> dict[str, object]:
    return {
        "path": str(done.path),
        "model": found.name,
        "random_weights": not found.has_weights,
        "task": done.task,
        "files": {
            name: {
                "max_difference": report.max_difference,
                "inputs": report.input_names,
                "outputs": report.output_names,
                "bytes": report.onnx_bytes or report.file_bytes,
                "planned_bytes": report.planned_bytes,
                "remarks": report.remarks,
                "proof": report.proof,
                "seconds": report.seconds,
                "peak_growth": report.peak_growth,
                "quality": None if report.quality is None else report.quality.as_dict(),
            }
            for name, report in done.reports.items()
        },
        "checks": [dataclasses.asdict(check) for check in done.verified.checks],
    }
