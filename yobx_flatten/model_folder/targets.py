"""What a folder is for: the runtime, its files, and the largest sizes where the runtime needs them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch.export import Dim

from ..errors import DynamicShapesError, InvalidArgumentError
from ..export.program import export_program, source_of
from ..export.proof import sampled
from ..export.replay import Case
from ..export.report import ExportReport
from ..export.runtimes import check_libraries, write_for
from ..runners.open import check_runtime
from ..trees.shapes import dynamic_shapes
from .pieces import Piece

__all__ = ["FORMATS", "Bounds", "Target", "choose_target", "fitting_cases", "write_piece"]

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
_NEW = ("input_ids", "inputs_embeds", "position_ids", "decoder_input_ids")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The largest sizes.

    Attributes:
        batch: number of rows.
        length: number of tokens, in the cache and the mask.
        new: number of tokens of one call.
    """

    batch: int
    length: int
    new: int

    @classmethod
    def of(cls, given: Mapping[str, int] | None, rows: int | None) -> Bounds | None:
        """Return the bounds that were asked for.

        Args:
            given: ``{"batch": 4, "length": 512}``, and ``"new"`` if it is less than the length.
            rows: a fixed number of rows; ``None`` for several.

        Raises:
            InvalidArgumentError: when a name is unknown, or a bound is too small for the calls that prove the folder.
        """
        if given is None:
            return None
        unknown = [name for name in given if name not in ("batch", "length", "new")]
        wrong = [name for name, value in given.items() if type(value) is not int]
        if unknown or wrong or "length" not in given:
            raise InvalidArgumentError(
                f'bounds are ints, such as {{"batch": 4, "length": 512}}; found {dict(given)!r}.'
            )
        found = cls(given.get("batch", rows or 4), given["length"], given.get("new", given["length"]))
        least = cls(rows or 3, 32, _PROMPT)
        for name, value in vars(found).items():
            if value < getattr(least, name):
                raise InvalidArgumentError(
                    f"bounds: {name}={value} is less than {getattr(least, name)}, which the calls that prove the "
                    "folder have. For one row: batch=1."
                )
        return found

    def tokens(self, wanted: int) -> int:
        """Return how many new tokens a case for generation has room for.

        Args:
            wanted: number of tokens.
        """
        return min(wanted, self.length - _PROMPT - 3)

    def on(self, shapes: Any) -> Any:
        """Return dynamic shapes by argument in which every size that varies has its bound.

        Args:
            shapes: a specification by argument; ``None`` where every size is fixed.
        """
        if shapes is None:
            return None
        return {name: self._below(spec, self.new if name in _NEW else self.length) for name, spec in shapes.items()}

    def _below(self, spec: Any, tokens: int) -> Any:
        if isinstance(spec, dict) and all(isinstance(key, int) for key in spec):
            return {
                axis: dim if dim is None or dim is Dim.STATIC else Dim.AUTO(max=tokens if axis else self.batch)
                for axis, dim in spec.items()
            }
        if isinstance(spec, dict):
            return {name: self._below(below, tokens) for name, below in spec.items()}
        return [self._below(below, tokens) for below in spec] if isinstance(spec, (list, tuple)) else spec

    def holds(self, case: Case) -> bool:
        """Return whether the sizes of a call are within the bounds.

        Args:
            case: the call.
        """
        steps = case.steps
        for name, value in case.kwargs.items():
            for leaf in pytree.tree_leaves(value):
                if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
                    continue
                tokens = leaf.shape[2] if leaf.dim() == 4 else leaf.shape[1]
                grows = 0 if name in _NEW else (steps - 1) * _new_tokens(case)
                if leaf.shape[0] > self.batch or tokens + grows > (self.new if name in _NEW else self.length):
                    return False
        return True


def _new_tokens(case: Case) -> int:
    return max((case.kwargs[name].shape[1] for name in _NEW if case.kwargs.get(name) is not None), default=0)


def choose_target(to: str, target: str | None, bounds: Mapping[str, int] | None, rows: int | None) -> str:
    """Return the runtime of a folder.

    Args:
        to: ``"onnx"`` or ``"program"``.
        target: the runtime; ``None`` for that of ``to``.
        bounds: the largest sizes; ``None`` without them.
        rows: a fixed number of rows; ``None`` for several.

    Raises:
        InvalidArgumentError: when there is no such runtime, or bounds are missing or do not belong to it.
        MissingDependencyError: when a library or a compiler is missing.
    """
    if to not in ("onnx", "program"):
        raise InvalidArgumentError(f'to must be "onnx" or "program", found {to!r}.')
    runtime = {"onnx": "onnxruntime", "program": "torch"}[to] if target is None else target
    check_runtime(runtime)
    if runtime == "executorch" and bounds is None:
        raise InvalidArgumentError(
            "ExecuTorch plans memory for the largest sizes. Name them:\n"
            '    bounds={"batch": 4, "length": 512}   (--max-batch 4 --max-length 512)'
        )
    if bounds is not None and runtime in ("onnxruntime", "torch"):
        raise InvalidArgumentError(f"bounds= are for files with planned memory; leave them out for {runtime}.")
    Bounds.of(bounds, rows)
    if runtime != "torch":
        check_libraries(runtime, "export_folder")
    return runtime


def write_piece(
    runtime: str, piece: Piece, path: pathlib.Path, shapes: Any, bounds: Bounds | None, tolerance: float, proof: str
) -> ExportReport:
    """Export a piece and write its file.

    Args:
        runtime: AOTInductor, ExecuTorch or OpenVINO.
        piece: the file to be.
        path: where to write it.
        shapes: its dynamic shapes.
        bounds: the largest sizes; ``None`` without them.
        tolerance: largest absolute difference to the module.
        proof: what is replayed: ``"full"``, ``"sample"`` or ``"none"``.

    Returns:
        The report of the file.

    Raises:
        DynamicShapesError: when the model itself bounds a size in another way.
    """
    cases: Sequence[Case] = piece.cases
    if bounds is not None:
        shapes = bounds.on(dynamic_shapes(dict(piece.kwargs)) if isinstance(shapes, str) else shapes)
        cases = fitting_cases(piece, bounds)
    try:
        exported = export_program(
            piece.module, (), piece.kwargs, dynamic_shapes=shapes, proof="none", tolerance=tolerance
        )
    except ValueError as error:
        if "user-specified" not in str(error):
            raise
        raise DynamicShapesError(
            f"{piece.stem}: the model itself bounds a size in another way than bounds={bounds}: "
            f"{' '.join(str(error).split())[:400]}"
        ) from error
    source = source_of(exported)
    chosen = [source.example.case(2 if proof == "sample" else 3), *(sampled(cases) if proof == "sample" else cases)]
    if bounds is not None and not bounds.holds(chosen[0]):
        chosen[0] = dataclasses.replace(chosen[0], steps=1)
    source = dataclasses.replace(source, cases=[] if proof == "none" else chosen, proof=proof)
    report = write_for(runtime, source, path, caller="export_folder")
    if len(cases) < len(piece.cases):
        report.remark(f"{len(piece.cases) - len(cases)} cases were left out: they are larger than the bounds.")
    return report


def fitting_cases(piece: Piece, bounds: Bounds | None) -> Sequence[Case]:
    """Return the cases of a piece that are within the bounds.

    Args:
        piece: the file to be.
        bounds: the largest sizes; ``None`` without them.
    """
    return piece.cases if bounds is None else [case for case in piece.cases if bounds.holds(case)]
