"""Refuse an export that would fill the disk or the memory."""

from __future__ import annotations

import pathlib
import shutil

from ..errors import NoRoomError
from ..errors.messages import format_bytes
from .model_facts import ModelFacts
from .proof.memory import memory_available
from .quantization.options import Quantization

_BESIDE = 2**29  # libraries, the graph and activations of short inputs; measured on models of 135 million and more
_TRIFLE = 2**28  # below, the libraries take more than the weights


def check_room(
    facts: ModelFacts,
    path: pathlib.Path,
    *,
    in_memory: int = 1,
    quantization: Quantization | None = None,
    proof: str = "full",
) -> None:
    """Refuse an export that would fill the disk or the memory."""
    # facts: the module. Of one whose weights are read layer by layer, the memory holds the largest layer, its weights
    # in the type of the file, and what is written of it.
    # quantization: how weights will be stored in fewer bits; `None` where they are not
    # proof: what is replayed; with `"none"` no file in float is written before one in fewer bits
    weights, largest = facts.weight_bytes, facts.layer_bytes
    few = 0 if quantization is None else facts.bytes_in(quantization.bits)
    written = weights if quantization is None else few if proof == "none" else weights + few
    there = next(folder for folder in (path.absolute().parent, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < written:
        raise NoRoomError(
            f"The disk is too small: the weights take {format_bytes(written)}, and {format_bytes(free)} are free in "
            f"{there}. Name a folder on another disk, or make room there."
        )
    # a file is mapped next to a model that is read layer by layer, and gives way
    needed = (4 * largest if largest else in_memory * weights) + _BESIDE
    left = memory_available()
    if weights >= _TRIFLE and left < needed:
        raise NoRoomError(
            f"The export needs {format_bytes(needed)} of memory in addition to the model, and {format_bytes(left)} are "
            "available. Close other programs, export in float16, or skip the checks, which need most of it:\n"
            '    proof="none"'
        )
