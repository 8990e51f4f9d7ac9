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
    """One file, ``model``."""
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
        flat = _tokens(model.base_model, batch * choices, length)  # which has rows, not choices
        return {name: value.unflatten(0, (batch, choices)) for name, value in flat.items()}

    sizes = split.named(("batch", "choices", "length"), (1, 2, 5), (3, 4, 11))
    cases = [Case(name, (), made(*size)) for name, size in sizes.items()]
    return [_piece(model, made(split.rows or 2, 3, 7), cases)]


def compares(model: TransformersModel) -> bool:
    """Return whether a model compares pictures with texts, and generates no text (CLIP, SigLIP)."""
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
    """Return the file of a model for an example; pictures have one size if others cannot be traced."""
    check_nothing_is_drawn(model, example)
    pictures = {"pixel_values": {0: Dim.AUTO}}
    narrower = dynamic_shapes(example, pictures) if "pixel_values" in example else None
    return Piece("model", model, example, cases, narrower=narrower, remarks=note_on_other_inputs(model, example))


def _tokens(model: TransformersModel, batch: int, length: int) -> dict[str, torch.Tensor]:
    tokens = random_tokens(model, (batch, length))
    mask = torch.ones_like(tokens)
    mask[0, length - 1 :] = 0  # padded on the right, as encoders are
    end = model.config.eos_token_id if getattr(model.config, "is_encoder_decoder", False) else None
    if isinstance(end, int):  # classifiers with a decoder read the state of the end token: one in each row
        tokens = torch.where(tokens == end, end + 1 if end < int(tokens.max()) else 0, tokens)
        tokens.scatter_(1, mask.sum(1, keepdim=True) - 1, end)
    # asked with the same tokens for every size: all calls of a file have the same inputs
    types = {TYPES: pair_types(model, batch, length)} if has_types(model, random_tokens(model, (2, 7))) else {}
    return {"input_ids": tokens, "attention_mask": mask, **types}


def _sound(model: TransformersModel, batch: int, length: int) -> dict[str, torch.Tensor]:
    if hasattr(model.config, "frequency_stride"):  # AST cuts a spectrogram of one size into patches
        return {"input_values": random_values(model, (batch, model.config.max_length, model.config.num_mel_bins))}
    found = {"input_values": random_values(model, (batch, length))}
    if getattr(model.config, "feat_extract_norm", None) == "layer":  # others were trained without: zeros pad their rows
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


# what makes the inputs; what is counted, and three numbers of it; a second of sound has 16000 samples, images one size
_INPUTS: dict[str, tuple[Callable[..., dict[str, torch.Tensor]], str, tuple[int, int, int]]] = {
    "input_ids": (_tokens, "length", (7, 5, 11)),
    "input_values": (_sound, "samples", (3200, 2400, 5001)),
    "pixel_values": (_image, "", (0, 0, 0)),
    "spectrogram": (_frames, "frames", (7, 5, 11)),
}


# Refuse a model that draws random numbers in evaluation: no file could be compared with it.


@torch.no_grad()
def check_nothing_is_drawn(model: TransformersModel, example: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose outputs depend on torch's seed; draws that are not used are accepted."""
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
        f"checked{given}. Switch the draws off in its config, or pass the random tensor as an input: "
        "export_onnx(model, kwargs=inputs, path=...)"
    )


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """The tensors of an output, which is not registered here."""
    found = pytree.tree_leaves(dict(outputs) if isinstance(outputs, dict) else outputs)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


# Add ``token_type_ids`` to a model's file: which of two texts a token belongs to.


TYPES = "token_type_ids"


def pair_types(model: TransformersModel, batch: int, length: int) -> torch.Tensor:
    """Make token types for pairs of texts, whose second text begins later in each row: int64 of (batch, length)."""
    # model: a model that `has_types` holds for; one whose types have several columns (TAPAS) gets as many
    begins = 1 + torch.arange(batch)[:, None] % (length - 1)
    types = (torch.arange(length) >= begins).long()
    columns = getattr(model.config, "type_vocab_sizes", None)
    return types if columns is None else types[..., None] * (torch.tensor(columns) > 1).long()


@torch.no_grad()
def has_types(model: TransformersModel, tokens: torch.Tensor) -> bool:
    """Return whether the scores of a model depend on token types that its tokenizer may return."""
    # tokens: tokens to call it with, int64 of shape (batch, length)
    if TYPES not in inspect.signature(model.forward).parameters:
        return False
    pairs = pair_types(model, *tokens.shape)
    without, alike = (
        _tensors(model(input_ids=tokens)),
        _tensors(model(input_ids=tokens, **{TYPES: torch.zeros_like(pairs)})),
    )
    try:
        differing = _tensors(model(input_ids=tokens, **{TYPES: pairs}))
    except IndexError:  # it has one type: the embedding has one row
        return False
    # without types, some read the tokens as of one text; others have no types then, and their tokenizers decide
    kinds = _tokenizers(model)
    is_usual = getattr(model.config, "tokenizer_class", None) is None  # no other one than that of its type
    has_none = is_usual and any("Roberta" in kind.__name__ for kind in kinds)  # gives both texts of a pair the type 0
    returned = any(TYPES in getattr(kind, "model_input_names", ()) for kind in kinds)
    return not _equal(alike, differing) and ((_equal(without, alike) and not has_none) or returned)


def _tokenizers(model: TransformersModel) -> list[type]:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    found = TOKENIZER_MAPPING.get(type(model.config), ())
    return [kind for kind in (found if isinstance(found, tuple) else (found,)) if kind]  # slow, fast: transformers 4
