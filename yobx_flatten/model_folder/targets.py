"""The runtime of a folder, its file names, and the largest sizes where the runtime needs them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from ..errors import InvalidArgumentError
from ..export.example.bounds import Bounds
from ..export.onnx.file import check_opset
from ..export.proof.case import Case
from ..export.runtimes.file_options import check_libraries
from ..runners.open import RUNTIMES, check_runtime
from ..trees.shapes import dynamic_shapes
from .client_layout import Layout
from .pieces.text import Piece

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


@dataclasses.dataclass(frozen=True)
class FolderFormat:
    """The form of the files of a folder; see :func:`.write.export_folder`."""

    to: str = "onnx"  # `"onnx"` or `"program"`, where no target is named
    target: Target | None = None  # the runtime; `None`, the default, for that of `to`
    batch: int | None = None  # a fixed number of rows; `None`, the default, for several
    bounds: Mapping[str, int] | None = None  # the largest sizes; `None`, the default, without them
    opset_version: int | None = None
    optimize: Literal["onnxruntime"] | None = None
    logits: str = "all"  # positions whose scores are returned: `"all"` or `"last"`
    layout: Layout = "flat"
    word_times: bool = False  # whether the decoders of a Whisper return what times of words are read off

    def __post_init__(self) -> None:
        if self.batch is None and (self.bounds or {}).get("batch") == 1:
            # the calls that prove a folder of several rows have three
            object.__setattr__(self, "batch", 1)
        if self.batch is not None and (type(self.batch) is not int or self.batch < 1):
            raise InvalidArgumentError(f"batch must be None or an int of 1 or more, found {self.batch!r}.")
        if self.to not in ("onnx", "program"):
            raise InvalidArgumentError(f'to must be "onnx" or "program", found {self.to!r}.')
        check_runtime(self.runtime)
        if self.runtime == "executorch" and self.bounds is None:
            raise InvalidArgumentError(
                "ExecuTorch plans memory for the largest sizes. Name them:\n"
                '    bounds={"batch": 4, "length": 512}   (--max-batch 4 --max-length 512)'
            )
        if self.bounds is not None and self.runtime == "onnxruntime":
            raise InvalidArgumentError("An ONNX file takes every length: leave bounds= out for onnxruntime.")
        _ = self.largest  # raises where a bound is missing
        if self.runtime != "torch":
            check_libraries(self.runtime, "export_folder")
        if self.optimize not in (None, "onnxruntime") or (self.optimize is not None and self.name != "onnx"):
            raise InvalidArgumentError(
                f'optimize must be None, or "onnxruntime" for to="onnx"; found {self.optimize!r}.'
            )
        if self.name == "onnx":
            check_opset(self.opset_version)

    @property
    def runtime(self) -> str:
        """The library that runs the files."""
        return {"onnx": "onnxruntime", "program": "torch"}[self.to] if self.target is None else self.target

    @property
    def name(self) -> str:
        """The format, as the manifest names it."""
        return FORMATS[self.runtime]

    @property
    def suffix(self) -> str:
        """The suffix of the files."""
        return RUNTIMES[self.runtime][0]

    @functools.cached_property
    def largest(self) -> Bounds | None:
        """The largest sizes; ``None`` without them."""
        return _bounds(self.bounds, self.batch)


def _bounds(given: Mapping[str, int] | None, rows: int | None) -> Bounds | None:
    """Return the bounds of a folder, with 4 rows by default."""
    # given: `{"batch": 4, "length": 512}`, and `"new"` if it is less than the length; `None` without bounds
    if given is None:
        return None
    found = Bounds.of({"batch": rows or 4, **given})
    if found is None or found.length is None:
        raise InvalidArgumentError(f'bounds= lacks the length: {{"batch": 4, "length": 512}}; found {dict(given)!r}.')
    for name, least in (("batch", rows or 3), ("length", 32), ("new", _PROMPT)):
        value = getattr(found, name)
        if value < least:
            raise InvalidArgumentError(
                f"bounds: {name}={value} is less than {least}, which the checks of the folder need. For one row: "
                "batch=1 (--max-batch 1)."
            )
    return found


def room_for_tokens(bounds: Bounds | None, wanted: int) -> int:
    """Return how many new tokens a case for generation has room for."""
    return wanted if bounds is None or bounds.length is None else min(wanted, bounds.length - _PROMPT - 3)


def fitting_text(tokens: torch.Tensor | None, bounds: Bounds | None) -> torch.Tensor | None:
    """Return a text whose rows are within the bounds: its first token is in the cache, all others in one call."""
    if tokens is None or bounds is None or bounds.length is None or bounds.new is None:
        return tokens
    return tokens[:, : min(bounds.length, bounds.new + 1)]


def fitting_cases(piece: Piece, bounds: Bounds | None) -> Sequence[Case]:
    """Return the cases of a piece that are within the bounds."""
    shapes: Any = piece.dynamic_shapes
    if bounds is None or shapes is None:
        return piece.cases
    inputs = dict(piece.kwargs)
    shapes = bounds.on(inputs, dynamic_shapes(inputs) if isinstance(shapes, str) else shapes)
    return [case for case in piece.cases if bounds.holds(dict(case.kwargs), shapes, case.steps)]
