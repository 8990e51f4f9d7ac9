"""Export a piece of a model to its file, and prove it: as ONNX, as a program, or for another runtime."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from typing import Any

from ..errors import FlattenError, GenerationError, InvalidArgumentError, ReplayError
from ..errors.log import STEP
from ..errors.messages import first_line
from ..export.example.bounds import Bounds
from ..export.onnx_export import export_onnx
from ..export.program_export import export_program
from ..export.proof.report import ExportReport
from ..recipe.aliases import TransformersModel
from ..trees.shapes import dynamic_shapes
from .pieces.text import Piece
from .targets import fitting_cases, write_piece

__all__ = ["export_piece"]

# how torch begins what a program states of sizes that it was not traced for
_OF_SIZES = ("Guard failed: ", "Runtime assertion failed for expression ")

logger = logging.getLogger("yobx_flatten")


def export_piece(
    model: TransformersModel,
    piece: Piece,
    path: pathlib.Path,
    batch: int | None,
    options: dict[str, Any],
    runtime: str,
    bounds: Bounds | None,
) -> ExportReport:
    """Export a piece, with pictures of one size where those of others do not become a file."""
    # bounds: the largest sizes; `None` without them

    def export(one: Piece) -> ExportReport:
        report = _written(one, path, batch, options, runtime, bounds)
        report.remark(*one.remarks)
        return report

    logger.info("exporting %s", path.name, extra=STEP)
    if piece.narrower is not None:
        try:
            return export(piece)
        except (OSError, MemoryError, InvalidArgumentError):
            raise
        except Exception as error:  # of the trace, the exporter, the replay: pictures of one size may pass them all
            reason = first_line(error)[:200]
        remark = f"pictures are of the example's size: others do not become a file ({reason})."
        piece = dataclasses.replace(piece, dynamic_shapes=piece.narrower, remarks=(*piece.remarks, remark))
    try:
        return export(piece)
    except ReplayError as error:
        if not any(words in str(error) for words in _OF_SIZES):
            raise
        raise ReplayError(
            f"{type(model).__qualname__} does not become {path.name} for any size. For those of your own inputs: "
            f"export_onnx(model, kwargs=inputs, path=..., dynamic_shapes=None). {error}",
            error.report,
        ) from error
    except (FlattenError, OSError, MemoryError):
        raise
    except Exception as error:  # of torch's trace, of the model inside it, of the exporter: each has its classes
        if "No space left on device" in str(error):  # libraries in C++ wrap the system's error
            raise
        raise GenerationError(
            f"{type(model).__qualname__} does not become {path.name} ({type(error).__name__}: "
            f"{first_line(error)[:300]}). Export it with your own inputs, export_onnx(model, kwargs=inputs, path=...), "
            "or the calls of a run: with record_calls(model) as calls: ..."
        ) from error


def _written(
    piece: Piece,
    path: pathlib.Path,
    batch: int | None,
    options: dict[str, Any],
    runtime: str,
    bounds: Bounds | None,
) -> ExportReport:
    shapes: Any = piece.dynamic_shapes
    if batch is not None and shapes is not None and piece.has_rows:
        shapes = _with_fixed_batch(dynamic_shapes(dict(piece.kwargs)) if shapes == "auto" else shapes)
    if runtime not in ("onnxruntime", "torch"):
        return write_piece(runtime, piece, path, shapes, bounds, **options)
    how: dict[str, Any] = {"dynamic_shapes": shapes, "cases": piece.cases, **options}
    if runtime == "onnxruntime":
        return export_onnx(piece.module, (), piece.kwargs, path, **how).report
    del how["quantize"]  # a program has none
    how |= {"cases": fitting_cases(piece, bounds), "bounds": None if bounds is None else vars(bounds)}
    exported = export_program(piece.module, (), piece.kwargs, **how)
    exported.save(path)
    return exported.report


def _with_fixed_batch(shapes: Any) -> Any:
    """A specification in which the first axis of every tensor stays as it is."""
    if isinstance(shapes, dict) and all(isinstance(key, int) for key in shapes):
        return {axis: dim for axis, dim in shapes.items() if axis != 0}
    if isinstance(shapes, dict):
        return {name: _with_fixed_batch(below) for name, below in shapes.items()}
    return [_with_fixed_batch(below) for below in shapes] if isinstance(shapes, (list, tuple)) else shapes
