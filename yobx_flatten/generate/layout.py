"""Name the files of one model, as optimum and transformers.js do.

=====================  =========================================================================================
decoder                ``model``
encoder and decoder    ``encoder_model``, ``decoder_model`` (the first call), ``decoder_with_past_model``
the same for genai     ``encoder`` (also returns what the decoder attends to), ``decoder``
vision and language    ``vision_encoder``, ``embed_tokens``, ``decoder_model_merged``
spectrograms           ``encoder_model``, ``frame_decoder``, ``postnet``
=====================  =========================================================================================
"""

from __future__ import annotations

import os
import pathlib

from ..errors import GenerationError
from ..files.scratch import is_folder

MANIFEST = "yobx_flatten.json"
"""Name of the JSON file that describes a folder that :func:`export_folder` wrote."""

SUBFOLDER = "onnx"
"""The subfolder in which transformers.js looks for ONNX files."""

# suffixes that transformers.js adds to a file's name for each dtype of the weights
_TYPES = ("", "_fp16", "_int8", "_quantized", "_q4", "_q4f16")

LAYOUTS: tuple[dict[str, str], ...] = (
    {"decoder": "decoder_with_past_model", "prefill": "decoder_model", "encoder": "encoder_model"},
    {"decoder": "decoder", "encoder": "encoder"},
    {"decoder": "decoder_model_merged", "embed": "embed_tokens", "vision": "vision_encoder"},
    {"decoder": "frame_decoder", "encoder": "encoder_model", "postnet": "postnet"},
    {"decoder": "model"},
)
"""File names without suffix, by part of a model; the files of a folder match one of these entries."""


def located(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return the path of a file: in the folder, or in the subfolder where transformers.js looks for it."""
    if (folder / name).is_file():
        return folder / name
    stem, dot, suffix = name.rpartition(".")
    others = [folder / SUBFOLDER / f"{stem}{kind}{dot}{suffix}" for kind in _TYPES]
    found = [path for path in others if path.is_file()]
    if len(found) > 1:
        raise GenerationError(
            f"{folder} holds {', '.join(path.name for path in found)}: the same model in several dtypes. Move the file "
            "that you want to its own folder, and open that folder."
        )
    return found[0] if found else folder / name


def find_parts(path: pathlib.Path, suffix: str, prefill: str | os.PathLike[str] | None) -> dict[str, pathlib.Path]:
    """Return the files of an exported model by their part: ``decoder``, ``encoder`` and others."""
    # prefill: the file of the first call, if `path` is a single file, or instead of the file of the folder
    if not path.exists():
        raise GenerationError(f"There is no file or folder {path}.")
    by_hand = {} if prefill is None else {"prefill": pathlib.Path(prefill)}
    if not is_folder(path):
        return {"decoder": path, **by_hand}
    for layout in LAYOUTS:
        found = {part: located(path, f"{name}{suffix}") for part, name in layout.items()}
        if found["decoder"].is_file():
            missing = [file.name for file in found.values() if not file.is_file()]
            if missing:
                raise GenerationError(
                    f"{path} contains {found['decoder'].name}, but not {', '.join(missing)}. Copy the whole folder, "
                    "or export it again."
                )
            return {**found, **by_hand}
    expected = ", ".join(f"{layout['decoder']}{suffix}" for layout in LAYOUTS)
    raise GenerationError(
        f"{path} contains no model to generate with: none of {expected}. To export: yobx-flatten export MODEL -o DIR"
    )


def folder_of(file: pathlib.Path) -> pathlib.Path:
    """Return the folder that contains the configurations of a model file; the file may be in its subfolder ``onnx``."""
    parent = file.parent
    is_below = parent.name == SUBFOLDER and (parent.parent / "config.json").is_file()
    return parent.parent if is_below and not (parent / "config.json").is_file() else parent
