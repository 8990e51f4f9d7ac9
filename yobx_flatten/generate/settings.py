"""Find the files of an exported model by their names, and read the generation settings of the model."""

# kind of model        exported files
# decoder              `model`
# encoder and decoder  `encoder_model`, `decoder_model` (the first call), `decoder_with_past_model`
# onnxruntime-genai    `encoder` (also returns the cross-attention keys and values), `decoder`
# vision and language  `vision_encoder`, `embed_tokens`, `decoder_model_merged`
# spectrograms         `encoder_model`, `frame_decoder`, `postnet`

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch

from ..core.files.document import damage_as, read_configuration, read_document
from ..core.files.scratch import is_folder
from ..errors import FlattenError, GenerationError, InvalidArgumentError, describe_class, require
from ..errors.failures import first_line
from ..huggingface.decoders import switch_of
from ..trees.arguments import did_you_mean
from .pictures import TILED, Pictures, Tiles
from .sampling import OF_SCORES, Sampling, ScoreProcessor, entries_with_effect, other_loops, sampling_of

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
    """Return the path of a file in a folder, or in the subfolder ``onnx``, where transformers.js looks for models."""
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
        f"{path} has none of the files {expected}. To export a model: yobx-flatten export MODEL -o DIR"
    )


def folder_of(file: pathlib.Path) -> pathlib.Path:
    """Return the folder of a model file, or the folder above ``onnx`` if only that folder has a ``config.json``."""
    parent = file.parent
    is_below = parent.name == SUBFOLDER and (parent.parent / "config.json").is_file()
    return parent.parent if is_below and not (parent / "config.json").is_file() else parent


@dataclasses.dataclass(frozen=True)
class Documents:
    """Contents of ``config.json`` and ``generation_config.json``; the contents of a missing file are empty."""

    config: Mapping[str, Any] = dataclasses.field(repr=False)
    generation: Mapping[str, Any] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Switch:
    """The text length at which a model's rotary angles change, and whether the model recomputes its KV cache there."""

    length: int  # number of tokens, see `.decoders.switch_of`
    # whether `model.generate` drops its cache there and reads all tokens again, as Phi-3 does; `None` if unknown
    rereads: bool | None = None


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """Special tokens and generation defaults of a model, and functions that change the logits.

    Attributes:
        eos_token_ids: ids of the tokens that end a sequence; empty if no token ends a sequence.
        pad_token_id: id of the token that pads a sequence after its end.
        decoder_start_token_id: id of the first token of an encoder-decoder model's output.
        image_token_id: id of the token whose embeddings image features replace.
        max_new_tokens: default of ``generate`` for ``max_new_tokens``; 20 by default.
        max_length: largest number of tokens of a prompt and its new tokens, if ``max_new_tokens`` is not passed.
        sampling: default of ``generate`` for ``sampling``; by default, the likeliest token is chosen.
        num_beams, num_return_sequences: defaults of the arguments of ``generate`` with the same names; 1 by default.
        positions: size of the model's table of position embeddings, in tokens; ``None`` if it has no such table.
        processors: user functions that change the logits, in order, after the model's logits processors have run.
        has_rules: whether entries such as ``repetition_penalty`` require transformers' logits processors.
        other_loops: names of set options that only transformers' ``generate`` supports, such as ``penalty_alpha``.
        forced_bos_token_id: id of the second token of the output; for mBART, the target language.
        forced_eos_token_id: id (or ids) of the last token of a sequence that reaches ``max_new_tokens``.
        spatial_merge_size: number of patches per token along each side of a picture, for M-RoPE models.
        video_token_id: id of the token whose embeddings video features replace.
        tokens_per_second: number of positions per second of video, for models whose positions depend on time.
        sees_prompt: whether all prompt tokens attend to each other (PaliGemma); ``False`` by default.
        switch: the text length at which the model's rotary angles change; ``None`` if the angles never change.
        tiles: how the model cuts pictures into tiles; ``None`` if it uses no tiles.
        documents: contents of ``config.json`` and ``generation_config.json``; ``None`` if the model has no such files.
    """

    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    image_token_id: int | None = None
    max_new_tokens: int = 20
    processors: tuple[ScoreProcessor, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | tuple[int, ...] | None = None
    spatial_merge_size: int | None = None
    sees_prompt: bool = False
    video_token_id: int | None = None
    tokens_per_second: float | None = None
    max_length: int | None = None
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    num_beams: int = 1
    num_return_sequences: int = 1
    has_rules: bool = False
    other_loops: tuple[str, ...] = ()
    positions: int | None = None
    switch: Switch | None = dataclasses.field(default=None, repr=False)
    tiles: Tiles | None = None
    documents: Documents | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def is_speech(self) -> bool:
        """Whether the model is Whisper, whose own generation loop detects language, task and timestamps."""
        if self.documents is None or not self.documents.config.get("max_source_positions"):
            return False
        generation = self.documents.generation
        return any(generation.get(name) is not None for name in ("lang_to_id", "no_timestamps_token_id"))

    def images(
        self,
        pixel_values: torch.Tensor | None,
        grids: torch.Tensor | None,
        sizes: torch.Tensor | None = None,
        together: torch.Tensor | None = None,
    ) -> Pictures:
        """Return the images of a ``generate`` call as one object.

        Args:
            pixel_values: pixels or patches of the images; ``None`` if there are no images.
            grids: number of patches of each image in time, height and width; ``None`` if all images have one size.
            sizes: height and width of each image, for a model that cuts images into tiles.
            together: the number of images of each prompt, for a model that cuts images into tiles.

        Raises:
            InvalidArgumentError: when ``sizes``, ``together`` or ``grids`` is given, but the model does not use it.
        """
        if self.tiles is None:
            _refuse("cut pictures into tiles (LLaVA-NeXT)", image_sizes=sizes, batch_num_images=together)
        else:
            _refuse("read patches of pictures (Qwen2-VL)", image_grid_thw=grids)
        stated = grids if self.tiles is None else sizes
        return Pictures("image", pixel_values, stated, self.image_token_id, tiles=self.tiles, together=together)

    def videos(
        self,
        pixel_values: torch.Tensor | None,
        sizes: torch.Tensor | None,
        seconds: Sequence[Any] | torch.Tensor | None,
    ) -> Pictures:
        """Return the videos of a ``generate`` call as one object.

        Args:
            pixel_values: patches of the videos; ``None`` if there are no videos.
            sizes: number of patches of each video in time, height and width.
            seconds: seconds between frames, one number for each video; ``None`` for 1 second.
        """
        count = 0 if sizes is None else len(sizes)
        if seconds is not None and len(seconds) != count:
            raise InvalidArgumentError(
                f"second_per_grid_ts has {len(seconds)} numbers for {count} rows of video_grid_thw. Pass one per row."
            )
        of_second, times = self.tokens_per_second, [1] * count if seconds is None else seconds
        spacing = [] if of_second is None else [of_second * one for one in times]
        return Pictures("video", pixel_values, sizes, self.video_token_id, spacing)

    def token_types(self, prompt: torch.Tensor) -> torch.Tensor:
        """Return ``token_type_ids`` of a prompt: 1 for image tokens and 0 for text (PaliGemma: 0 for all tokens).

        Args:
            prompt: token ids of shape (batch, length).
        """
        return torch.zeros_like(prompt) if self.sees_prompt else torch.eq(prompt, self.image_token_id or 0).long()

    @property
    def generated_type(self) -> int:
        """The ``token_type_id`` of generated tokens, which use causal attention."""
        return int(self.sees_prompt)


def _refuse(readers: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise InvalidArgumentError(f"{name} is for models that {readers}: leave {name} out.")


def refusals_named(what: str, call: Callable[[], Any], given: Mapping[str, Any], sets: Sequence[str] = ()) -> Any:
    """Call a function of transformers, and convert its errors about arguments to errors of this package."""
    # given: the keywords of the call; the message lists them if the error of transformers names no keyword
    # sets: entries of the call or of generation_config.json for which transformers has another loop
    try:
        return call()
    except FlattenError:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError, LookupError) as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if isinstance(error, ValueError):
            from transformers import GenerationConfig

            near = did_you_mean(re.findall(r"'(\w+)'", str(error)), vars(GenerationConfig()))
            of = "".join(f", which sets {name}" for name in sets)
            raise InvalidArgumentError(f"{what} refuses this call{of}: {error}{near}") from error
        if not innermost.f_globals.get("__name__", "").startswith("transformers."):  # a user's streamer, for example
            raise
        plain = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor | None)}
        listed = ", ".join(f"{name}: {describe_class(value)}" for name, value in plain.items())
        raise InvalidArgumentError(
            f"{what} fails for one of its arguments ({first_line(error)}). Check their types and values: {listed}."
        ) from error


@functools.cache
def _types_of_entries() -> dict[str, Any]:
    from msgspec import Meta

    token = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
    count = Annotated[int, Meta(ge=0, lt=2**31)]
    beams = Annotated[int, Meta(ge=1, le=1024)]  # each beam is a row with its own cache
    rate = Annotated[float, Meta(gt=0, le=1e6)]

    def form(types: Mapping[str, Any], *bases: type) -> Any:
        fields = [(name, kind | None, None) for names, kind in types.items() for name in names.split()]
        return dataclasses.make_dataclass("Entries", fields, bases=bases, frozen=True, kw_only=True)

    tokens = form({"bos_token_id eos_token_id": token | list[token], "pad_token_id decoder_start_token_id": token})
    vision = {"spatial_merge_size": Annotated[int, Meta(ge=1, lt=2**16)], "tokens_per_second": rate}
    entries = {
        "image_token_id image_token_index video_token_id video_token_index": token,
        "forced_bos_token_id no_timestamps_token_id prev_sot_token_id": token,
        "forced_eos_token_id": token | list[token],
        "suppress_tokens begin_suppress_tokens": list[token],
        "bad_words_ids": list[list[token]],
        "lang_to_id task_to_id": dict[str, token],
        "max_new_tokens min_new_tokens min_length no_repeat_ngram_size encoder_no_repeat_ngram_size": count,
        "max_initial_timestamp_index max_source_positions": count,
        "repetition_penalty encoder_repetition_penalty": rate,
        "remove_invalid_values is_multilingual return_timestamps": bool,
        "model_type": str,
        "text_config": tokens,
        "vision_config": form(vision),
    }
    # entries read from generation_config.json only, since in config.json a name may have another meaning
    choices = {
        "max_length top_k": count,
        "num_beams num_return_sequences": beams,
        "temperature top_p min_p typical_p length_penalty": float,
        "early_stopping": bool | str,
        "do_sample": bool,
    }
    of_config = form(entries, tokens)
    of_folder = form({"positions": Annotated[int, Meta(ge=1)], "rereads_at_switch": bool})
    return {"config.json": of_config, "generation_config.json": form(choices, of_config), MANIFEST: of_folder}


def read_settings(folder: pathlib.Path) -> GenerationSettings:
    # each of the three files may be missing
    require("msgspec", purpose=f"reading {folder}")
    types = _types_of_entries()
    found: list[dict[str, Any]] = []
    for name in ("config.json", "generation_config.json"):
        found.append({})
        if (folder / name).exists():
            read_configuration(folder / name, types[name], failure=GenerationError)  # checks the types of the entries
            found[-1] = read_configuration(folder / name, dict[str, Any], failure=GenerationError)
    manifest, form = folder / MANIFEST, types[MANIFEST]
    described = read_document(manifest, form, failure=GenerationError) if manifest.exists() else form()
    with damage_as(GenerationError, f"config.json or generation_config.json in {folder}"):
        text = {**found[0], **(found[0].get("text_config") or {})}
        vocabulary = text.get("vocab_size")
        for place, name in itertools.product(found, ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")):
            for token in (token for row in _ids(place.get(name)) for token in _ids(row)):
                if isinstance(vocabulary, int) and token >= vocabulary:
                    raise GenerationError(
                        f"{folder} sets {name} = {token:,}, but the vocabulary has {vocabulary:,} tokens. Correct "
                        "the entry in generation_config.json or config.json."
                    )
        length = switch_of(text)
        switch = None if length is None else Switch(length, described.rereads_at_switch)
        return dataclasses.replace(settings_of(*found), switch=switch, positions=described.positions)


def settings_of(config: Mapping[str, Any], generation: Mapping[str, Any]) -> GenerationSettings:
    """Return the settings in a model's ``config.json`` and ``generation_config.json``.

    As in transformers, ``config.json`` sets generation options only if ``generation_config.json`` is missing or empty.

    >>> found = settings_of({"eos_token_id": 1, "pad_token_id": 0}, {"eos_token_id": [2, 3], "max_new_tokens": 5})
    >>> found.eos_token_ids, found.pad_token_id, found.max_new_tokens
    ((2, 3), 2, 5)
    """
    text = {**config, **(config.get("text_config") or {})}
    vision = config.get("vision_config") or {}
    places = (generation,) if generation else (config, text)

    def stated(*names: str) -> Any:
        return next((place[name] for name in names for place in places if place.get(name) is not None), None)

    def token(name: str) -> Any:
        return next((config[one] for one in (f"{name}_id", f"{name}_index") if config.get(one) is not None), None)

    rules = generation or text
    ends = _ids(stated("eos_token_id"))
    forced = rules.get("forced_eos_token_id")
    pad = stated("pad_token_id")
    starts = ("decoder_start_token_id", "bos_token_id")
    new, longest = stated("max_new_tokens"), stated("max_length")
    return GenerationSettings(
        ends,
        pad if pad is not None else ends[0] if ends else None,
        # also from config.json, because the caller would otherwise have to pass decoder_input_ids
        next((one for one in (stated(*starts), *map(text.get, starts)) if one is not None), None),
        token("image_token"),
        new or 20,
        forced_bos_token_id=rules.get("forced_bos_token_id"),
        forced_eos_token_id=tuple(forced) if isinstance(forced, list) else forced,
        spatial_merge_size=vision.get("spatial_merge_size"),
        sees_prompt=config.get("model_type") == "paligemma",
        video_token_id=token("video_token"),
        tokens_per_second=vision.get("tokens_per_second"),
        max_length=longest if not new and type(longest) is int else None,
        sampling=sampling_of(rules),
        num_beams=rules.get("num_beams") or 1,
        num_return_sequences=rules.get("num_return_sequences") or 1,
        has_rules=bool(entries_with_effect(rules, OF_SCORES)),
        other_loops=other_loops(rules),
        tiles=Tiles(config) if config.get("model_type") in TILED else None,
        documents=Documents(config, generation),
    )


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)
