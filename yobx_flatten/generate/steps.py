"""Run the exported files once, on a prompt or on the last token, with the KV cache of the previous call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import GenerationError, InvalidArgumentError, describe_class
from ..huggingface.cache_names import CACHE
from ..runners.adapters import FolderAdapters
from ..runners.in_place import cache_tensors
from ..runners.ports import Runner, check_cache_outputs, present_of
from .pictures import Pictures, Seen, check_ports, empty_cache, image_positions, typed
from .settings import GenerationSettings

# inputs of a call that are its images and videos, or describe them
OF_IMAGES = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images")
OF_VIDEOS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")

_LOOP = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "deepstack_embeds")
_FROM_ENCODER = ("encoder_hidden_states", "encoder_attention_mask")
# inputs of an encoder other than text: what they contain, and their shape
READ = {
    "input_features": ("sound", "(batch, bins, frames)"),
    "input_values": ("sound", "(batch, samples)"),
    "pixel_values": ("pictures", "(batch, channels, height, width)"),
}
_SOURCES = ("input_ids", *READ, "attention_mask")


@dataclasses.dataclass(frozen=True)
class Parts:
    decoder: Runner  # the file that takes tokens and a cache, and returns scores and the cache
    # the file for the first call, without a cache among its inputs; `None` if `decoder` accepts an empty cache
    prefill: Runner | None = None
    encoder: Runner | None = None  # the encoder of an encoder-decoder model
    embed: Runner | None = None  # the file from tokens to embeddings, if `decoder` takes embeddings
    vision: Runner | None = None  # the file from images to the features that replace image tokens
    postnet: Runner | None = None  # the file that smooths spectrogram frames, for a speech model

    def with_adapter(self, adapters: FolderAdapters, name: str) -> Parts:
        runners = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        used = adapters.runners({part: runner for part, runner in runners.items() if runner is not None}, name)
        return dataclasses.replace(self, **used)


@dataclasses.dataclass
class TextState:
    """The tokens and KV cache of a text during generation, and the inputs of the next call."""

    tokens: torch.Tensor
    mask: torch.Tensor
    new: torch.Tensor
    cache: dict[str, Any]
    context: dict[str, torch.Tensor]
    # features of pictures and videos, until the first call takes them
    seen: list[Seen] = dataclasses.field(default_factory=list)
    # tokens that the encoder read; for a decoder-only model, the prompt
    source: torch.Tensor | None = None
    # positions of all tokens, if the caller passes positions, or if the decoder has 3D positions (M-RoPE)
    positions: torch.Tensor | None = None
    # token types of all tokens, if the decoder takes token types
    types: torch.Tensor | None = None
    generated_type: int = 0
    forced: int | None = None  # forced_bos_token_id of this call
    # cross-attention weights of the last call, of shape (batch, tokens, source), by layer and head
    weights: dict[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)

    def repeat(self, rows: torch.Tensor) -> None:
        self.tokens, self.mask = self.tokens[rows], self.mask[rows]
        self.context = {name: value[rows] for name, value in self.context.items()}
        self.source = None if self.source is None else self.source[rows]
        self.positions = None if self.positions is None else self.positions[..., rows, :]
        self.types = None if self.types is None else self.types[rows]

    def keep(self, count: int) -> None:
        self.tokens, self.mask = self.tokens[:, :count], self.mask[:, :count]
        self.positions = None if self.positions is None else self.positions[..., :count]
        self.types = None if self.types is None else self.types[:, :count]

    def follow(
        self, new: torch.Tensor, mask: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> None:
        """Append new tokens of shape (batch, count), and make them the inputs of the next call."""
        # mask: the mask of all tokens; by default, 1 for new tokens
        # positions: the positions of the new tokens; by default, they follow the last position
        self.new, self.tokens = new, torch.cat([self.tokens, new], dim=1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(new.shape)], dim=1) if mask is None else mask
        if self.positions is not None:
            if positions is None or self.positions.ndim == 3:
                positions = self.positions[..., -1:] + 1 + torch.arange(new.shape[1])
            self.positions = torch.cat([self.positions, positions], dim=-1)
        if self.types is not None:
            self.types = torch.cat([self.types, self.types.new_full(new.shape, self.generated_type)], dim=1)


_ONE_CALL = "Call an encoder once:\n    open_model(folder)(input_ids=..., attention_mask=...)"


class Steps:
    def __init__(self, parts: Parts, settings: GenerationSettings) -> None:
        self.parts, self.settings = parts, settings
        if parts.postnet is not None:  # no tokens: see `spectrogram`
            return
        for part in (parts.decoder, parts.prefill):
            if part is not None:
                check_ports(
                    {name: port for name, port in part.ports.items() if all(name != s.port.name for s in part.slots)},
                    (*_LOOP, *(_FROM_ENCODER if parts.encoder is not None else ())),
                    part.name,
                )
                check_cache_outputs(part.ports, part.outputs, part.name)
                if "logits" not in part.outputs:
                    raise GenerationError(
                        f"{part.name} returns {', '.join(part.outputs)}, and no logits: it cannot generate. {_ONE_CALL}"
                    )
        if parts.prefill is not None:
            check_cache_outputs(parts.decoder.ports, parts.prefill.outputs, parts.prefill.name, of=parts.decoder.name)
        if not parts.decoder.slots:
            raise GenerationError(
                f"{parts.decoder.name} has no inputs {CACHE}.*: it is an encoder, or a decoder without its cache. "
                f"{_ONE_CALL}\nExport a decoder with its cache:\n"
                "    export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=...)"
            )

    def pictures(self, given: Mapping[str, Any]) -> tuple[Pictures, Pictures]:
        settings = self.settings
        return settings.images(*map(given.get, OF_IMAGES)), settings.videos(*map(given.get, OF_VIDEOS))

    @functools.cached_property
    def heads(self) -> dict[str, tuple[int, int]]:
        """The layer and head of each output that contains cross-attention weights, by name of the output."""
        names = [name.split(".") for name in self.parts.decoder.outputs]
        return {".".join(name): (int(name[1]), int(name[2])) for name in names if name[0] == "cross_attentions"}

    def begin(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        encoded: dict[str, torch.Tensor],
        decoder_input_ids: torch.Tensor | None,
        pictures: Sequence[Pictures],
    ) -> TextState:
        """Return the state before files run on a prompt: the prompt, encoder or vision features, and an empty cache."""
        context: dict[str, torch.Tensor] = {}
        seen: list[Seen] = []
        positions = types = None
        if self.parts.encoder is not None:
            encoder = self.parts.encoder
            unread = [name for name in encoded if name not in encoder.ports]
            unread += [name for one in pictures for name in one.names if name not in encoded]
            if unread:
                reads = next((name for name in ("input_ids", *READ) if name in encoder.ports), "nothing")
                raise InvalidArgumentError(f"{encoder.name} reads {reads}, not {unread[0]}: remove {unread[0]}.")
            context, batch = self.encode(input_ids, attention_mask, encoded)
            if decoder_input_ids is not None:
                tokens = tokens_of("decoder_input_ids", decoder_input_ids)
            elif self.settings.decoder_start_token_id is None:
                raise InvalidArgumentError(
                    "No decoder_start_token_id is known for this model. Pass decoder_input_ids of shape (batch, 1)."
                )
            else:
                tokens = torch.full((batch, 1), self.settings.decoder_start_token_id)
            if len(tokens) != batch:
                raise InvalidArgumentError(
                    f"decoder_input_ids has {len(tokens)} rows, but the encoder's input has {batch}. Pass {batch} rows."
                )
            mask = torch.ones_like(tokens)
        else:
            if encoded or decoder_input_ids is not None:
                raise InvalidArgumentError(
                    f"{self.parts.decoder.name} belongs to a decoder-only model. Pass input_ids, and leave out "
                    "input_features, input_values and decoder_input_ids."
                )
            tokens = tokens_of("input_ids", input_ids)
            mask = _mask_of(tokens, attention_mask)
            if bool((mask[:, -1] == 0).any()):
                raise InvalidArgumentError(
                    "attention_mask is 0 at the end of a row: the next token would follow padding. Pad prompts on the "
                    'left:\n    tokenizer.padding_side = "left"'
                )
            seen = [s for one in pictures for s in one.seen_by(self.parts.vision, self.parts.decoder, tokens)]
            port = self.parts.decoder.ports.get("position_ids")
            if port is not None and len(port.shape) == 3:  # positions in time, height and width
                positions = image_positions(tokens, mask, pictures, self.settings.spatial_merge_size or 1)
            if "token_type_ids" in self.parts.decoder.ports:
                types = self.settings.token_types(tokens)
        cache = {} if self.parts.prefill is not None else self._empty_cache(len(tokens), context)
        source = tokens if self.parts.encoder is None else None if encoded else input_ids
        of_types = (types, self.settings.generated_type)
        return TextState(tokens, mask, tokens, cache, context, seen, source, positions, *of_types)

    def encode(
        self, input_ids: torch.Tensor | None, mask: torch.Tensor | None, given: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], int]:
        encoder = self.parts.encoder
        assert encoder is not None
        check_ports(encoder.ports, _SOURCES, encoder.name)
        feeds = {} if mask is None else {"attention_mask": mask}
        reads = next((name for name in READ if name in encoder.ports), None)
        if reads is not None:
            (what, shape), value = READ[reads], given.get(reads)
            if input_ids is not None:
                raise InvalidArgumentError(f"{encoder.name} reads {reads}, not input_ids: remove input_ids.")
            if value is None or value.ndim != shape.count(",") + 1:
                raise InvalidArgumentError(f"{encoder.name} reads {what}. Pass {reads} of shape {shape}.")
            if reads == "input_features":
                _, bins, frames = encoder.ports[reads].shape
                if bins is not None and value.shape[1] != bins:
                    raise InvalidArgumentError(
                        f"input_features of shape (batch, bins, frames) must have {bins} bins, found {value.shape[1]}."
                    )
                if frames is not None and value.shape[2] > frames:
                    raise InvalidArgumentError(
                        f"input_features has {value.shape[2]} frames, but {encoder.name} reads at most {frames}. "
                        "Whisper's own loop splits longer sound into windows:\n"
                        "    generate(input_features=sound, return_timestamps=True)"
                    )
                value = torch.nn.functional.pad(value, (0, 0 if frames is None else frames - value.shape[2]))
            source = feeds[reads] = value
        else:
            source = feeds["input_ids"] = tokens_of("input_ids", input_ids)
            mask = feeds["attention_mask"] = _mask_of(source, mask)
        outputs, keys = encoder.step(typed(encoder, feeds), {})
        context = {"encoder_hidden_states": outputs["last_hidden_state"], **cache_tensors(keys)}
        if mask is not None:
            context["encoder_attention_mask"] = mask
        return context, len(source)

    def _empty_cache(self, rows: int, context: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return a KV cache without decoder tokens; the encoder's keys and values are taken from ``context``."""
        decoder, made = self.parts.decoder, dict[str, torch.Tensor]()
        if self.parts.encoder is not None:
            kept = {slot.port.name: present_of(slot.port.name) or "" for slot in decoder.slots if slot.present is None}
            missing = [name for name in kept.values() if name not in context]
            if missing:
                raise InvalidArgumentError(
                    f"{decoder.name} also needs {missing[0]} from {self.parts.encoder.name}. Pass encoder_outputs as "
                    "get_encoder() returned them, or the encoder's inputs."
                )
            made = {name: context[present] for name, present in kept.items()}
        empty = empty_cache([slot for slot in decoder.slots if slot.port.name not in made], rows)
        return decoder.cache({**empty, **made})

    def pass_switch(self, sequence: TextState) -> None:
        """Empty the KV cache if the new tokens pass the text length at which the model recomputes its cache."""
        switch = self.settings.switch
        total = sequence.mask.shape[1]
        is_past = switch is not None and total - sequence.new.shape[1] <= switch.length < total
        if switch is None or not is_past or switch.rereads is False:
            return
        if switch.rereads is None:
            raise GenerationError(
                f"This text grew past {switch.length} tokens, where the model's rotary angles change (longrope, "
                "dynamic). Some models, such as Phi-3, recompute the KV cache when these angles change. A folder "
                "without yobx_flatten.json does not record whether its model does, so the next tokens may be wrong. "
                "Export with\n    export_folder(model, folder)\nor begin with a prompt of over "
                f"{switch.length} tokens, or ask for fewer new tokens."
            )
        if self.parts.embed is not None or self.parts.prefill is not None:
            raise GenerationError(
                f"This text grew past {switch.length} tokens, where the model computes the KV cache again from the "
                "whole text. Files for images or with an encoder cannot recompute a KV cache: ask for fewer new tokens."
            )
        sequence.new = sequence.tokens
        sequence.cache = self._empty_cache(len(sequence.tokens), sequence.context)

    def step(self, sequence: TextState) -> torch.Tensor:
        return self.scores(sequence, last_scores=True)[:, -1].float()

    def scores(self, sequence: TextState, *, last_scores: bool = False) -> torch.Tensor:
        """Run the files once, and return the logits, of shape (batch, tokens, vocabulary)."""
        most, decoder = self.settings.positions, self.parts.decoder
        used = 0 if most is None else int(sequence.mask.sum(-1).max())
        if most is not None and used > most:  # runtimes compute different values beyond the last position
            begun = sequence.new.shape[1]
            raise InvalidArgumentError(
                f"The text has {used} tokens, but the model has {most} positions. "
                + (f"Pass at most {most} tokens." if begun > 1 else "Pass a shorter prompt, or max_new_tokens.")
            )
        if not sequence.cache and self.parts.prefill is None:
            sequence.cache = self._empty_cache(len(sequence.tokens), sequence.context)
        runner = decoder if sequence.cache or self.parts.prefill is None else self.parts.prefill
        outputs, cache = runner.step(self._feeds(runner, sequence), sequence.cache, last_scores=last_scores)
        if runner is not decoder:
            cache = {slot.port.name: cache[present_of(slot.port.name) or ""] for slot in decoder.slots}
        sequence.cache = cache
        sequence.weights = {head: outputs[name] for name, head in self.heads.items()}
        return outputs["logits"]

    def _feeds(self, runner: Runner, sequence: TextState) -> dict[str, torch.Tensor]:
        made = {**sequence.context, "input_ids": sequence.new, "attention_mask": sequence.mask}
        if "position_ids" in runner.ports:
            # the first token after the padding has position 0
            counted = (sequence.mask.cumsum(-1) - 1).clamp(min=0) if sequence.positions is None else sequence.positions
            made["position_ids"] = counted[..., -sequence.new.shape[1] :]
        if sequence.types is not None:
            made["token_type_ids"] = sequence.types
        if "deepstack_embeds" in runner.ports:
            of_token: list[Any] = list(runner.ports["deepstack_embeds"].shape[2:])  # layers, hidden size
            made["deepstack_embeds"] = added = torch.zeros(*sequence.new.shape, *of_token)
            for seen in sequence.seen:
                if seen.between is not None:
                    added[sequence.new == seen.token_id] = seen.between.to(added.dtype)
        if "inputs_embeds" in runner.ports:
            if self.parts.embed is None:
                raise GenerationError(
                    f"{self.parts.decoder.name} reads inputs_embeds, but the folder has no file that computes them. "
                    "Export the model again:\n    export_folder(model, folder)"
                )
            outputs, _ = self.parts.embed.step(typed(self.parts.embed, {"input_ids": sequence.new}), {})
            embeds = outputs["inputs_embeds"].clone() if sequence.seen else outputs["inputs_embeds"]
            made["inputs_embeds"] = embeds
            for seen in sequence.seen:
                embeds[sequence.new == seen.token_id] = seen.features.to(embeds.dtype)
        sequence.seen = []
        return typed(runner, made)


def _integers(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.ndim != 2 or value.is_floating_point() or 0 in value.shape:
        found = (
            f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else describe_class(value)
        )
        raise InvalidArgumentError(
            f"{name} must be integers of shape (batch, length), not empty; found {found}.{_conversion(name, value)}"
        )
    return value.detach().cpu().long()


def check_given(named: Mapping[str, Any]) -> None:
    for name in ("input_ids", "attention_mask", "decoder_input_ids"):
        value = named.get(name)
        if value is not None and (not isinstance(value, torch.Tensor) or value.ndim < 2):
            _integers(name, value)


def _conversion(name: str, value: Any) -> str:
    """Return advice for an error message: how to convert ``value`` to token ids; ``""`` if no conversion is known."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, (list, tuple)) and texts and all(isinstance(one, str) for one in texts):
        return " Read a text with the tokenizer of the model:\n    tokenizer(\"...\", return_tensors='pt').input_ids"
    if isinstance(value, Mapping):
        return " Pass its entries by name:\n    generate(**inputs)"
    if isinstance(value, torch.Tensor):
        lines = {1: f" Add an axis:\n    {name} = {name}[None]", 2: f" Make integers:\n    {name} = {name}.long()"}
        return "" if 0 in value.shape else lines.get(value.ndim, "")
    if isinstance(value, (list, tuple)) or hasattr(value, "__array__"):
        is_row = value.ndim == 1 if hasattr(value, "ndim") else not any(isinstance(one, (list, tuple)) for one in value)
        rows = f"[{name}]" if is_row and isinstance(value, (list, tuple)) else f"{name}[None]" if is_row else name
        return f" Make a tensor of it:\n    {name} = torch.tensor({rows})"
    return ""


def tokens_of(name: str, value: Any) -> torch.Tensor:
    """Return token ids as a tensor; raise an error for negative ids, which some runtimes accept as indices."""
    tokens = _integers(name, value)
    lowest = int(tokens.min())
    if lowest < 0:
        raise InvalidArgumentError(
            f"{name} contains {lowest}, which is not a token. Pad with any valid token, and mask it:\n    "
            f"generate(ids.clamp(min=0), attention_mask=(ids != {lowest}).long())"
        )
    return tokens


def _mask_of(tokens: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    if given is None:
        return torch.ones_like(tokens)
    mask = _integers("attention_mask", given)
    if mask.shape != tokens.shape:
        raise InvalidArgumentError(
            f"attention_mask has shape {tuple(mask.shape)}, but input_ids has {tuple(tokens.shape)}. Pass equal shapes."
        )
    return mask
