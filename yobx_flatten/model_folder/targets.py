"""The runtime of a folder, its file names, and the largest sizes where the runtime needs them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from ..errors import InvalidArgumentError
from ..export.example.bounds import Bounds
from ..export.exported_model import source_of
from ..export.program_export import export_program
from ..export.proof.levels import sampled
from ..export.proof.replay import Case
from ..export.proof.report import ExportReport
from ..export.quantization.options import Quantization
from ..export.runtimes.file_options import FileOptions, check_libraries
from ..export.runtimes.write import write_for
from ..export.source import left_out, shortened
from ..runners.open import check_runtime
from ..trees.shapes import dynamic_shapes
from .pieces.text import Piece

__all__ = [
    "FORMATS",
    "Target",
    "choose_bounds",
    "choose_target",
    "fitting_cases",
    "fitting_text",
    "room_for_tokens",
    "write_piece",
]

Target = Literal["onnxruntime", "torch", "aotinductor", "executorch", "openvino"]
"""Runtimes that folders are written for."""

FORMATS: Mapping[str, str] = {
    "onnxruntime": "onnx",
    "torch": "program",
    "aotinductor": "aotinductor",
    "executorch": "executorch",
    "openvino": "openvino",
}
"""By runtime: the format of its files, as the manifest names it."""

_PROMPT = 9  # tokens of the prompt that is generated from


def choose_bounds(given: Mapping[str, int] | None, rows: int | None) -> Bounds | None:
    """Return the bounds of a folder, with 4 rows by default."""
    # given: `{"batch": 4, "length": 512}`, and `"new"` if it is less than the length; `None` without bounds
    # rows: a fixed number of rows; `None` for several
    if given is None:
        return None
    found = Bounds.of({"batch": rows or 4, **given})
    if found is None or found.length is None:
        raise InvalidArgumentError(f'bounds= names the length: {{"batch": 4, "length": 512}}; found {dict(given)!r}.')
    for name, least in (("batch", rows or 3), ("length", 32), ("new", _PROMPT)):
        value = getattr(found, name)
        if value < least:
            raise InvalidArgumentError(
                f"bounds: {name}={value} is less than {least}, which the calls that prove the folder have. For one "
                "row: batch=1 (--max-batch 1)."
            )
    return found


def room_for_tokens(bounds: Bounds | None, wanted: int) -> int:
    """Return how many new tokens a case for generation has room for."""
    # bounds: the largest sizes; `None` without them
    return wanted if bounds is None or bounds.length is None else min(wanted, bounds.length - _PROMPT - 3)


def fitting_text(tokens: torch.Tensor | None, bounds: Bounds | None) -> torch.Tensor | None:
    """Return a text whose rows are within the bounds: its first token is in the cache, all others in one call."""
    # tokens: the text, int64 of shape (texts, length); `None` without one
    # bounds: the largest sizes; `None` without them
    if tokens is None or bounds is None or bounds.length is None or bounds.new is None:
        return tokens
    return tokens[:, : min(bounds.length, bounds.new + 1)]


def choose_target(to: str, target: str | None, bounds: Mapping[str, int] | None, rows: int | None) -> str:
    """Return the runtime of a folder."""
    # target: the runtime; `None` for that of `to`
    # bounds: the largest sizes; `None` without them
    # rows: a fixed number of rows; `None` for several
    if to not in ("onnx", "program"):
        raise InvalidArgumentError(f'to must be "onnx" or "program", found {to!r}.')
    runtime = {"onnx": "onnxruntime", "program": "torch"}[to] if target is None else target
    check_runtime(runtime)
    if runtime == "executorch" and bounds is None:
        raise InvalidArgumentError(
            "ExecuTorch plans memory for the largest sizes. Name them:\n"
            '    bounds={"batch": 4, "length": 512}   (--max-batch 4 --max-length 512)'
        )
    if bounds is not None and runtime == "onnxruntime":
        raise InvalidArgumentError("An ONNX file takes every length: leave bounds= out for onnxruntime.")
    choose_bounds(bounds, rows)
    if runtime != "torch":
        check_libraries(runtime, "export_folder")
    return runtime


def write_piece(
    runtime: str,
    piece: Piece,
    path: pathlib.Path,
    shapes: Any,
    bounds: Bounds | None,
    proof: str,
    quantize: Quantization | None = None,
) -> ExportReport:
    """Export a piece and write its file."""
    # bounds: the largest sizes; `None` without them
    # proof: what is replayed: `"full"`, `"sample"` or `"none"`
    # quantize: weights in fewer bits; `None`, the default, for none
    exported = export_program(
        piece.module,
        (),
        piece.kwargs,
        dynamic_shapes=shapes,
        bounds=None if bounds is None else vars(bounds),
        proof="none",
    )
    source = source_of(exported)
    fitting = fitting_cases(piece, bounds)
    example = shortened(source.example, source.example.case(2 if proof == "sample" else 3))
    chosen = [example, *(sampled(fitting) if proof == "sample" else fitting)]
    source = dataclasses.replace(source, cases=[] if proof == "none" else chosen, proof=proof)
    report = write_for(source, FileOptions(runtime, path, "export_folder", quantize=quantize))
    report.remark(*left_out(len(piece.cases) - len(fitting)))
    return report


def fitting_cases(piece: Piece, bounds: Bounds | None) -> Sequence[Case]:
    """Return the cases of a piece that are within the bounds."""
    # bounds: the largest sizes; `None` without them
    shapes: Any = piece.dynamic_shapes
    if bounds is None or shapes is None:
        return piece.cases
    inputs = dict(piece.kwargs)
    shapes = bounds.on(inputs, dynamic_shapes(inputs) if isinstance(shapes, str) else shapes)
    return [case for case in piece.cases if bounds.holds(dict(case.kwargs), shapes, case.steps)]
