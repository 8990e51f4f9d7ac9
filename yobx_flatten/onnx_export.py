"""Export with proof to an ONNX file: the program of :mod:`.export`, converted, and replayed in onnxruntime."""

from __future__ import annotations

import importlib.util
import logging
import os
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from .arguments import check_arguments, check_cases
from .errors import MissingDependencyError
from .export import Export, ExportedModel, following
from .onnx_file import write_onnx
from .onnx_replay import OnnxSteps
from .replay import Case, replay

__all__ = ["OnnxExport", "export_onnx"]

logger = logging.getLogger("yobx_flatten")


def export_onnx(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    path: str | os.PathLike[str] = "model.onnx",
    *,
    dynamic_shapes: Any = "auto",
    cases: Iterable[Case] | None = None,
    steps: int = 3,
    tolerance: float = 1e-4,
    opset_version: int | None = None,
) -> ExportedModel:
    """Export a module to an ONNX file and replay it in onnxruntime, as a loop over its own outputs.

    Inputs and outputs have the names that tools for generation know: ``past_key_values.0.key``, ``present.0.key``.
    Weights of 2 GB and more are stored beside the file.

    Args:
        module: the module, in the mode (``eval()``) it is to be exported in.
        args: example positional arguments.
        kwargs: example keyword arguments; caches among them. See :func:`export_program`.
        path: the file to write. It appears when the conversion is done, not half-written.
        dynamic_shapes: see :func:`export_program`.
        cases: see :func:`export_program`.
        steps: see :func:`export_program`.
        tolerance: see :func:`export_program`.
        opset_version: as for ``torch.onnx.export``.

    Returns:
        The program, the path and a report.

    Raises:
        InvalidArgumentError: when the module does not take these arguments, or something is not what it should be.
        NotRegisteredError: when an input holds an object of a class that nobody registered.
        DynamicShapesError: when ``dynamic_shapes`` does not fit the inputs.
        MissingDependencyError: when onnx, onnxscript or onnxruntime is not installed.
        ReplayError: when a case fails or differs by more than ``tolerance``; the file is there to be looked at.
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependencyError(f"export_onnx needs {library}:\n    pip install 'yobx-flatten[onnx]'")
    check_arguments(module, args, kwargs)
    cases = cases if cases is None else check_cases(cases)
    export = OnnxExport(module, args, dict(kwargs or {}), dynamic_shapes, steps, tolerance)
    with export.block():
        program = export.to_program(strict=False)
        cases = export.replay_program(program, cases)
        export.to_onnx(program, pathlib.Path(path), opset_version)
        export.replay_onnx(pathlib.Path(path), cases)
    return export.finish(program, pathlib.Path(path))


class OnnxExport(Export):
    """An export that goes on to a file."""

    def to_onnx(self, program: ExportedProgram, path: pathlib.Path, opset_version: int | None) -> None:
        """Convert the program."""
        logger.info("converting %s to ONNX", self.report.module)
        start = time.perf_counter()
        names = self.report.input_names, self.report.output_names
        self.report.onnx_bytes = write_onnx(program, path, *names, opset_version)
        self.report.onnx_seconds = time.perf_counter() - start

    def replay_onnx(self, path: pathlib.Path, cases: Sequence[Case]) -> None:
        """Replay the cases with the file."""
        if self.written:
            self.report.remarks.append(
                f"an ONNX file keeps nothing from call to call: {', '.join(self.written)} is at every call what it was "
                "at the export."
            )
        if self.drawing:
            self.report.remarks.append(
                "onnxruntime draws random numbers of its own, so that differences to it mean nothing: export what "
                "draws none (module.eval()), or pass them as an input."
            )
        steps = OnnxSteps(path, self.input_leaves, self.cache_is)
        for case in cases:
            logger.info("replaying %s with onnxruntime", case.name)
            self.report.cases.append(
                replay(
                    "onnxruntime",
                    steps.run,
                    self.module,
                    case,
                    following(),
                    steps.feed_back,
                    taken=self.input_leaves,
                    written=self.written,
                )
            )
