"""Export models that are called once and have no cache: text, sound or images in, tensors out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import Dim

from ...core.effects import undisturbed
from ...errors import GenerationError
from ...export.proof.eager_runs import Case
from ...huggingface.cache_names import argument_of
from ...private_names.of_torch import pytree
from ...recipe.aliases import TransformersModel
from ...trees.shapes import dynamic_shapes
from .text import EVERY, Piece, Split, image_size, note_on_other_inputs, random_tokens, random_values


def plain_pieces(model: TransformersModel, split: Split = EVERY) -> list[Piece]:
    """Return the one file to export, ``model``, for a model with one main input."""
    reads = model.main_input_name
    if reads not in _INPUTS:
        raise GenerationError(
            f"{type(model).__qualname__} reads {reads}, but folders need models that read {', '.join(_INPUTS)}. "
            "Export the model with your own inputs:\n    export_onnx(model, kwargs=inputs, path=...)"
        )
    make, unit, (length, one, other) = _INPUTS[reads]
    sizes = split.named(("batch", unit) if unit else ("batch",), (1, one), (3, other))
    cases = [Case(name, (), make(model, *size)) for name, size in sizes.items()]
    return [_piece(model, make(model, split.rows or 2, length), cases)]


def choice_pieces(model: TransformersModel, split: Split = EVERY) -> list[Piece]:
    """Return the one file to export: it scores the choices of each row, tokens of shape (batch, choices, length)."""

    def made(batch: int, choices: int, length: int) -> dict[str, torch.Tensor]:
        flat = _tokens(model.base_model, batch * choices, length)  # the base model takes rows, not choices
        return {name: value.unflatten(0, (batch, choices)) for name, value in flat.items()}

    sizes = split.named(("batch", "choices", "length"), (1, 2, 5), (3, 4, 11))
    cases = [Case(name, (), made(*size)) for name, size in sizes.items()]
    return [_piece(model, made(split.rows or 2, 3, 7), cases)]


def compares(model: TransformersModel) -> bool:
    """Return whether a model scores pairs of pictures and texts, as CLIP and SigLIP do."""
    both = all(hasattr(model, name) for name in ("get_image_features", "get_text_features"))
    takes = inspect.signature(model.forward).parameters
    return both and {"input_ids", "pixel_values"} <= set(takes) and argument_of(model.forward) is None


def two_tower_pieces(model: TransformersModel, split: Split = EVERY) -> list[Piece]:
    """Return the one file to export: it takes any number of texts and pictures, and scores each pair."""
    vision, rows = model.config.vision_config, split.rows
    room = getattr(model.config.text_config, "max_position_embeddings", 16)

    def made(texts: int, pictures: int, length: int) -> dict[str, torch.Tensor]:
        ids = random_tokens(model, (rows or texts, min(length, room)))
        shape = (rows or pictures, getattr(vision, "num_channels", 3), *image_size(vision))
        pixels = random_values(model, shape, pictures)
        mask = torch.ones_like(ids)
        mask[0, -1:] = 0
        masks = {"attention_mask": mask} if "attention_mask" in inspect.signature(model.forward).parameters else {}
        return {"input_ids": ids, "pixel_values": pixels, **masks}

    cases = [
        Case(f"texts {rows or texts}, pictures {rows or pictures}, length {length}", (), made(texts, pictures, length))
        for texts, pictures, length in ((1, 2, 5), (5, 1, 11))
    ]
    return [_piece(model, made(3, 2, 7), cases)]


@torch.no_grad()
def _piece(model: TransformersModel, example: dict[str, torch.Tensor], cases: list[Case]) -> Piece:
    """Return the file of a model for an example; pictures have one size if other sizes cannot be traced."""
    check_nothing_is_drawn(model, example)
    pictures = {"pixel_values": {0: Dim.AUTO}}
    narrower = dynamic_shapes(example, pictures) if "pixel_values" in example else None
    return Piece("model", model, example, cases, narrower=narrower, remarks=note_on_other_inputs(model, example))


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


def _sound(model: TransformersModel, batch: int, length: int) -> dict[str, torch.Tensor]:
    if hasattr(model.config, "frequency_stride"):  # AST cuts a spectrogram of one size into patches
        return {"input_values": random_values(model, (batch, model.config.max_length, model.config.num_mel_bins))}
    found = {"input_values": random_values(model, (batch, length))}
    if getattr(model.config, "feat_extract_norm", None) == "layer":  # other models were trained without a mask
        found["attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
        found["attention_mask"][0, length // 2 + 100 :] = 0
    return found


def _image(model: TransformersModel, batch: int, _: int) -> dict[str, torch.Tensor]:
    config = model.config
    frames = getattr(config, "num_frames", None)  # of a video
    shape = (*((frames,) if isinstance(frames, int) else ()), getattr(config, "num_channels", 3), *image_size(config))
    return {"pixel_values": random_values(model, (batch, *shape))}


def _frames(model: TransformersModel, batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"spectrogram": random_values(model, (batch, length, model.config.model_in_dim))}


# by input name: the function that makes inputs, the unit of its length, and three lengths: example, first case, second
# case; a second of sound has 16000 samples, and images have one size
_INPUTS: dict[str, tuple[Callable[..., dict[str, torch.Tensor]], str, tuple[int, int, int]]] = {
    "input_ids": (_tokens, "length", (7, 5, 11)),
    "input_values": (_sound, "samples", (3200, 2400, 5001)),
    "pixel_values": (_image, "", (0, 0, 0)),
    "spectrogram": (_frames, "frames", (7, 5, 11)),
}


@torch.no_grad()
def check_nothing_is_drawn(model: TransformersModel, example: Mapping[str, torch.Tensor]) -> None:
    """Raise GenerationError if outputs depend on torch's seed, because no file could be compared with the model."""
    with undisturbed(seed=0, model=model):
        before = torch.get_rng_state()
        first = _tensors(model(**example))
        if torch.equal(before, torch.get_rng_state()):
            return
    with undisturbed(seed=1, model=model):
        second = _tensors(model(**example))
    if _equal(first, second):
        return
    if model.training:
        raise GenerationError(
            f"{type(model).__qualname__} is in training mode, where dropout is random. Before the export:\n"
            "    model.eval()"
        )
    given = "; its argument noise= can be an input" if "noise" in inspect.signature(model.forward).parameters else ""
    raise GenerationError(
        f"{type(model).__qualname__} draws random numbers in evaluation mode, so two calls differ and no file can be "
        f"checked{given}. Switch random draws off in its config, or pass the random tensor as an input: "
        "export_onnx(model, kwargs=inputs, path=...)"
    )


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output, whose class need not be registered for flattening."""
    found = pytree.tree_leaves(dict(outputs) if isinstance(outputs, dict) else outputs)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


TYPES = "token_type_ids"


def pair_types(model: TransformersModel, batch: int, length: int) -> torch.Tensor:
    """Make token types for pairs of texts, whose second text begins later in each row: int64 of (batch, length)."""
    # for a model whose types have several columns (TAPAS), one more axis
    begins = 1 + torch.arange(batch)[:, None] % (length - 1)
    types = (torch.arange(length) >= begins).long()
    columns = getattr(model.config, "type_vocab_sizes", None)
    return types if columns is None else types[..., None] * (torch.tensor(columns) > 1).long()


@torch.no_grad()
def has_types(model: TransformersModel, tokens: torch.Tensor) -> bool:
    """Return whether the outputs of a model for ``tokens`` depend on token types that its tokenizer may return."""
    if TYPES not in inspect.signature(model.forward).parameters:
        return False
    pairs = pair_types(model, *tokens.shape)
    without, alike = (
        _tensors(model(input_ids=tokens)),
        _tensors(model(input_ids=tokens, **{TYPES: torch.zeros_like(pairs)})),
    )
    try:
        differing = _tensors(model(input_ids=tokens, **{TYPES: pairs}))
    except IndexError:  # the embedding has only one type
        return False
    # a model for which missing types equal types of 0 needs types, except with a RoBERTa tokenizer, which gives both
    # texts of a pair the type 0; for other models, the tokenizer class decides
    kinds = _tokenizers(model)
    is_usual = getattr(model.config, "tokenizer_class", None) is None
    has_none = is_usual and any("Roberta" in kind.__name__ for kind in kinds)
    returned = any(TYPES in getattr(kind, "model_input_names", ()) for kind in kinds)
    return not _equal(alike, differing) and ((_equal(without, alike) and not has_none) or returned)


def _tokenizers(model: TransformersModel) -> list[type]:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    found = TOKENIZER_MAPPING.get(type(model.config), ())
    # in transformers 4, a tuple of a slow and a fast tokenizer
    return [kind for kind in (found if isinstance(found, tuple) else (found,)) if kind]
