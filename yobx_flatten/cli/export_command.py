"""``yobx-flatten export``: export a Hugging Face model to a folder."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Annotated, Literal

import typer

from ..core.terminal.output import progress, say, say_json
from ..core.terminal.running import UserError
from ..export.quantization import Quantization
from ..model_folder.pieces.tasks import TASKS
from ..model_folder.source.find import MODEL_NAMES, FoundModel, find_model
from ..model_folder.write import ExportedFolder, check_target, export_folder
from .folder_commands import named_folders

# tasks for which `yobx-flatten generate` runs the folder
_WRITES = ("text-generation", "text2text-generation", "image-text-to-text")


def export(
    model: Model,
    output: Output,
    target: Target = None,
    task: Task = "auto",
    to: To = "onnx",
    dtype: Dtype = "float32",
    opset: Opset = None,
    dynamic: Dynamic = "all",
    batch: Batch = 1,
    max_batch: MaxBatch = 4,
    max_length: MaxLength = None,
    proof: Proof = "auto",
    quantize: Quantize = None,
    perplexity_ratio: PerplexityRatio = None,
    activations: Activations = "auto",
    calibration: Calibration = None,
    optimize: Optimize = None,
    logits: Logits = "all",
    weights: Weights = "auto",
    unmatched_weights: UnmatchedWeights = "refuse",
    trust_remote_code: TrustRemoteCode = False,
    word_times: WordTimes = False,
    layout: Layout = "flat",
    adapter: Adapters = None,
    room_for_adapters: RoomForAdapters = False,
    overwrite: Overwrite = False,
    json: AsJson = False,
) -> int:
    """Export a Hugging Face model to a folder of files that generate text, and compare the files with the model.

    The files have the names and inputs that generation tools expect. The outputs of each file are compared with the
    model's outputs, and 40 generated tokens with model.generate (8 tokens for 1 GB of weights or more; --proof changes
    this). DIR is created only if all checks pass. Exit status: 0 all checks passed; 1 a file differs from the model.
    """
    quantization = None
    if quantize is not None:
        quantization = Quantization(quantize, perplexity_ratio=perplexity_ratio, activations=activations)
    elif perplexity_ratio is not None:
        raise UserError("--perplexity-ratio is for quantised weights. Add --quantize int8 or --quantize int4.")
    elif activations != "auto":
        raise UserError(
            "--activations is for quantised weights. Add --quantize keep, --quantize int8 or --quantize int4."
        )
    adapters = named_folders(adapter) if adapter else {} if room_for_adapters else None
    if adapter and room_for_adapters:
        raise UserError("--adapter and --room-for-adapters cannot be combined: pass one of the two options.")
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
            quantize=quantization,
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
            adapters=adapters,
        )
    if json:
        say_json(_as_dict(done, found))
        return 0
    if not found.has_weights:
        say(f"{found}\n")
    say(f"{done}\nCPU time: {time.process_time():.0f} s")
    following = f'\n       yobx-flatten generate {output} --prompt "..."' if done.task in _WRITES else ""
    say(f"\nNext:  yobx-flatten verify {output}{following}")
    return 0


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
                "processor_seconds": report.processor_seconds,
                "peak_growth": report.peak_growth,
                "quality": None if report.quality is None else report.quality.as_dict(),
            }
            for name, report in done.reports.items()
        },
        "checks": [dataclasses.asdict(check) for check in done.verified.checks],
    }


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_NAMES)]
Output = Annotated[pathlib.Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")]
Target = Annotated[
    Literal["onnxruntime", "torch", "aotinductor", "executorch", "openvino"] | None,
    typer.Option(help="Runtime that will run the files (default: onnxruntime; torch with --to program)."),
]
Task = Annotated[str, typer.Option(metavar="TASK", help=f"Task of the model, one of {', '.join(('auto', *TASKS))}.")]
To = Annotated[Literal["onnx", "program"], typer.Option(help="Write ONNX files or torch.export programs.")]
Dtype = Annotated[
    Literal["float32", "float16", "bfloat16"],
    typer.Option(help="Data type of the weights. bfloat16 needs --to program or --proof none."),
]
Opset = Annotated[int | None, typer.Option(min=18, help="ONNX opset (default: the fastest that passes the checks).")]
Dynamic = Annotated[Literal["all", "length"], typer.Option(help="Varying sizes: batch and lengths, or only lengths.")]
Batch = Annotated[int, typer.Option(min=1, help="Batch size, with --dynamic length.")]
MaxBatch = Annotated[int, typer.Option(min=1, help="Largest batch size, with --max-length.")]
MaxLength = Annotated[
    int | None, typer.Option(min=1, help="Largest number of cached tokens, for which ExecuTorch plans memory.")
]
Proof = Annotated[
    Literal["auto", "full", "standard", "sample", "none"],
    typer.Option(help="Number of checks. auto: full below 100 MB of weights, standard below 1 GB, sample above."),
]
Quantize = Annotated[
    Literal["int8", "int4", "keep"] | None,
    typer.Option(
        help="Quantize linear layers to 8 or 4 bits, and compare logits, greedy tokens and perplexity with the "
        "model's. keep: store the integers of a model that is quantized already."
    ),
]
PerplexityRatio = Annotated[
    float | None,
    typer.Option(help="With --quantize: allowed perplexity, as a multiple of the model's (int8: 1.01, int4: 1.1)."),
]
Activations = Annotated[
    Literal["auto", "float", "int8", "split", "token"],
    typer.Option(
        help="With --quantize: precision of the activations. int8 is faster than float; so is split, which keeps "
        "channels of large values in float; token (one scale per token) is fastest for encoders."
    ),
]
Calibration = Annotated[
    pathlib.Path | None,
    typer.Option(metavar="FILE", help="With --quantize: file with one prompt per line, used to measure the quality."),
]
Optimize = Annotated[
    Literal["onnxruntime"] | None,
    typer.Option(help="Use onnxruntime's fused attention, which updates cached keys and values in place."),
]
Logits = Annotated[
    Literal["all", "last"],
    typer.Option(help="Return the logits of all tokens, or only of the last token, which is enough to generate."),
]
Weights = Annotated[
    Literal["auto", "memory", "stream"],
    typer.Option(help="Load all weights at once, or layer by layer to save memory; auto: by free memory."),
]
UnmatchedWeights = Annotated[
    Literal["refuse", "unused", "random"],
    typer.Option(help="If weights do not match the model class: fail, drop extra ones, or also draw missing ones."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the Python files of MODEL (auto_map); use only if you trust their author."
    ),
]
WordTimes = Annotated[
    bool,
    typer.Option("--word-times", help="Whisper: also return the attention weights from which word times are computed."),
]
Layout = Annotated[
    Literal["flat", "transformers.js", "genai"],
    typer.Option(
        help="Names of the files. transformers.js: as that library expects (onnx/model_q4.onnx); genai: files that "
        "onnxruntime-genai needs for Whisper and for models that read images."
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="LoRA adapter to include, which generate --adapter NAME selects; may be repeated.",
    ),
]
RoomForAdapters = Annotated[
    bool, typer.Option("--room-for-adapters", help="Add inputs for LoRA matrices, so that adapters can be added later.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the contents of DIR.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
