"""``yobx-flatten export``."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Literal

import typer

from ..export.quantization.options import Quantization
from ..model_folder.pieces.tasks import TASKS
from ..model_folder.source.find import MODEL_NAMES, FoundModel, find_model
from ..model_folder.write import ExportedFolder, check_target, export_folder
from ..terminal.failures import UserError
from ..terminal.output import progress, say, say_json

__all__ = ["export"]

_TASKS = ", ".join(("auto", *TASKS))
# those whose folders write text after text
_WRITES = ("text-generation", "text2text-generation", "image-text-to-text")


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
        typer.Option(help="Target runtime (default: the runtime of --to)."),
    ] = None,
    task: Annotated[str, typer.Option(metavar="TASK", help=f"One of {_TASKS}.")] = "auto",
    to: Annotated[Literal["onnx", "program"], typer.Option(help="Write ONNX files or torch.export programs.")] = "onnx",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"],
        typer.Option(help="Data type of the weights; bfloat16 only for programs, or with --proof none."),
    ] = "float32",
    opset: Annotated[
        int | None, typer.Option(min=18, help="ONNX opset (default: the fastest that passes the proof).")
    ] = None,
    dynamic: Annotated[
        Literal["all", "length"], typer.Option(help="Dynamic sizes: batch and lengths, or lengths only.")
    ] = "all",
    batch: Annotated[int, typer.Option(min=1, help="Batch size, with --dynamic length.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Largest batch size, with --max-length.")] = 4,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Largest number of tokens in the cache; ExecuTorch plans memory for it.")
    ] = None,
    proof: Annotated[
        Literal["auto", "full", "sample", "none"],
        typer.Option(help="How much is checked against the model; auto: full below 1 GB of weights, sample above."),
    ] = "auto",
    quantize: Annotated[
        Literal["int8", "int4", "keep"] | None,
        typer.Option(help="Weights of projections in 8 or 4 bits; keep: the integers that they were made of."),
    ] = None,
    perplexity_ratio: Annotated[
        float | None,
        typer.Option(help="With --quantize: largest allowed perplexity relative to the model (int8: 1.01, int4: 1.1)."),
    ] = None,
    calibration: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="With --quantize: your prompts, one in each line, to measure it by."),
    ] = None,
    optimize: Annotated[
        Literal["onnxruntime"] | None,
        typer.Option(help="Use onnxruntime's own attention, which writes the cache in place."),
    ] = None,
    logits: Annotated[
        Literal["all", "last"],
        typer.Option(help="Return the scores of all tokens, or of the last one, which generation needs."),
    ] = "all",
    weights: Annotated[
        Literal["auto", "memory", "stream"],
        typer.Option(help="Load all weights, or read them layer by layer; auto: by free memory."),
    ] = "auto",
    unmatched_weights: Annotated[
        Literal["refuse", "unused", "random"],
        typer.Option(help="Weights that do not match the model class: refuse, drop unused ones, or use random ones."),
    ] = "refuse",
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run the Python files of MODEL (auto_map). Only if you trust their author."
        ),
    ] = False,
    word_times: Annotated[
        bool,
        typer.Option("--word-times", help="Let the files of a Whisper return what times of words are read off."),
    ] = False,
    layout: Annotated[
        Literal["flat", "transformers.js"],
        typer.Option(help="Where the files are: flat, or as transformers.js looks for them (onnx/model_q4.onnx)."),
    ] = "flat",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the contents of DIR.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Export a transformers model to a folder that generates text, and check it against the model.

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
            calibration=calibration,
            optimize=optimize,
            logits=logits,
            target=target,
            bounds=None if max_length is None else {"batch": max_batch, "length": max_length},
            dtype=dtype,
            weights=weights,
            unmatched_weights=unmatched_weights,
            layout=layout,
            word_times=word_times,
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
    return f'\n       yobx-flatten generate {output} --prompt "..."' if done.task in _WRITES else ""


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
