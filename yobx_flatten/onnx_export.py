"""Export with proof to an ONNX file: the program of :mod:`.export`, converted, and replayed in onnxruntime."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind

from .arguments import check_arguments, check_cases
from .errors import InvalidArgumentError, MissingDependencyError
from .export import Export, ExportedModel, following
from .huggingface.cases import CACHE_NAMES
from .onnx_file import UnprovenFile, convert, unproven_file
from .onnx_replay import OnnxSteps
from .replay import Case, CaseResult, replay
from .report import tolerance_of
from .storage.ort_values import first_line

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
    tolerance: float | None = None,
    opset_version: int | None = None,
    keep_failed: str | os.PathLike[str] | None = None,
) -> ExportedModel:
    """Export a module to an ONNX file and replay it in onnxruntime, as a loop over its own outputs.

    Inputs, outputs and axes have the names that tools for generation know: ``past_key_values.0.key``,
    ``present.0.key``, ``past_sequence_length``. Weights of 2 GB and more are stored beside the file.

    Args:
        module: the module, in the mode (``eval()``) it is to be exported in.
        args: example positional arguments.
        kwargs: example keyword arguments; caches among them. See :func:`export_program`.
        path: the file to write. It appears when it is proven; until then what was there stays.
        dynamic_shapes: see :func:`export_program`. Names in it are names of axes in the file.
        cases: see :func:`export_program`.
        steps: see :func:`export_program`.
        tolerance: see :func:`export_program`; by default what the type of the weights explains: 1e-4, for float16 6e-2,
            for bfloat16 2e-1.
        opset_version: as for ``torch.onnx.export``.
        keep_failed: a folder for a file that failed its proof, which is removed otherwise.

    Returns:
        The program, the path and a report.

    Raises:
        InvalidArgumentError: when the module does not take these arguments, or something is not what it should be.
        NotRegisteredError: when an input holds an object of a class that nobody registered.
        DynamicShapesError: when ``dynamic_shapes`` does not fit the inputs.
        MissingDependencyError: when onnx, onnxscript or onnxruntime is not installed.
        ReplayError: when a case fails or differs by more than ``tolerance``, or onnxruntime cannot load the file.
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(library) is None:
            raise MissingDependencyError(f"export_onnx needs {library}:\n    pip install 'yobx-flatten[onnx]'")
    check_arguments(module, args, kwargs)
    cases = cases if cases is None else check_cases(cases)
    target = pathlib.Path(path)
    folder = None if keep_failed is None else pathlib.Path(keep_failed)
    if folder is not None and folder.absolute() == target.parent.absolute():
        raise InvalidArgumentError(
            f"keep_failed={os.fspath(folder)!r} is the folder of the file itself, where a file that failed would "
            "replace one that did not. Name another folder."
        )
    tolerance = tolerance_of(module) if tolerance is None else tolerance
    export = OnnxExport(module, args, dict(kwargs or {}), dynamic_shapes, steps, tolerance)
    if export.no_data:
        raise InvalidArgumentError(
            f"export_onnx writes the weights, and {export.no_data}. Load them first; export_program works without."
        )
    with unproven_file(target) as file:
        with export.block():
            program = export.to_program(strict=False)
            cases = export.replay_program(program, cases)
            export.to_onnx(program, file, opset_version)
            export.replay_onnx(program, file.path, cases)
        if export.report.ok:
            file.publish()
            return export.finish(program, target)
        if folder is None:
            otherwise = f'Nothing was written to {target}. To look at the file, pass keep_failed="a folder".'
        else:
            otherwise = f"Nothing was written to {target}. The file that failed is {file.keep(folder)}."
        return export.finish(program, target, f"\n{otherwise}")


class OnnxExport(Export):
    """An export that goes on to a file."""

    def to_onnx(self, program: ExportedProgram, file: UnprovenFile, opset_version: int | None) -> None:
        """Convert the program."""
        logger.info("converting %s to ONNX", self.report.module)
        start = time.perf_counter()
        names = self.report.input_names, self.report.output_names
        self.report.onnx_bytes = file.save(convert(program, *names, opset_version, self.axis_names))
        self.report.onnx_seconds = time.perf_counter() - start

    def replay_onnx(self, program: ExportedProgram, path: pathlib.Path, cases: Sequence[Case]) -> None:
        """Replay the cases with the file."""
        self.remark_on_file()
        types = zip(self.report.output_names, _output_types(program), strict=True)
        pairs = [name for name, dtype in types if dtype is not None and dtype.is_complex]
        try:
            steps = OnnxSteps(path, self.input_leaves, self.cache_is, pairs)
        except Exception as error:  # onnxruntime has no base class for its errors
            self.report.cases.append(CaseResult("(loading)", "onnxruntime", 0, {}, 0.0, self.why_not_loaded(error)))
            return
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

    def remark_on_file(self) -> None:
        """Say what the file cannot do although the module can."""
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
        takes = set(inspect.signature(self.module.forward).parameters) & set(CACHE_NAMES)
        can_generate: Any = getattr(self.module, "can_generate", None)
        generates = callable(can_generate) and can_generate()
        fed = tuple(f"{name}." for name in takes)
        if generates and takes and not any(name.startswith(fed) for name in self.report.input_names):
            self.report.remarks.append(
                "this file takes no cache: each call reads all tokens from the first on. For one that goes on from a "
                "cache: export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=...), or "
                "export_folder(model, folder)."
            )

    def why_not_loaded(self, error: Exception) -> str:
        """What onnxruntime says of a file that it does not load, and what to do about it."""
        said = f"{type(error).__name__}: {first_line(error)[:300]}"
        weights = {str(tensor.dtype).removeprefix("torch.") for tensor in self.module.parameters()}
        half = sorted(weights & {"bfloat16", "float16"})
        if "NOT_IMPLEMENTED" in said and half:
            said += (
                f"\n    onnxruntime lacks kernels for {half[0]} on the CPU, so nothing can be proven there. Export "
                'in float32 (or float16), or keep it for another provider: keep_failed="a folder"'
            )
        return said


def _output_types(program: ExportedProgram) -> list[torch.dtype | None]:
    """The type of the elements of every output of the graph."""
    names = [
        spec.arg.name
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.USER_OUTPUT and not isinstance(spec.arg, ConstantArgument)
    ]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return [getattr(values.get(name), "dtype", None) for name in names]
