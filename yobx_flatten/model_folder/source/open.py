"""Open a model for an export: load it whole, or read it layer by layer if it is large."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Literal, get_args

import torch

from ...errors import InvalidArgumentError, NoRoomError
from ...errors.messages import format_bytes
from ...export.onnx.stored_matrix import holds_integers
from ...export.proof.memory import memory_available
from .find import FoundModel
from .streamed import Checkpoint, NotStreamableError, open_checkpoint, streamed_model

WeightsIn = Literal["auto", "memory", "stream"]
"""``"memory"`` loads all weights, ``"stream"`` reads those of a layer when it is called."""

_PART = 4
"""``"auto"`` streams weights of more than one part in so many of the free memory, since an export holds them twice."""


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model to export."""

    model: Any  # a Hugging Face model, in evaluation mode
    folder: pathlib.Path | None = None  # the folder or the GGUF file that it is from; `None` where there is none
    is_streamed: bool = False  # whether the weights of a layer are read when it is called
    remarks: tuple[str, ...] = ()  # notes for the report
    found: FoundModel | None = None  # what a streamed model was opened from; `None` for others
    reads_bytes: bool = False  # whether its weights are random, and there is no folder with another tokenizer
    no_folder: str = ""  # why its folder is not known; empty where it is, and where weights are random
    has_integers: bool = False  # whether its file stores integers, which weights were computed from

    def as_a_whole(self, reason: str) -> OpenedModel:
        """Return a streamed model loaded as a whole."""
        assert self.found is not None
        assert self.folder is not None
        dtype, checkpoint = self.model.dtype, open_checkpoint(self.folder)
        assert checkpoint is not None
        remarks = (f"the model is loaded as a whole: {reason}.",)
        _check_memory(self.found, checkpoint, dtype, memory_available(), remarks)
        model, noted = self.found.load_with_remarks(dtype=str(dtype).removeprefix("torch."))
        return OpenedModel(model, self.folder, remarks=(*remarks, *noted))


def open_model(found: FoundModel, *, dtype: str, weights: WeightsIn, to: str) -> OpenedModel:
    """Open the model that :func:`find_model` found."""
    # weights: a `WeightsIn`; `"auto"` streams weights of more than a quarter of the free memory to ONNX files
    if weights not in get_args(WeightsIn):
        raise InvalidArgumentError(
            f"weights must be one of {', '.join(map(repr, get_args(WeightsIn)))}, found {weights!r}."
        )
    if weights == "stream" and to != "onnx":
        raise InvalidArgumentError(f"weights='stream' is for ONNX files; others contain weights. Found {to!r}.")
    if weights == "stream" and found.adapter is not None:
        raise InvalidArgumentError(
            f"weights='stream' reads weights as they are stored, and the adapter of {found.name} is merged into them. "
            "Merge it, save the model, and export that; or leave weights='stream' out."
        )
    wanted = getattr(torch, dtype)
    is_packed = found.packing() is not None
    checkpoint = open_checkpoint(found.folder) if found.has_weights and found.folder and not is_packed else None
    if checkpoint is None or found.folder is None:
        if weights == "stream":
            raise InvalidArgumentError(
                f"weights='stream' reads files of safetensors, and {found.name} has none in full."
            )
        model, noted = found.load_with_remarks(dtype=dtype)
        random = found.reader_folder is None
        integers = (found.gguf is not None or is_packed) and holds_integers(model)
        return OpenedModel(model, found.reader_folder, remarks=noted, reads_bytes=random, has_integers=integers)
    size, free = checkpoint.bytes_as(wanted), memory_available()
    remarks: tuple[str, ...] = ()
    if weights == "stream" or (weights == "auto" and to == "onnx" and _PART * size > free and found.adapter is None):
        try:
            model, noted = streamed_model(found, checkpoint, wanted)
            shown = f"weights of {format_bytes(size)} were read from {found.name} one by one, for each call of a layer."
            return OpenedModel(model, found.folder, True, (shown, *noted), found)
        except NotStreamableError as reason:
            remarks = (f"the model is loaded as a whole: {reason}.",)
    _check_memory(found, checkpoint, wanted, free, remarks)
    model, noted = found.load_with_remarks(dtype=dtype)
    return OpenedModel(model, found.reader_folder, remarks=(*remarks, *noted))


def _check_memory(
    found: FoundModel, checkpoint: Checkpoint, dtype: torch.dtype, free: int, remarks: tuple[str, ...]
) -> None:
    size = checkpoint.bytes_as(dtype)
    if size > free and not checkpoint.is_mapped_as(dtype):
        remedy = remarks[0] if remarks else 'Read them layer by layer:\n    weights="stream" (--weights stream)'
        raise NoRoomError(
            f"The weights of {found.name} take {format_bytes(size)} of memory in {str(dtype).removeprefix('torch.')}, "
            f"and {format_bytes(free)} are available. {remedy[0].upper()}{remedy[1:]}"
        )
