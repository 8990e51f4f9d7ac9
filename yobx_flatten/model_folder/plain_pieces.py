"""Models that are one call: they read tokens, sound or images, and have no cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import GenerationError
from ..export.replay import Case
from ..recipe.aliases import TransformersModel
from .pieces import Piece, random_tokens
from .token_types import TYPES, has_types, pair_types

__all__ = ["plain_pieces"]


def plain_pieces(model: TransformersModel, rows: int | None = None) -> list[Piece]:
    """One file, ``model``.

    Args:
        model: a model of transformers.
        rows: the number of rows of every example and case; ``None`` for several numbers of them.

    Returns:
        One file.

    Raises:
        GenerationError: when the model reads something else.
    """
    reads = model.main_input_name
    if reads not in _INPUTS:
        raise GenerationError(
            f"{type(model).__qualname__} reads {reads}, and folders hold models that read {', '.join(_INPUTS)}. "
            "Export it with inputs of your own:\n    export_onnx(model, kwargs=inputs, path=...)"
        )
    make, unit, (length, *others) = _INPUTS[reads]
    cases = []
    for batch, other in zip((1, 3), others, strict=True):
        name = f"batch {rows or batch}" + (f", {unit} {other}" if unit else "")
        cases.append(Case(name, (), make(model, rows or batch, other)))
    return [Piece("model", model, make(model, rows or 2, length), cases)]


def _tokens(model: TransformersModel, batch: int, length: int) -> dict[str, torch.Tensor]:
    tokens = random_tokens(model, (batch, length))
    mask = torch.ones_like(tokens)
    mask[0, length - 1 :] = 0  # padded on the right, as encoders are
    types = {TYPES: pair_types(model, batch, length)} if has_types(model, tokens) else {}
    return {"input_ids": tokens, "attention_mask": mask, **types}


def _sound(model: TransformersModel, batch: int, length: int) -> dict[str, torch.Tensor]:
    # without a mask, as optimum exports these models; those with `feat_extract_norm="group"` take none
    return {"input_values": _random(model, (batch, length))}


def _image(model: TransformersModel, batch: int, _: int) -> dict[str, torch.Tensor]:
    config = model.config
    return {"pixel_values": _random(model, (batch, getattr(config, "num_channels", 3), *_size(config)))}


def _size(config: Any) -> tuple[int, int]:
    found = getattr(config, "image_size", None) or 224
    return (found, found) if isinstance(found, int) else (int(found[0]), int(found[1]))


def _random(model: TransformersModel, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(model.dtype)


# what makes the inputs; what is counted, and three numbers of it; a second of sound has 16000 samples, images one size
_INPUTS: dict[str, tuple[Callable[[Any, int, int], dict[str, torch.Tensor]], str, tuple[int, int, int]]] = {
    "input_ids": (_tokens, "length", (7, 5, 11)),
    "input_values": (_sound, "samples", (3200, 2400, 5001)),
    "pixel_values": (_image, "", (0, 0, 0)),
}
