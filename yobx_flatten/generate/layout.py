"""Which files make one model. The names are those of optimum and transformers.js.

=====================  =========================================================================================
decoder                ``model``
encoder and decoder    ``encoder_model``, ``decoder_model`` (the first call), ``decoder_with_past_model``
vision and language    ``vision_encoder``, ``embed_tokens``, ``decoder_model_merged``
=====================  =========================================================================================
"""

from __future__ import annotations

import os
import pathlib

from ..errors import GenerationError
from ..files.scratch import is_folder

__all__ = ["LAYOUTS", "MANIFEST", "find_parts"]

MANIFEST = "yobx_flatten.json"
"""The description of a folder that :func:`export_folder` wrote."""

LAYOUTS: tuple[dict[str, str], ...] = (
    {"decoder": "decoder_with_past_model", "prefill": "decoder_model", "encoder": "encoder_model"},
    {"decoder": "decoder_model_merged", "embed": "embed_tokens", "vision": "vision_encoder"},
    {"decoder": "model"},
)
"""Part to name without its suffix; a folder holds one of these."""


def find_parts(path: pathlib.Path, suffix: str, prefill: str | os.PathLike[str] | None) -> dict[str, pathlib.Path]:
    """Find the files of a model.

    Args:
        path: a folder, or the file of a decoder.
        suffix: ``".onnx"`` or ``".pt2"``.
        prefill: the file of the first call, where ``path`` is a file.

    Returns:
        Part to path.

    Raises:
        GenerationError: when there is no such folder or file, or it holds no model.
    """
    if not path.exists():
        raise GenerationError(f"There is no {path}.")
    if not is_folder(path):
        return {"decoder": path, **({} if prefill is None else {"prefill": pathlib.Path(prefill)})}
    for layout in LAYOUTS:
        found = {part: path / f"{name}{suffix}" for part, name in layout.items()}
        if found["decoder"].is_file():
            missing = [file.name for file in found.values() if not file.is_file()]
            if missing:
                raise GenerationError(f"{path} holds {found['decoder'].name} and no {', '.join(missing)}.")
            return found
    expected = ", ".join(f"{layout['decoder']}{suffix}" for layout in LAYOUTS)
    raise GenerationError(
        f"{path} holds no model to generate with: none of {expected}. To write one: yobx-flatten export MODEL -o DIR"
    )
