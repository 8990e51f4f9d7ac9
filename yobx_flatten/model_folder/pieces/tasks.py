"""Find the task of a model, which decides which modules are exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ...errors import FlattenError, GenerationError, InvalidArgumentError
from ...errors.failures import first_line
from ...recipe.aliases import TransformersModel
from ...trees.arguments import did_you_mean
from .genai import genai_picture_pieces, genai_sound_pieces
from .one_call import choice_pieces, compares, plain_pieces, two_tower_pieces
from .spoken import spoken_pieces, writes_spectrograms
from .text import EVERY, Piece, Split, check_other_media, decoder_pieces, encoder_decoder_pieces, input_name
from .vision_language import vision_language_pieces

Cut: TypeAlias = Callable[[Any, Split], list[Piece]]  # makes the files of a model

TASKS: Mapping[str, Cut] = {
    "text-generation": decoder_pieces,
    "text2text-generation": encoder_decoder_pieces,
    "automatic-speech-recognition": encoder_decoder_pieces,
    "image-to-text": encoder_decoder_pieces,
    "image-text-to-text": vision_language_pieces,
    "fill-mask": plain_pieces,
    "text-classification": plain_pieces,
    "token-classification": plain_pieces,
    "feature-extraction": plain_pieces,
    "ctc": plain_pieces,
    "audio-classification": plain_pieces,
    "image-classification": plain_pieces,
    "video-classification": plain_pieces,
    "question-answering": plain_pieces,
    "object-detection": plain_pieces,
    "image-segmentation": plain_pieces,
    "depth-estimation": plain_pieces,
    "multiple-choice": choice_pieces,
    "zero-shot-image-classification": two_tower_pieces,
    "text-to-audio": spoken_pieces,
    "audio-to-audio": spoken_pieces,
    "vocoder": plain_pieces,
}
"""By task name of the Hugging Face hub: the function that splits a model into the modules that are exported to files.
``ctc`` is speech recognition frame by frame, without a decoder."""

_FOR_GENAI: Mapping[Cut, Cut] = {
    encoder_decoder_pieces: genai_sound_pieces,
    vision_language_pieces: genai_picture_pieces,
}
"""For onnxruntime-genai, which needs different files: the function that replaces a function of :data:`TASKS`."""

GENERATES = (
    "text-generation",
    "text2text-generation",
    "automatic-speech-recognition",
    "image-to-text",
    "image-text-to-text",
)
SPEAKS = ("text-to-audio", "audio-to-audio")
# task of an encoder-decoder model by its main input
_BY_INPUT = {
    "input_features": "automatic-speech-recognition",
    "input_values": "automatic-speech-recognition",
    "pixel_values": "image-to-text",
}

_SEGMENTS = ("Semantic", "Universal", "Instance", "Image")
# transformers' auto classes by task
AUTO_CLASSES: Mapping[str, tuple[str, ...]] = {
    "text-generation": ("AutoModelForCausalLM",),
    "text2text-generation": ("AutoModelForSeq2SeqLM",),
    "automatic-speech-recognition": ("AutoModelForSpeechSeq2Seq",),
    "image-text-to-text": ("AutoModelForImageTextToText",),
    "fill-mask": ("AutoModelForMaskedLM",),
    "text-classification": ("AutoModelForSequenceClassification",),
    "token-classification": ("AutoModelForTokenClassification",),
    "feature-extraction": ("AutoModel",),
    "ctc": ("AutoModelForCTC",),
    "audio-classification": ("AutoModelForAudioClassification", "AutoModelForSequenceClassification"),
    "image-classification": ("AutoModelForImageClassification",),
    "video-classification": ("AutoModelForVideoClassification",),
    "question-answering": ("AutoModelForQuestionAnswering",),
    "object-detection": ("AutoModelForObjectDetection",),
    "image-segmentation": tuple(f"AutoModelFor{kind}Segmentation" for kind in _SEGMENTS),
    "depth-estimation": ("AutoModelForDepthEstimation",),
    "multiple-choice": ("AutoModelForMultipleChoice",),
    "zero-shot-image-classification": ("AutoModelForZeroShotImageClassification",),
    "text-to-audio": ("AutoModelForTextToSpectrogram", "AutoModelForTextToWaveform"),
}
# task by the end of a class name; the ends of the auto classes' names are added below
_ENDINGS = {"LMHeadModel": "text-generation", "ForSegmentation": "image-segmentation", "HifiGan": "vocoder"}
for _task, _names in AUTO_CLASSES.items():
    for _name in _names:
        if _name != "AutoModel":
            _ENDINGS.setdefault(_name.removeprefix("AutoModel"), _task)


def task_of(model: TransformersModel) -> str:
    """Return the task of a model."""
    config, name = model.config, type(model).__name__
    if writes_spectrograms(model):
        return SPEAKS[model.main_input_name != "input_ids"]
    by_name = next((task for ending, task in _ENDINGS.items() if name.endswith(ending)), None)
    # encoder-decoders such as RT-DETR and BART also have classes for other tasks
    if getattr(config, "is_encoder_decoder", False) and by_name in (None, *GENERATES):
        return _BY_INPUT.get(input_name(model), "text2text-generation")
    if compares(model):
        return "zero-shot-image-classification"
    if hasattr(model, "get_image_features") and hasattr(config, "vision_config"):
        return "image-text-to-text"
    if name.endswith("ForSequenceClassification") and model.main_input_name == "input_values":
        return "audio-classification"
    return by_name or "feature-extraction"


def pieces_for(model: TransformersModel, task: str, split: Split = EVERY) -> tuple[str, list[Piece]]:
    """Return the task, and the modules of the model that become files."""
    if task != "auto" and task not in TASKS:
        known = f"{did_you_mean([str(task)], TASKS)} Tasks: auto, {', '.join(TASKS)}."
        raise InvalidArgumentError(f"There is no task {task!r}.{known}")
    found = task_of(model)
    wanted = found if task == "auto" else task
    if task == "auto":
        _check_nothing_is_lost(model, found)
    make = TASKS[wanted]
    if make is not TASKS[found]:
        raise InvalidArgumentError(
            f"A {type(model).__qualname__} is for {found}, not for {wanted}. Leave the task out, or ask for {found}."
        )
    if split.word_times and split.for_genai:
        raise InvalidArgumentError('word_times=True does not work with layout="genai". Leave one argument out.')
    if split.word_times and make is not encoder_decoder_pieces:
        raise InvalidArgumentError(f"word_times=True is for Whisper, and a {type(model).__qualname__} is for {wanted}.")
    if split.logits != "all" and make is not decoder_pieces:
        raise InvalidArgumentError(
            f'logits="last" is for text-generation, and a {type(model).__qualname__} is for {wanted}.'
        )
    try:
        cut = _FOR_GENAI.get(make, make) if split.for_genai else make
        return wanted, cut(model, split)
    except FlattenError:
        raise
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, AssertionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "meta" in str(error):  # `plan_folder` then loads the streamed weights
            raise
        one_row = "For one row at a time: batch=1. " if "batch size" in str(error) and split.rows != 1 else ""
        raise GenerationError(
            f"{type(model).__qualname__} does not take the inputs of a folder for {wanted} ({type(error).__name__}: "
            f"{first_line(error)[:200]}). {one_row}Export it with its own inputs, export_onnx(model, kwargs=inputs, "
            "path=...), or export recorded calls: with record_calls(model) as calls: ..."
        ) from error


def _check_nothing_is_lost(model: TransformersModel, task: str) -> None:
    """Raise GenerationError if the model's own task would export only a part of the model."""
    if TASKS[task] in (encoder_decoder_pieces, decoder_pieces):
        check_other_media(model, task)
    generates = getattr(model, "can_generate", None)
    if task == "feature-extraction" and callable(generates) and generates():
        raise GenerationError(
            f"{type(model).__qualname__} has its own generation loop, which exported folders do not have. Record a run "
            "with record_calls(model) as calls: model.generate(...) and export its calls, or export one call with "
            f"export_folder(..., task={task!r})."
        )
