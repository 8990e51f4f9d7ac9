"""``yobx-flatten export``: export a model of transformers to a folder."""

from __future__ import annotations

import dataclasses
import pathlib

from ..export.quantization.options import Quantization
from ..model_folder.source.find import FoundModel, find_model
from ..model_folder.write import ExportedFolder, check_target, export_folder
from ..terminal.failures import UserError
from ..terminal.output import progress, say, say_json
from . import export_options as option
from .adapter_command import named_folders

# those whose folders write text after text
_WRITES = ("text-generation", "text2text-generation", "image-text-to-text")


def export(
    model: option.Model,
    output: option.Output,
    target: option.Target = None,
    task: option.Task = "auto",
    to: option.To = "onnx",
    dtype: option.Dtype = "float32",
    opset: option.Opset = None,
    dynamic: option.Dynamic = "all",
    batch: option.Batch = 1,
    max_batch: option.MaxBatch = 4,
    max_length: option.MaxLength = None,
    proof: option.Proof = "auto",
    quantize: option.Quantize = None,
    perplexity_ratio: option.PerplexityRatio = None,
    activations: option.Activations = "auto",
    calibration: option.Calibration = None,
    optimize: option.Optimize = None,
    logits: option.Logits = "all",
    weights: option.Weights = "auto",
    unmatched_weights: option.UnmatchedWeights = "refuse",
    trust_remote_code: option.TrustRemoteCode = False,
    word_times: option.WordTimes = False,
    layout: option.Layout = "flat",
    adapter: option.Adapters = None,
    room_for_adapters: option.RoomForAdapters = False,
    overwrite: option.Overwrite = False,
    json: option.AsJson = False,
) -> int:
    """Export a transformers model to a folder that generates text, and check it against the model.

    Files have the names and inputs that generation tools know, with configuration and tokenizer next to them. Each is
    replayed against the model, and 40 tokens are generated as model.generate does; from 1 GB of weights, 8 (--proof).
    DIR appears when all of that is right. Exit status: 0 right; 1 a file differs from the model, nothing written.
    """
    quantization = _quantization(quantize, perplexity_ratio, activations)
    adapters = named_folders(adapter) if adapter else {} if room_for_adapters else None
    if adapter and room_for_adapters:
        raise UserError("--adapter leaves room in the layers of these adapters, --room-for-adapters in all: pass one.")
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
    say_json(_as_dict(done, found)) if json else _show(done, found, output)
    return 0


def _quantization(
    quantize: option.Quantize, perplexity_ratio: option.PerplexityRatio, activations: option.Activations
) -> Quantization | None:
    if quantize is not None:
        return Quantization(quantize, perplexity_ratio=perplexity_ratio, activations=activations)
    if perplexity_ratio is not None:
        raise UserError("--perplexity-ratio is for quantised weights. Add --quantize int8 or --quantize int4.")
    if activations != "auto":
        raise UserError(
            "--activations is for quantised weights. Add --quantize keep, --quantize int8 or --quantize int4."
        )
    return None


def _show(done: ExportedFolder, found: FoundModel, output: pathlib.Path) -> None:
    if not found.has_weights:
        say(f"{found}\n")
    say(str(done))
    following = f'\n       yobx-flatten generate {output} --prompt "..."' if done.task in _WRITES else ""
    say(f"\nNext:  yobx-flatten verify {output}{following}")


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
