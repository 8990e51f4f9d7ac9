"""Export a folder of a model with one exporter, as its documentation does: ``oracle_exporters.py EXPORTER IN OUT``.

An exporter may want other libraries than ours, so this file is also run by another Python: only our own export imports
anything of this repository. It prints a line of JSON: ``written``, ``refused`` (the exporter states that it does not
take the model), ``not written``, or ``other model`` (its transformers returns other values for the same folder).
"""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import runpy
import sys
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["EXAMPLE", "EXPORTERS", "WANTS", "export", "load"]

EXAMPLE = "example.pt"
"""Inputs of a call without a cache, and what the model returns first, next to the model."""


def load(folder: pathlib.Path) -> Any:
    """Return the model of a folder, by the class that its configuration names."""
    import transformers

    kind = getattr(transformers, json.loads((folder / "config.json").read_text("utf-8"))["architectures"][0])
    return kind.from_pretrained(folder).eval()


def _inputs(folder: pathlib.Path) -> dict[str, Any]:
    import torch

    return dict(torch.load(folder / EXAMPLE, weights_only=True)["inputs"])


def _is_other_model(folder: pathlib.Path) -> bool:
    """Return whether the transformers here computes something else than the one that wrote the folder."""
    import torch

    held = torch.load(folder / EXAMPLE, weights_only=True)
    with torch.no_grad():
        found = load(folder)(**held["inputs"], return_dict=False)[0]
    return found.shape != held["first"].shape or not torch.allclose(found, held["first"], atol=1e-3)


def _torch_onnx(folder: pathlib.Path, out: pathlib.Path) -> None:
    """`torch.onnx.export(dynamo=True)`: the sizes that vary are named, rows and lengths; the call has no cache."""
    import torch

    model, inputs = load(folder), _inputs(folder)
    for module in model.modules():  # a decoder may have a configuration of its own
        if hasattr(module, "config"):
            module.config.use_cache = False
    lengths = {name: f"{'decoder_' * name.startswith('decoder')}sequence" for name in inputs}
    shapes = {name: {0: "batch", **({1: lengths[name]} if value.dim() == 2 else {})} for name, value in inputs.items()}
    torch.onnx.export(model, (), str(out / "model.onnx"), kwargs=inputs, dynamic_shapes=shapes, dynamo=True)


def _transformers(folder: pathlib.Path, out: pathlib.Path) -> None:
    """`OnnxExporter` of transformers with dynamic sizes; the stages of a generation where the model generates."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    model, exporter, inputs = load(folder), OnnxExporter(), _inputs(folder)
    call = exporter.export_for_generation if model.can_generate() else exporter.export
    call(model, inputs, config=OnnxConfig(dynamic=True)).save_pretrained(str(out))


def _optimum(folder: pathlib.Path, out: pathlib.Path) -> None:
    """`optimum-cli export onnx`; the task of a model in a folder has to be stated."""
    from optimum.exporters.onnx import main_export

    (kind,) = json.loads((folder / "config.json").read_text("utf-8"))["architectures"]
    task = next((task for ending, task in _TASKS.items() if kind.endswith(ending)), "feature-extraction")
    main_export(str(folder), output=str(out), task=task, do_validation=False)


def _genai(folder: pathlib.Path, out: pathlib.Path) -> None:
    """The builder of onnxruntime-genai: float32, for the CPU."""
    how = ["-i", str(folder), "-o", str(out), "-p", "fp32", "-e", "cpu", "-c", str(out.parent / "cache")]
    sys.argv = ["builder", *how]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")


def _mobius(folder: pathlib.Path, out: pathlib.Path) -> None:
    """`mobius build`."""
    from mobius import build

    build(str(folder), dtype="f32").save(str(out))


def _ours(folder: pathlib.Path, out: pathlib.Path) -> None:
    """`export_folder` without its proof: a wrong file would be written, and found as those of others are."""
    from yobx_flatten import export_folder

    export_folder(str(folder), out, proof="none", overwrite=True)


_TASKS = {
    "ForCausalLM": "text-generation-with-past",
    "LMHeadModel": "text-generation-with-past",
    "WhisperForConditionalGeneration": "automatic-speech-recognition-with-past",
    "ForConditionalGeneration": "text2text-generation-with-past",
    "ForMaskedLM": "fill-mask",
    "ForPreTraining": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForCTC": "automatic-speech-recognition",
}

EXPORTERS: dict[str, Callable[[pathlib.Path, pathlib.Path], None]] = {
    "yobx-flatten": _ours,
    "transformers exporters": _transformers,
    "optimum-onnx": _optimum,
    "torch.onnx": _torch_onnx,
    "onnxruntime-genai": _genai,
    "mobius-onnx": _mobius,
}

WANTS = {
    "yobx-flatten": ("torch", "transformers"),
    "transformers exporters": ("transformers",),
    "optimum-onnx": ("optimum-onnx", "transformers"),
    "torch.onnx": ("torch", "transformers"),
    "onnxruntime-genai": ("onnxruntime-genai", "transformers"),
    "mobius-onnx": ("mobius-onnx", "transformers"),
}
"""By exporter: the libraries whose versions are recorded."""

_REFUSALS = (
    *("not supported", "unsupported", "not implemented", "only support", "unrecognized", "not yet supported"),
    *("does not support", "unknown model type", "not registered", "no known task", "custom or unsupported"),
)


def export(name: str, folder: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Export, and return what came of it.

    Args:
        name: the exporter.
        folder: holds the model.
        out: gets the files.
    """
    warnings.simplefilter("ignore")
    out.mkdir(parents=True, exist_ok=True)
    versions = {library: importlib.metadata.version(library) for library in WANTS[name]}
    found: dict[str, Any] = {"versions": versions, "state": "written", "why": ""}
    if _is_other_model(folder):
        return {**found, "state": "other model", "why": "its transformers returns other values for the checkpoint"}
    try:
        EXPORTERS[name](folder, out)
    except BaseException as error:  # whatever an exporter raises is the result of its cell, SystemExit too
        while error.__cause__ is not None and type(error).__module__.startswith("torch.onnx"):
            error = error.__cause__
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        refused = isinstance(error, NotImplementedError) or any(word in str(error).lower() for word in _REFUSALS)
        state = "refused" if refused else "not written"
        if "tokenizer" in str(error):  # the small checkpoint has one of bytes, no fault of the exporter
            return {
                **found,
                "state": "not asked",
                "why": "it wants a tokenizer that the checkpoint lacks",
            }
        return {**found, "state": state, "why": f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]}
    return found


if __name__ == "__main__":
    found = export(sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
    sys.stdout.write(f"\n{json.dumps(found)}\n")
