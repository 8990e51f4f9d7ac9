"""What a generation loop needs to know of its model: special tokens, and what changes the scores before the choice."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from ..errors import GenerationError

__all__ = ["GenerationSettings", "ScoreProcessor", "read_settings", "settings_of"]

ScoreProcessor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the tokens so far, of shape (batch, length), and scores of shape (batch, vocabulary); returns scores."""


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """Special tokens of a model, and rules for its scores.

    Attributes:
        eos_token_ids: a row ends with one of these; empty for none.
        pad_token_id: what follows in a row that has ended.
        decoder_start_token_id: what an encoder-decoder model begins with.
        image_token_id: of the tokens in whose place image features stand.
        max_new_tokens: where ``generate`` stops when it is not told.
        processors: applied to the scores, in order.
    """

    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    image_token_id: int | None = None
    max_new_tokens: int = 20
    processors: tuple[ScoreProcessor, ...] = ()


def read_settings(folder: pathlib.Path) -> GenerationSettings:
    """Read ``config.json`` and ``generation_config.json`` of a folder, as far as they are there.

    Raises:
        GenerationError: when one of them is damaged.
    """
    found: list[Mapping[str, Any]] = []
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {})
        except ValueError as error:
            raise GenerationError(f"{path} is damaged: {error}.") from None
    return settings_of(*found)


def settings_of(config: Mapping[str, Any], generation: Mapping[str, Any]) -> GenerationSettings:
    """Take the settings from the two configurations of a model.

    Args:
        config: of the model.
        generation: of its generation; its entries come first.

    >>> settings_of({"eos_token_id": 1, "pad_token_id": 0}, {"eos_token_id": [2, 3], "max_new_tokens": 5})
    GenerationSettings(eos_token_ids=(2, 3), pad_token_id=0, decoder_start_token_id=None, image_token_id=None, \
max_new_tokens=5, processors=())
    """
    text = {**config, **(config.get("text_config") or {})}

    def first(name: str) -> Any:
        places = (generation, config, text)
        return next((place[name] for place in places if place.get(name) is not None), None)

    ends = first("eos_token_id")
    ends = tuple(ends) if isinstance(ends, (list, tuple)) else () if ends is None else (ends,)
    pad = first("pad_token_id")
    start = first("decoder_start_token_id")
    return GenerationSettings(
        ends,
        pad if pad is not None else ends[0] if ends else None,
        start if start is not None else first("bos_token_id"),
        next((config[name] for name in ("image_token_id", "image_token_index") if config.get(name) is not None), None),
        first("max_new_tokens") or 20,
        _processors(generation),
    )


def _processors(generation: Mapping[str, Any]) -> tuple[ScoreProcessor, ...]:
    """The rules of a ``generation_config.json``, in the order in which transformers applies them."""
    made: list[ScoreProcessor] = []
    penalty = generation.get("repetition_penalty")
    if penalty is not None and penalty != 1.0:
        made.append(_library("RepetitionPenaltyLogitsProcessor", penalty=float(penalty)))
    if generation.get("no_repeat_ngram_size"):
        made.append(_library("NoRepeatNGramLogitsProcessor", generation["no_repeat_ngram_size"]))
    if generation.get("suppress_tokens"):
        made.append(_library("SuppressTokensLogitsProcessor", generation["suppress_tokens"]))
    if generation.get("begin_suppress_tokens"):
        made.append(_library("SuppressTokensAtBeginLogitsProcessor", generation["begin_suppress_tokens"], 1))
    return tuple(made)


def _library(name: str, *args: Any, **kwargs: Any) -> ScoreProcessor:
    try:
        import transformers
    except ImportError:
        raise GenerationError(
            f"generation_config.json asks for transformers' {name}:\n    pip install 'yobx-flatten[transformers]'"
        ) from None
    made: ScoreProcessor = getattr(transformers, name)(*args, **kwargs)
    return made
