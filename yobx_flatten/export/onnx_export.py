"""Export a module to an ONNX file, and replay it in onnxruntime."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from ..declare.scopes import options_in_use, register_flattening_functions
from ..errors.dependencies import require
from ..recipe.aliases import DynamicShapes
from ..trees.arguments import check_arguments
from .example.example import Example, make_example
from .exported_model import ExportedModel, finish
from .fewer_sizes import with_fewer_sizes
from .onnx.file import unproven_file
from .proof.case import Case, Proof
from .quantization.options import Quantization, WeightBits
from .room import Adapter
from .runtimes.file_options import FileOptions
from .runtimes.write import write_file
from .source import Asked, prove, traced_example


def export_onnx(  # noqa: D417 # arguments that belong together are described together
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
    adapters: Sequence[Adapter] = (),
    loop: bool = True,
) -> ExportedModel:
    """Export a module to an ONNX file, and compare both over several calls in onnxruntime.

    Inputs have the names that tools for generation know. The guide lists :ref:`each option <options-of-export-onnx>`.

    Args:
        module, args, kwargs: the module, in the mode to export, and example arguments; see :func:`export_program`.
        path, keep_failed: the file to write, once the replay has passed, and a folder for a file that failed.
        dynamic_shapes, cases, steps, tolerance, proof, loop: see :func:`export_program`.
        opset_version: version of ONNX's operators; ``None``, the default, for the newest that passes the replay.
        counter_input: whether a cache whose layers all slide has an input ``past_key_values.length``; not by default.
        quantize: ``"int8"``, ``"int4"`` or a :class:`.quantization.Quantization`; ``None``, the default, for neither.
        optimize: ``"onnxruntime"`` for its own attention, which does not copy the cache; ``None`` by default.
        translations: functions of onnxscript for your own operators, by operator; none by default.
        adapters: what :func:`export_folder` proves in addition, see :class:`.room.Adapter`; none by default.

    Returns:
        The program, the path and a report.

    Raises:
        InvalidArgumentError, NotRegisteredError, DynamicShapesError: when arguments do not fit.
        MissingDependencyError, NoRoomError: when a library, disk or memory is missing; this is checked first.
        ReplayError: when a case fails or differs by more than ``tolerance``, or quantised weights change too much.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_onnx(torch.nn.Linear(3, 2).eval(), (torch.zeros(4, 3),), path=f"{folder}/linear.onnx").report.ok
    True
    """
    require("onnx", "onnxscript", "onnxruntime", purpose="export_onnx", extra="onnx")
    check_arguments(module, args, kwargs)
    asked = Asked.of(module, cases, steps, tolerance, proof)
    options = FileOptions(
        "onnxruntime",
        pathlib.Path(path),
        "export_onnx",
        quantize=quantize,
        opset_version=opset_version,
        optimize=optimize,
        translations=translations,
        counter_input=counter_input,
        keep_failed=None if keep_failed is None else pathlib.Path(keep_failed),
        adapters=adapters,
    )
    options = options.checked(asked.facts, proof=asked.proof)

    def export(example: Example, is_fixed: bool) -> ExportedModel:
        report = asked.report()
        with unproven_file(options.path) as file:
            traced = traced_example(example, report)
            if example.loop:
                traced.check_cache_outputs(asked.facts.name)
            if traced.readers and asked.proof == "full":
                report.remark("the file was replayed, and not the program, which has no weights of its own.")
            # of a larger model the file is replayed alone: it holds what the program does
            runs = asked.proof == "full" and not traced.readers
            source = prove(example, traced, asked, report, runs=runs, only_fitting=is_fixed)
            write_file(dataclasses.replace(source, adapters=options.adapters), options, file, report)
        return finish(source, report, options.path)

    with register_flattening_functions(**options_in_use()):
        example = make_example(module, args, dict(kwargs or {}), dynamic_shapes, loop=loop)
        options.check_example(example)
        return with_fewer_sizes(export, example, dynamic_shapes)
