"""Export one part of a model to its file, and check it: as ONNX, a program, or for another runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import FlattenError, GenerationError, InvalidArgumentError, ReplayError
from ..errors.failures import raised_as, result_or
from ..errors.log import STEP
from ..errors.messages import first_line
from ..export.exported_model import source_of
from ..export.onnx_export import export_onnx
from ..export.program_export import export_program
from ..export.proof.case import Proof, sampled
from ..export.proof.report import ExportReport
from ..export.quantization.options import Quantization
from ..export.room import Adapter
from ..export.runtimes.file_options import FileOptions
from ..export.runtimes.write import write_for
from ..export.source import left_out, shortened
from ..trees.shapes import dynamic_shapes
from .pieces.text import Piece
from .targets import FolderFormat, fitting_cases

# how torch begins what a program states of sizes that it was not traced for
_OF_SIZES = ("Guard failed: ", "Runtime assertion failed for expression ")

logger = logging.getLogger("yobx_flatten")


def export_piece(
    model: str,
    piece: Piece,
    path: pathlib.Path,
    form: FolderFormat,
    proof: Proof,
    quantization: Quantization | None = None,
    adapters: Sequence[Adapter] = (),
) -> ExportReport:
    """Export a piece, with pictures of one size where those of others do not become a file."""
    # model: name of the class that the piece is of

    def export(one: Piece) -> ExportReport:
        report = _written(one, path, form, proof, quantization, adapters)
        report.remark(*one.remarks)
        return report

    logger.info("exporting %s", path.name, extra=STEP)
    if piece.narrower is not None:
        # of the trace, the exporter, the replay: pictures of one size may pass them all
        found = result_or(functools.partial(export, piece), lambda error: error)
        if isinstance(found, ExportReport):
            return found
        if isinstance(found, (OSError, MemoryError, InvalidArgumentError)):
            raise found
        remark = f"pictures must have the example's size: exporting other sizes failed ({first_line(found)[:200]})."
        piece = dataclasses.replace(piece, dynamic_shapes=piece.narrower, remarks=(*piece.remarks, remark))

    def failed(error: BaseException) -> GenerationError | None:
        if "No space left on device" in str(error):  # libraries in C++ wrap the system's error
            return None
        return GenerationError(
            f"Exporting {model} to {path.name} failed ({type(error).__name__}: {first_line(error)[:300]}). Export it "
            "with your own inputs, export_onnx(model, kwargs=inputs, path=...), or the calls of a run: with "
            "record_calls(model) as calls: ..."
        )

    # of torch's trace, of the model inside it, of the exporter: each has its classes
    with raised_as(failed, FlattenError, OSError, MemoryError), _for_sizes_of_its_own(model, path):
        return export(piece)


def _written(
    piece: Piece,
    path: pathlib.Path,
    form: FolderFormat,
    proof: Proof,
    quantization: Quantization | None,
    adapters: Sequence[Adapter],
) -> ExportReport:
    """Export a piece with the runtime of the folder, or with ``torch.export`` alone."""
    shapes: Any = piece.dynamic_shapes
    if form.batch is not None and shapes is not None and piece.has_rows:
        shapes = _with_fixed_batch(dynamic_shapes(dict(piece.kwargs)) if shapes == "auto" else shapes)
    how: dict[str, Any] = {"kwargs": piece.kwargs, "dynamic_shapes": shapes}
    if form.runtime == "onnxruntime":
        how |= {"cases": piece.cases, "proof": proof, "quantize": quantization, "adapters": adapters}
        how |= {"opset_version": form.opset_version, "optimize": form.optimize}
        return export_onnx(piece.module, path=path, **how).report
    how["bounds"] = None if form.largest is None else vars(form.largest)
    fitting = fitting_cases(piece, form.largest)
    if form.runtime == "torch":
        exported = export_program(piece.module, cases=fitting, proof=proof, **how)
        exported.save(path)
        return exported.report
    source = source_of(export_program(piece.module, proof="none", **how))  # the file is replayed, and not the program
    example = shortened(source.example, source.example.case(2 if proof == "sample" else 3))
    chosen = [example, *(sampled(fitting) if proof == "sample" else fitting)]
    source = dataclasses.replace(source, cases=[] if proof == "none" else chosen, proof=proof)
    report = write_for(source, FileOptions(form.runtime, path, "export_folder", quantize=quantization))
    report.remark(*left_out(len(piece.cases) - len(fitting)))
    return report


def _with_fixed_batch(shapes: Any) -> Any:
    """A specification in which the first axis of every tensor stays as it is."""
    if isinstance(shapes, dict) and all(isinstance(key, int) for key in shapes):
        return {axis: dim for axis, dim in shapes.items() if axis != 0}
    if isinstance(shapes, dict):
        return {name: _with_fixed_batch(below) for name, below in shapes.items()}
    return [_with_fixed_batch(below) for below in shapes] if isinstance(shapes, (list, tuple)) else shapes


@contextlib.contextmanager
def _for_sizes_of_its_own(model: str, path: pathlib.Path) -> Iterator[None]:
    """Name the way to a file of fixed sizes where a program does not take others."""
    try:
        yield
    except ReplayError as error:
        if not any(words in str(error) for words in _OF_SIZES):
            raise
        raise ReplayError(
            f"{model} cannot be exported to {path.name} for all sizes. For the sizes of your own inputs: "
            f"export_onnx(model, kwargs=inputs, path=..., dynamic_shapes=None). {error}",
            error.report,
        ) from error
