"""Choose by task how a model is split into exported files; describe the file of a model that needs only one."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.export import Dim

from ...core.effects import undisturbed
from ...core.private_names.of_torch import pytree
from ...errors import FlattenError, GenerationError, InvalidArgumentError
from ...errors.failures import first_line
from ...export.proof.eager_runs import Case
from ...huggingface.cache_names import argument_of
from ...registry.recipe.aliases import TransformersModel
from ...trees.arguments import did_you_mean
from ...trees.shapes import dynamic_shapes
from . import text
from .genai import genai_picture_pieces, genai_sound_pieces
from .spoken import spoken_pieces
from .text import EVERY, Piece, Split, decoder_pieces, encoder_decoder_pieces, random_tokens, random_values
from .vision_language import vision_language_pieces


def plain_pieces(model: TransformersModel, split: Split = EVERY) -> list[Piece]:
    reads = model.main_input_name
    if reads not in _INPUTS:
        raise GenerationError(
            f"{type(model).__qualname__} reads {reads}, but export_folder supports only {', '.join(_INPUTS)}. "
            "Export the model with your own inputs:\n    export_onnx(model, kwargs=inputs, path=...)"
        )
    unit, (length, one, other) = _INPUTS[reads]
    make, words = functools.partial(_inputs, model, reads), ("batch", unit) if unit else ("batch",)
    return [_piece(model, make(split.rows or 2, length), split.named(words, make, (1, one), (3, other)))]


def choice_pieces(model: TransformersModel, split: Split = EVERY) -> list[Piece]:
    def made(batch: int, choices: int, length: int) -> dict[str, torch.Tensor]:
        flat = _tokens(model.base_model, batch * choices, length)  # the base model takes rows, not choices
        return {name: value.unflatten(0, (batch, choices)) for name, value in flat.items()}

    others = split.named(("batch", "choices", "length"), made, (1, 2, 5), (3, 4, 11))
    return [_piece(model, made(split.rows or 2, 3, 7), others)]


def two_tower_pieces(model: TransformersModel, split: Split = EVERY) -> list[Piece]:
    """Describe the exported file of a model, such as CLIP, that scores every pair of a text and a picture."""
    vision, rows = model.config.vision_config, split.rows
    room = getattr(model.config.text_config, "max_position_embeddings", 16)

    def made(texts: int, pictures: int, length: int) -> dict[str, torch.Tensor]:
        ids = random_tokens(model, (rows or texts, min(length, room)))
        shape = (rows or pictures, getattr(vision, "num_channels", 3), *text.image_size(vision))
        pixels = random_values(model, shape, pictures)
        mask = torch.ones_like(ids)
        mask[0, -1:] = 0
        masks = {"attention_mask": mask} if "attention_mask" in inspect.signature(model.forward).parameters else {}
        return {"input_ids": ids, "pixel_values": pixels, **masks}

    others = {
        f"texts {rows or texts}, pictures {rows or pictures}, length {length}": made(texts, pictures, length)
        for texts, pictures, length in ((1, 2, 5), (5, 1, 11))
    }
    return [_piece(model, made(3, 2, 7), others)]


@torch.no_grad()
def _piece(
    model: TransformersModel, example: dict[str, torch.Tensor], others: Mapping[str, dict[str, torch.Tensor]]
) -> Piece:
    """Describe the file of a model that is exported to one file and has no generation loop."""
    # others: inputs of the test cases, by name
    # the file can be compared with the model only if outputs do not depend on torch's seed
    with undisturbed(seed=0, model=model):
        before = torch.get_rng_state()
        first = _tensors(model(**example))
        draws = not torch.equal(before, torch.get_rng_state())
    if draws:
        with undisturbed(seed=1, model=model):
            second = _tensors(model(**example))
        draws = not _equal(first, second)
    if draws and model.training:
        raise GenerationError(
            f"{type(model).__qualname__} is in training mode, where dropout is random. Before the export:\n"
            "    model.eval()"
        )
    if draws:
        takes = inspect.signature(model.forward).parameters
        noise = "; its argument noise= can be an input" if "noise" in takes else ""
        raise GenerationError(
            f"{type(model).__qualname__} draws random numbers in evaluation mode, so two calls differ and no file can "
            f"be checked{noise}. Switch random draws off in its config, or pass the random tensor as an input: "
            "export_onnx(model, kwargs=inputs, path=...)"
        )
    pictures = {"pixel_values": {0: Dim.AUTO}}
    narrower = dynamic_shapes(example, pictures) if "pixel_values" in example else None
    cases = [Case(name, (), given) for name, given in others.items()]
    return Piece("model", model, example, cases, narrower=narrower, remarks=text.note_on_other_inputs(model, example))


def _tokens(model: TransformersModel, batch: int, length: int) -> dict[str, torch.Tensor]:
    tokens = random_tokens(model, (batch, length))
    mask = torch.ones_like(tokens)
    mask[0, length - 1 :] = 0  # encoders are padded on the right
    end = model.config.eos_token_id if getattr(model.config, "is_encoder_decoder", False) else None
    if isinstance(end, int):  # classifiers with a decoder need one end token in each row, whose state they read
        tokens = torch.where(tokens == end, end + 1 if end < int(tokens.max()) else 0, tokens)
        tokens.scatter_(1, mask.sum(1, keepdim=True) - 1, end)
    # the tokens of this question are fixed, so that all calls have the same inputs
    types = {TYPES: pair_types(model, batch, length)} if has_types(model, random_tokens(model, (2, 7))) else {}
    return {"input_ids": tokens, "attention_mask": mask, **types}


# by input name: the unit of its length, and the lengths of the example, the first case and the second case. A second of
# sound has 16000 samples, and images have one size.
_INPUTS = {
    "input_ids": ("length", (7, 5, 11)),
    "input_values": ("samples", (3200, 2400, 5001)),
    "pixel_values": ("", (0, 0, 0)),
    "spectrogram": ("frames", (7, 5, 11)),
}


def _inputs(model: TransformersModel, reads: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    config = model.config
    if reads == "input_ids":
        return _tokens(model, batch, length)
    if reads == "spectrogram":
        return {reads: random_values(model, (batch, length, config.model_in_dim))}
    if reads == "pixel_values":
        frames = getattr(config, "num_frames", None)  # of a video
        size = (getattr(config, "num_channels", 3), *text.image_size(config))
        return {reads: random_values(model, (batch, *((frames,) if isinstance(frames, int) else ()), *size))}
    if hasattr(config, "frequency_stride"):  # AST cuts a spectrogram of one size into patches
        return {reads: random_values(model, (batch, config.max_length, config.num_mel_bins))}
    found = {reads: random_values(model, (batch, length))}
    if getattr(config, "feat_extract_norm", None) == "layer":  # other models were trained without a mask
        found["attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
        found["attention_mask"][0, length // 2 + 100 :] = 0
    return found


def _tensors(outputs: Any) -> list[torch.Tensor]:
    found = pytree.tree_leaves(dict(outputs) if isinstance(outputs, dict) else outputs)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


TYPES = "token_type_ids"


def pair_types(model: TransformersModel, batch: int, length: int) -> torch.Tensor:
    """Make ``token_type_ids`` of shape (batch, length) for text pairs, whose second texts begin at different places."""
    # for a model whose types have several columns (TAPAS), one more axis
    begins = 1 + torch.arange(batch)[:, None] % (length - 1)
    types = (torch.arange(length) >= begins).long()
    columns = getattr(model.config, "type_vocab_sizes", None)
    return types if columns is None else types[..., None] * (torch.tensor(columns) > 1).long()


@torch.no_grad()
def has_types(model: TransformersModel, tokens: torch.Tensor) -> bool:
    """Return whether the outputs of a model depend on token types that the model's tokenizer may return."""
    if TYPES not in inspect.signature(model.forward).parameters:
        return False
    pairs = pair_types(model, *tokens.shape)
    without = _tensors(model(input_ids=tokens))
    alike = _tensors(model(input_ids=tokens, **{TYPES: torch.zeros_like(pairs)}))
    try:
        differing = _tensors(model(input_ids=tokens, **{TYPES: pairs}))
    except IndexError:  # the embedding has only one type
        return False
    # a model for which missing types equal types of 0 needs types, except with a RoBERTa tokenizer, which gives both
    # texts of a pair the type 0; for other models, the tokenizer class decides
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    found = TOKENIZER_MAPPING.get(type(model.config), ())
    # in transformers 4, a tuple of a slow and a fast tokenizer
    kinds: list[type] = [kind for kind in (found if isinstance(found, tuple) else (found,)) if kind]
    is_usual = getattr(model.config, "tokenizer_class", None) is None
    has_none = is_usual and any("Roberta" in kind.__name__ for kind in kinds)
    returned = any(TYPES in getattr(kind, "model_input_names", ()) for kind in kinds)
    return not _equal(alike, differing) and ((_equal(without, alike) and not has_none) or returned)


Cut: TypeAlias = Callable[[Any, Split], list[Piece]]  # makes the files of a model

TASKS: Mapping[str, Cut] = {
    "text-generation": decoder_pieces,
    "text2text-generation": encoder_decoder_pieces,
    "automatic-speech-recognition": encoder_decoder_pieces,
    "image-to-text": encoder_decoder_pieces,
    "image-text-to-text": vision_language_pieces,
    **dict.fromkeys(("fill-mask", "text-classification", "token-classification", "feature-extraction"), plain_pieces),
    **dict.fromkeys(("ctc", "audio-classification", "image-classification", "video-classification"), plain_pieces),
    **dict.fromkeys(("question-answering", "object-detection", "image-segmentation", "depth-estimation"), plain_pieces),
    "multiple-choice": choice_pieces,
    "zero-shot-image-classification": two_tower_pieces,
    "text-to-audio": spoken_pieces,
    "audio-to-audio": spoken_pieces,
    "vocoder": plain_pieces,
}
"""By task name of the Hugging Face hub: the function that splits a model into the modules that are exported to files.
``ctc`` is speech recognition frame by frame, without a decoder."""

# for onnxruntime-genai, which needs different files: the function that replaces a function of `TASKS`
_FOR_GENAI: Mapping[Cut, Cut] = {
    encoder_decoder_pieces: genai_sound_pieces,
    vision_language_pieces: genai_picture_pieces,
}

_WRITES_TOKENS = (decoder_pieces, encoder_decoder_pieces, vision_language_pieces)
GENERATES = tuple(task for task, cut in TASKS.items() if cut in _WRITES_TOKENS)
SPEAKS = ("text-to-audio", "audio-to-audio")
# task of an encoder-decoder model by its main input
_BY_INPUT = {
    **dict.fromkeys(("input_features", "input_values"), "automatic-speech-recognition"),
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
    config, name = model.config, type(model).__name__
    if hasattr(model, "generate_speech") and hasattr(model, "speech_decoder_postnet"):
        return SPEAKS[model.main_input_name != "input_ids"]
    by_name = next((task for ending, task in _ENDINGS.items() if name.endswith(ending)), None)
    # encoder-decoders such as RT-DETR and BART also have classes for other tasks
    if getattr(config, "is_encoder_decoder", False) and by_name in (None, *GENERATES):
        return _BY_INPUT.get(text.input_name(model), "text2text-generation")
    takes = inspect.signature(model.forward).parameters
    scores_pairs = hasattr(model, "get_image_features") and hasattr(model, "get_text_features")  # as CLIP and SigLIP
    if scores_pairs and {"input_ids", "pixel_values"} <= set(takes) and argument_of(model.forward) is None:
        return "zero-shot-image-classification"
    if hasattr(model, "get_image_features") and hasattr(config, "vision_config"):
        return "image-text-to-text"
    if name.endswith("ForSequenceClassification") and model.main_input_name == "input_values":
        return "audio-classification"
    return by_name or "feature-extraction"


# names of inputs for pictures and sound, such as `image_pixel_values` of Phi 4 and `image_patches` of Fuyu
_MEDIA = re.compile(r"(.*_)?(pixel_values|input_features|input_values|flattened_patches|image_patches)(_.*)?")


def pieces_for(model: TransformersModel, task: str, split: Split = EVERY) -> tuple[str, list[Piece]]:
    if task != "auto" and task not in TASKS:
        known = f"{did_you_mean([str(task)], TASKS)} Tasks: auto, {', '.join(TASKS)}."
        raise InvalidArgumentError(f"There is no task {task!r}.{known}")
    found = task_of(model)
    wanted = found if task == "auto" else task
    if task == "auto":
        if TASKS[found] in (encoder_decoder_pieces, decoder_pieces):
            reads = model.main_input_name
            takes = inspect.signature(model.forward).parameters
            lost = [name for name in takes if _MEDIA.fullmatch(name) and name != reads]
            if lost and reads != "inputs":  # for "inputs", the encoder of a speech model names the main input
                raise GenerationError(
                    f"{type(model).__qualname__} reads {', '.join(lost)} in addition to {reads}, but files for {found} "
                    f"take only {reads}. To keep {lost[0]}, export recorded calls: with record_calls(model) as "
                    f"calls: model.generate(...). To leave it out, call export_folder(..., task={found!r})."
                )
        generates = getattr(model, "can_generate", None)
        if found == "feature-extraction" and callable(generates) and generates():
            raise GenerationError(
                f"{type(model).__qualname__} has its own generation loop, which exported folders cannot run. Export "
                "recorded calls of this loop: with record_calls(model) as calls: model.generate(...). To export one "
                f"forward call, use export_folder(..., task={found!r})."
            )
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
            f"{type(model).__qualname__} fails with the example inputs for {wanted} ({type(error).__name__}: "
            f"{first_line(error)[:200]}). {one_row}Export the model with its own inputs, export_onnx(model, "
            "kwargs=inputs, path=...), or export recorded calls: with record_calls(model) as calls: ..."
        ) from error
