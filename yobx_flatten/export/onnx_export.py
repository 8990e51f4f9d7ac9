"""Export a module to an ONNX file, and replay it in onnxruntime."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

from ..declare.scopes import options_in_use, register_flattening_functions
from ..errors.dependencies import require
from ..recipe.aliases import DynamicShapes
from ..trees.arguments import check_arguments
from .example.example import make_example
from .exported_model import ExportedModel, finish
from .onnx.file import unproven_file
from .proof.levels import Proof
from .proof.replay import Case
from .quantization.options import Quantization, WeightBits
from .runtimes.file_options import FileOptions
from .runtimes.write import write_file
from .source import Asked, prove, traced_example

__all__ = ["export_onnx"]


def export_onnx(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    path: str | os.PathLike[str] = "model.onnx",
    *,
    dynamic_shapes: DynamicShapes = "auto",
    cases: Iterable[Case] | None = None,
    steps: int = 3,
    tolerance: float | None = None,
    opset_version: int | None = None,
    keep_failed: str | os.PathLike[str] | None = None,
    counter_input: bool = False,
    proof: Proof = "auto",
    quantize: WeightBits | Quantization | None = None,
    optimize: Literal["onnxruntime"] | None = None,
    translations: Mapping[Any, Callable[..., Any]] | None = None,
) -> ExportedModel:
    """Export a module to an ONNX file and replay it in onnxruntime, as a loop over its own outputs.

    Inputs, outputs and axes have the names that tools for generation know: ``past_key_values.0.key``,
    ``present.0.key``, ``past_sequence_length``. Weights of 256 MB and more are stored in a second file next to it,
    ``model.onnx.data``, tensor by tensor; onnxruntime maps that file into memory.

    Args:
        module: the module, in the mode (``eval()``) it is to be exported in.
        args: example positional arguments; none by default.
        kwargs: example keyword arguments, with caches among them; none by default. See :func:`export_program`.
        path: the file to write, ``"model.onnx"`` by default. It is replaced only after the replay has passed.
        dynamic_shapes: see :func:`export_program`. Names in it are names of axes in the file.
        cases: see :func:`export_program`.
        steps: see :func:`export_program`; 3 by default.
        tolerance: see :func:`export_program`; by default 1e-4, and for weights in half precision what the type costs.
        opset_version: version of ONNX's operators; ``None``, the default, for the newest that the installed onnxruntime
            computes right, and for the exporter's own choice where the replay of such a file fails.
        keep_failed: a folder for a file that failed its replay; ``None``, the default, removes such a file.
        counter_input: for a cache of which every layer slides: whether to have an input ``past_key_values.length``, as
            the program has. By default the file reads from ``attention_mask``, which tools feed, how many were seen.
        proof: what is replayed, see :func:`export_program`. ``"sample"`` replays the file, and not the program in
            addition; with ``"none"`` the file is not even loaded.
        quantize: ``"int8"`` or ``"int4"`` to store the weights of projections in blocks of so many bits, with a scale
            and a zero point each; a :class:`.quantization.Quantization` for other blocks, another threshold, or a text
            for the perplexity. ``report.quality`` states how far the file is from the model. ``None`` by default.
        optimize: ``"onnxruntime"`` for its own attention, which writes into the memory of the cache instead of copying
            it, for every layer whose cache holds all tokens. Several tokens after others are taken for one row only
            then. ``None``, the default, for the operators of ONNX.
        translations: for operators of your own, functions of onnxscript by operator (``torch.ops.mine.twice.default``),
            as ``custom_translation_table`` of ``torch.onnx.export``. None by default.

    Returns:
        The program, the path and a report.

    Raises:
        InvalidArgumentError: when the module does not take these arguments, or another argument is invalid.
        NotRegisteredError: when an input holds an object of a class that is not registered.
        DynamicShapesError: when ``dynamic_shapes`` does not fit the inputs.
        MissingDependencyError: when onnx, onnxscript or onnxruntime is not installed.
        NoRoomError: when the disk or the memory is too small; this is checked before anything else is done.
        ReplayError: when a case fails or differs by more than ``tolerance``, onnxruntime cannot load the file, or its
            quantised weights change more than is allowed.

    >>> import tempfile
    >>> linear = torch.nn.Linear(3, 2).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_onnx(linear, (torch.zeros(4, 3),), path=f"{folder}/linear.onnx")
    >>> exported.report.input_names, exported.report.ok
    (['input'], True)
    """
    require("onnx", "onnxscript", "onnxruntime", purpose="export_onnx", extra="onnx")
    check_arguments(module, args, kwargs)
    asked = Asked.of(module, cases, steps, tolerance, proof)
    target, folder = pathlib.Path(path), None if keep_failed is None else pathlib.Path(keep_failed)
    options = FileOptions(
        "onnxruntime",
        target,
        "export_onnx",
        quantize=quantize,
        opset_version=opset_version,
        optimize=optimize,
        translations=translations,
        counter_input=counter_input,
        keep_failed=folder,
    ).checked(asked.facts, proof=asked.proof)
    report = asked.report()
    with register_flattening_functions(**options_in_use()):
        example = make_example(module, args, dict(kwargs or {}), dynamic_shapes)
        options.check_example(example)
        with unproven_file(target) as file:
            traced = traced_example(example, report)
            traced.check_cache_outputs(asked.facts.name)
            if traced.readers and asked.proof == "full":
                report.remark("the file was replayed, and not the program: it has no weights of its own.")
            # of a sample the file is replayed alone: it holds what the program does
            source = prove(example, traced, asked, report, runs=asked.proof == "full" and not traced.readers)
            write_file(source, options, file, report)
        return finish(source, report, target)
