"""What a model is for, which decides what becomes a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InvalidArgumentError
from ..recipe.aliases import TransformersModel
from .image_pieces import vision_language_pieces
from .pieces import Piece, decoder_pieces, encoder_decoder_pieces
from .plain_pieces import plain_pieces

__all__ = ["GENERATES", "TASKS", "pieces_for", "task_of"]

TASKS: Mapping[str, Callable[[Any, int | None], list[Piece]]] = {
    "text-generation": decoder_pieces,
    "text2text-generation": encoder_decoder_pieces,
    "automatic-speech-recognition": encoder_decoder_pieces,
    "image-text-to-text": vision_language_pieces,
    "fill-mask": plain_pieces,
    "text-classification": plain_pieces,
    "token-classification": plain_pieces,
    "feature-extraction": plain_pieces,
    "ctc": plain_pieces,
    "audio-classification": plain_pieces,
    "image-classification": plain_pieces,
}
"""Names of the hub, and what makes the files of such a model. ``ctc`` is speech recognition frame by frame, without a
decoder."""

GENERATES = ("text-generation", "text2text-generation", "automatic-speech-recognition", "image-text-to-text")

_ENDINGS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForCTC": "ctc",
    "ForImageClassification": "image-classification",
}


def task_of(model: TransformersModel) -> str:
    """Return what a model is for.

    Args:
        model: a model of transformers.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "automatic-speech-recognition" if model.main_input_name == "input_features" else "text2text-generation"
    if hasattr(model, "get_image_features") and hasattr(config, "vision_config"):
        return "image-text-to-text"
    name = type(model).__name__
    if name.endswith("ForSequenceClassification") and model.main_input_name == "input_values":
        return "audio-classification"
    return next((task for ending, task in _ENDINGS.items() if name.endswith(ending)), "feature-extraction")


def pieces_for(
    model: TransformersModel,
    task: str,
    rows: int | None = None,
    *,
    whole_cache: bool = False,
    logits: str = "all",
    proof: str = "full",
) -> tuple[str, list[Piece]]:
    """Make the files to be of a model.

    Args:
        model: a model of transformers.
        task: one of :data:`TASKS`, or ``"auto"``.
        rows: the number of rows of every example and case; ``None`` for several numbers of them.
        whole_cache: see :func:`.decoder_pieces`; ``False`` by default.
        logits: see :func:`.decoder_pieces`; ``"all"`` by default.
        proof: what is replayed; a decoder gets no more cases than that, since making one is a call of the model.

    Returns:
        The task, and the pieces.

    Raises:
        InvalidArgumentError: when there is no such task, the model is for another one, or does not leave scores out.
    """
    if task != "auto" and task not in TASKS:
        raise InvalidArgumentError(f"There is no task {task!r}. There are auto, {', '.join(TASKS)}.")
    found = task_of(model)
    wanted = found if task == "auto" else task
    if TASKS[wanted] is not TASKS[found]:
        raise InvalidArgumentError(
            f"A {type(model).__qualname__} is for {found}, not for {wanted}. Leave the task out, or ask for {found}."
        )
    if TASKS[wanted] is decoder_pieces:
        return wanted, decoder_pieces(model, rows, whole_cache=whole_cache, logits=logits, proof=proof)
    if logits != "all":
        raise InvalidArgumentError(
            f'logits="last" is for text-generation, and a {type(model).__qualname__} is for {wanted}.'
        )
    return wanted, TASKS[wanted](model, rows)
