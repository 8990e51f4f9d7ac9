"""Export one module of a model to a file for onnxruntime, torch or another runtime, and check the file."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ..errors import FlattenError, GenerationError, InvalidArgumentError, ReplayError
from ..errors.failures import STEP, first_line, raised_as, result_or
from ..export.calls import export_onnx, export_program
from ..export.example import Bounds
from ..export.exported_model import source_of
from ..export.proof.eager_runs import Case, Proof, sampled
from ..export.proof.report import ExportReport
from ..export.quantization import Quantization, WeightBits
from ..export.runtimes.write import FileOptions, check_libraries, check_opset, write_for
from ..export.source import left_out, shortened
from ..runners.adapters import Adapter
from ..runners.open import RUNTIMES, check_runtime
from ..trees.shapes import dynamic_shapes
from .pieces.text import Piece
from .source.open import WeightsIn
from .source.packed_weights import UnmatchedWeights
from .stored_cases import PROMPT

# beginnings of torch's messages for sizes that a program was not traced for
_OF_SIZES = ("Guard failed: ", "Runtime assertion failed for expression ")

logger = logging.getLogger("yobx_flatten")


def export_piece(
    model: str,
    piece: Piece,
    path: pathlib.Path,
    options: FolderOptions,
    proof: Proof,
    quantization: Quantization | None = None,
    adapters: Sequence[Adapter] = (),
) -> ExportReport:
    # model: name of the model's class

    def export(one: Piece) -> ExportReport:
        report = _written(one, path, options, proof, quantization, adapters)
        report.remark(*one.remarks)
        return report

    logger.info("exporting %s", path.name, extra=STEP)
    if piece.narrower is not None:
        # the trace, the exporter or the replay may fail for pictures of all sizes, and pass for one size
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
            f"Exporting {model} to {path.name} failed ({type(error).__name__}: {first_line(error)[:300]}). Export the "
            "model with your own inputs, export_onnx(model, kwargs=inputs, path=...), or export recorded calls: with "
            "record_calls(model) as calls: ..."
        )

    # the model, torch's trace and the exporter each have their own classes of errors
    with raised_as(failed, FlattenError, OSError, MemoryError):
        try:
            return export(piece)
        except ReplayError as error:
            if not any(words in str(error) for words in _OF_SIZES):
                raise
            raise ReplayError(
                f"{model} cannot be exported to {path.name} for all sizes. To export it for the sizes of your own "
                f"inputs: export_onnx(model, kwargs=inputs, path=..., dynamic_shapes=None). {error}",
                error.report,
            ) from error


def _written(
    piece: Piece,
    path: pathlib.Path,
    options: FolderOptions,
    proof: Proof,
    quantization: Quantization | None,
    adapters: Sequence[Adapter],
) -> ExportReport:
    fitting, shapes = fitting_cases(piece, options.largest), piece.dynamic_shapes
    if options.batch is not None and shapes is not None and piece.has_rows:
        shapes = _with_fixed_batch(dynamic_shapes(dict(piece.kwargs)) if shapes == "auto" else shapes)
    how: dict[str, Any] = {"kwargs": piece.kwargs, "dynamic_shapes": shapes}
    if options.runtime == "onnxruntime":
        how |= {"cases": piece.cases, "proof": proof, "quantize": quantization, "adapters": adapters}
        how |= {"opset_version": options.opset_version, "optimize": options.optimize}
        return export_onnx(piece.module, path=path, **how).report
    how["bounds"] = None if options.largest is None else vars(options.largest)
    is_final = options.runtime == "torch"  # files of other runtimes are made of the program, and are replayed instead
    exported = export_program(piece.module, cases=fitting, proof=proof if is_final else "none", **how)
    if is_final:
        exported.save(path)
        return exported.report
    source = source_of(exported)
    example = shortened(source.example, source.example.case(2 if proof == "sample" else 3))
    chosen = [] if proof == "none" else [example, *(sampled(fitting) if proof == "sample" else fitting)]
    source = dataclasses.replace(source, cases=chosen, asked=dataclasses.replace(source.asked, proof=proof))
    report = write_for(source, FileOptions(options.runtime, path, "export_folder", quantize=quantization))
    report.remark(*left_out(len(piece.cases) - len(fitting)))
    return report


def _with_fixed_batch(shapes: Any) -> Any:
    if isinstance(shapes, dict) and all(isinstance(key, int) for key in shapes):
        return {axis: dim for axis, dim in shapes.items() if axis != 0}
    if isinstance(shapes, dict):
        return {name: _with_fixed_batch(below) for name, below in shapes.items()}
    return [_with_fixed_batch(below) for below in shapes] if isinstance(shapes, (list, tuple)) else shapes


Target = Literal["onnxruntime", "torch", "aotinductor", "executorch", "openvino"]
# sentence-transformers, optimum and (for decoders) onnxruntime-genai open a flat folder
Layout = Literal["flat", "transformers.js", "genai"]
Adapters: TypeAlias = Mapping[str, str | os.PathLike[str]]  # folders of PEFT adapters, by adapter name


@dataclasses.dataclass(frozen=True)
class FolderOptions:
    """The arguments of :func:`.write.export_folder`, except the model and the folder to write."""

    to: str = "onnx"  # `"onnx"` or `"program"`; ignored if `target` is given
    target: Target | None = None  # the runtime; `None` for the runtime of `to`
    batch: int | None = None  # a fixed number of rows; `None` for a dynamic number
    bounds: Mapping[str, int] | None = None  # the largest sizes
    opset_version: int | None = None
    optimize: Literal["onnxruntime"] | None = None
    logits: str = "all"  # positions whose scores are returned: `"all"` or `"last"`
    layout: Layout = "flat"
    word_times: bool = False  # whether Whisper decoders return attention for word times
    task: str = "auto"  # the task of the folder; `"auto"` for the task of the model
    source: str | os.PathLike[str] | None = None  # the folder of the tokenizer; `None` for the folder of the model
    adapters: Adapters | None = None  # adapters that the files switch between; `None` for no room for adapters
    proof: Proof = "auto"
    quantize: WeightBits | Quantization | None = None
    calibration: str | os.PathLike[str] | None = None  # a file of prompts
    # the options below are for a model that is given by name
    dtype: str | None = None
    weights: WeightsIn = "auto"
    unmatched_weights: UnmatchedWeights | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.batch is None and (self.bounds or {}).get("batch") == 1:
            # the test cases of a dynamic batch have three rows
            object.__setattr__(self, "batch", 1)
        if self.batch is not None and (type(self.batch) is not int or self.batch < 1):
            raise InvalidArgumentError(f"batch must be None or an int of 1 or more, found {self.batch!r}.")
        if self.to not in ("onnx", "program"):
            raise InvalidArgumentError(f'to must be "onnx" or "program", found {self.to!r}.')
        check_runtime(self.runtime)
        if self.runtime == "executorch" and self.bounds is None:
            raise InvalidArgumentError(
                "ExecuTorch plans memory for the largest sizes. State these sizes:\n"
                '    bounds={"batch": 4, "length": 512}   (--max-batch 4 --max-length 512)'
            )
        if self.bounds is not None and self.runtime == "onnxruntime":
            raise InvalidArgumentError("An ONNX file takes every length: leave bounds= out for onnxruntime.")
        _ = self.largest  # raises where a bound is missing
        if self.runtime != "torch":
            check_libraries(self.runtime, "export_folder")
        if self.optimize not in (None, "onnxruntime") or (self.optimize is not None and self.name != "onnx"):
            text = f'optimize must be None, or "onnxruntime" for to="onnx"; found {self.optimize!r}.'
            raise InvalidArgumentError(text)
        if self.name == "onnx":
            check_opset(self.opset_version)

    @property
    def runtime(self) -> str:
        return {"onnx": "onnxruntime", "program": "torch"}[self.to] if self.target is None else self.target

    @property
    def name(self) -> str:
        """The format of the files, which the folder's manifest records, such as ``"onnx"`` or ``"program"``."""
        return {"onnxruntime": "onnx", "torch": "program"}.get(self.runtime, self.runtime)

    @property
    def suffix(self) -> str:
        return RUNTIMES[self.runtime][0]

    @functools.cached_property
    def largest(self) -> Bounds | None:
        """Largest sizes that files must accept, from ``bounds=`` (default batch size 4); ``None`` without bounds."""
        if self.bounds is None:
            return None
        found = Bounds.of({"batch": self.batch or 4, **self.bounds})
        if found is None or found.length is None:
            example = 'For example: {"batch": 4, "length": 512}'
            raise InvalidArgumentError(f'bounds= has no "length", found {dict(self.bounds)!r}. {example}')
        for name, least in (("batch", self.batch or 3), ("length", 32), ("new", PROMPT)):
            if (value := getattr(found, name)) < least:
                hint = " Or fix the batch size to 1: batch=1 (--max-batch 1)." if name == "batch" else ""
                raise InvalidArgumentError(
                    f"bounds: {name}={value} is too small as the largest size that the files accept: checks of the "
                    f"files need at least {least}.{hint}"
                )
        return found


def fitting_cases(piece: Piece, bounds: Bounds | None) -> Sequence[Case]:
    shapes: Any = piece.dynamic_shapes
    if bounds is None or shapes is None:
        return piece.cases
    inputs = dict(piece.kwargs)
    shapes = bounds.on(inputs, dynamic_shapes(inputs) if isinstance(shapes, str) else shapes)
    return [case for case in piece.cases if bounds.holds(dict(case.kwargs), shapes, case.steps)]
