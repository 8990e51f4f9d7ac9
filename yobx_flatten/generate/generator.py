"""The loop: read the prompt, choose a token, feed it with the returned cache, again and again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from ..errors import GenerationError, InvalidArgumentError, describe_class
from ..huggingface.cache_names import CACHE
from ..runners.ports import check_cache_outputs, present_of
from ..runners.runner import Runner
from .beams import BeamSearch, BeamSettings
from .image_positions import image_positions
from .pictures import Pictures, Seen
from .sampling import Sampling, TokenChooser
from .score_rules import GenerationCall, ScoreProcessor
from .settings import GenerationSettings
from .slots import check_ports, empty_cache, typed
from .speech import SpeechCall, padded_sound, transcribe

__all__ = ["Generator", "Parts"]

_LOOP = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "deepstack_embeds")
_FROM_ENCODER = ("encoder_hidden_states", "encoder_attention_mask")
# what an encoder can be given: text, sound, pictures
_READ = {
    "input_features": ("sound", "(batch, bins, frames)"),
    "input_values": ("sound", "(batch, samples)"),
    "pixel_values": ("pictures", "(batch, channels, height, width)"),
}
_SOURCES = ("input_ids", *_READ, "attention_mask")


@dataclasses.dataclass(frozen=True)
class Parts:
    """The files of one model.

    Attributes:
        decoder: the file that takes tokens and a cache, and returns scores and the cache.
        prefill: the file for the first call, without a cache among its inputs; ``None`` where ``decoder`` takes an
            empty one.
        encoder: the encoder of an encoder-decoder model.
        embed: the file from tokens to embeddings, where ``decoder`` takes those.
        vision: the file from images to the features that replace image tokens.
    """

    decoder: Runner
    prefill: Runner | None = None
    encoder: Runner | None = None
    embed: Runner | None = None
    vision: Runner | None = None


@dataclasses.dataclass
class _Sequence:
    """What has been generated so far, and what the next call is given."""

    tokens: torch.Tensor
    mask: torch.Tensor
    new: torch.Tensor
    cache: dict[str, Any]
    context: dict[str, torch.Tensor]
    # features of pictures and videos, until the first call takes them
    seen: list[Seen] = dataclasses.field(default_factory=list)
    # what the encoder read, where that is tokens; the prompt of a decoder
    source: torch.Tensor | None = None
    # of the tokens of the next call in time, height and width, where the decoder takes those
    positions: torch.Tensor | None = None
    # of all tokens, where the decoder takes those: which of them see each other
    types: torch.Tensor | None = None
    generated_type: int = 0
    # the token after a single first one
    forced: int | None = None

    def repeat(self, rows: torch.Tensor) -> None:
        """Let rows stand for several; the cache stays as it is."""
        self.tokens, self.mask = self.tokens[rows], self.mask[rows]
        self.context = {name: value[rows] for name, value in self.context.items()}
        self.source = None if self.source is None else self.source[rows]
        self.positions = None if self.positions is None else self.positions[:, rows]
        self.types = None if self.types is None else self.types[rows]

    def follow(self, new: torch.Tensor) -> None:
        """Let tokens of shape (batch, 1) be what the next call is given."""
        self.new = new
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(new), 1)], dim=1)
        self.positions = None if self.positions is None else self.positions[..., -1:] + 1
        if self.types is not None:
            generated = self.types.new_full((len(new), 1), self.generated_type)
            self.types = torch.cat([self.types, generated], dim=1)


class Generator:
    """Generates tokens with exported files. See :class:`.OnnxGenerator` and :class:`.ProgramGenerator`."""

    def __init__(self, parts: Parts, settings: GenerationSettings) -> None:
        self.parts, self.settings = parts, settings
        for part in (parts.decoder, parts.prefill):
            if part is not None:
                check_ports(
                    {name: port for name, port in part.ports.items() if all(name != s.port.name for s in part.slots)},
                    (*_LOOP, *(_FROM_ENCODER if parts.encoder is not None else ())),
                    part.name,
                )
                if "logits" not in part.outputs:
                    raise GenerationError(f"{part.name} returns {', '.join(part.outputs)}, and no logits.")
        if parts.prefill is not None:
            check_cache_outputs(parts.decoder.ports, parts.prefill.outputs, parts.prefill.name, of=parts.decoder.name)
        if not parts.decoder.slots:
            raise GenerationError(
                f"{parts.decoder.name} takes no {CACHE}.*: it would read the whole text for every token. "
                "Export it with a cache:\n    export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=...)"
            )

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        input_features: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        batch_num_images: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        second_per_grid_ts: torch.Tensor | Sequence[float] | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        forced_bos_token_id: int | None = None,
        language: str | list[str] | None = None,
        task: Literal["transcribe", "translate"] | None = None,
        return_timestamps: bool | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | Literal["never"] | None = None,
        num_return_sequences: int | None = None,
    ) -> torch.Tensor:
        """Generate tokens until every row has ended.

        What is not passed is as ``generation_config.json`` states it, as for ``model.generate``.

        Args:
            input_ids: the prompt, integers of shape (batch, length); for an encoder-decoder model, what its encoder
                reads.
            attention_mask: a mask of the same shape, 0 where a row is padded; no padding by default. Prompts are padded
                on the left, as for ``model.generate``.
            max_new_tokens: largest number of new tokens; by default that of ``generation_config.json``, or what is left
                of its ``max_length``, or 20.
            sampling: how tokens are chosen; by default as ``generation_config.json`` states (``do_sample``,
                ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p``), and the likeliest where it states
                nothing: ``Sampling()``.
            input_features: sound for the encoder, in place of ``input_ids``, of shape (batch, bins, frames). With the
                files of Whisper it is of any length; ``attention_mask`` of shape (batch, frames) is 0 where a row of
                several windows has ended.
            input_values: samples of sound for the encoder, of shape (batch, samples), for models that read these.
            pixel_values: images, for the image tokens of the prompt, or for the encoder.
            image_grid_thw: patches of each image in time, height and width, integers of shape (images, 3), for models
                whose ``pixel_values`` are patches.
            image_sizes: height and width of each image before it was cut into tiles, integers of shape (images, 2),
                for models that cut them (LLaVA-NeXT, LLaVA-OneVision).
            batch_num_images: the number of images of each prompt, for models that do not cut several
                (LLaVA-OneVision); 1 for all by default.
            pixel_values_videos: patches of videos, for the video tokens of the prompt.
            video_grid_thw: patches of each video in time, height and width, integers of shape (videos, 3).
            second_per_grid_ts: seconds from one frame of each video to the next, for models that count them
                (Qwen2.5-VL); 1 for all by default.
            decoder_input_ids: first tokens of an encoder-decoder model's output; by default its start token. With
                Whisper, tokens continue these, and nothing is detected.
            forced_bos_token_id: the token after a single first one, as the language that NLLB, M2M100 and mBART
                translate into; by default that of ``generation_config.json``.
            language: spoken language, for Whisper: one for each row, or one for all; detected by default, where the
                model has several.
            task: ``"transcribe"``, or ``"translate"`` into English, for Whisper.
            return_timestamps: whether tokens of times stand around each segment, for Whisper; ``False`` without a
                configuration. Sound of more than one window needs them.
            num_beams: continuations of each row that a beam search keeps; 1 for none, as without a configuration.
            length_penalty: exponent of the length by which the sum of log-probabilities of a continuation is divided;
                1.0 without a configuration.
            early_stopping: ``True`` ends a row when ``num_beams`` continuations have ended; ``False``, as without a
                configuration, when none of the same length could be better; ``"never"`` when none of any length could.
            num_return_sequences: sequences returned for each row, the best first, ``num_beams`` at most; 1 without a
                configuration.

        Returns:
            The prompt (of an encoder-decoder model: its start) and the new tokens, as ``model.generate`` returns
            them: int64 of shape (batch * num_return_sequences, length). Rows that ended early are filled with the
            padding token. Of a Whisper that has languages or times, as from ``model.generate``, only the new tokens.

        Raises:
            InvalidArgumentError: when the inputs do not fit the model or each other.
            GenerationError: when a file fails while it runs.
        """
        source = self._encoded(input_features, input_values, pixel_values)
        images = self.settings.images(pixel_values, image_grid_thw, image_sizes, batch_num_images)
        videos = self.settings.videos(pixel_values_videos, video_grid_thw, second_per_grid_ts)
        given: dict[str, Any] = {
            "num_beams": num_beams,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "num_return_sequences": num_return_sequences,
        }
        beams = dataclasses.replace(
            self.settings.beams, **{name: value for name, value in given.items() if value is not None}
        )
        speech = SpeechCall(language, task, return_timestamps)
        if self._is_whole_speech(input_features, decoder_input_ids, speech):
            assert self.settings.speech is not None
            assert input_features is not None
            options = {"max_new_tokens": max_new_tokens, **given}
            return transcribe(
                self.settings.speech, self.parts, input_features, attention_mask, speech, sampling, options
            )
        sampling = self.settings.sampling if sampling is None else sampling
        if beams.num_beams > 1 and sampling.do_sample:
            raise InvalidArgumentError(
                "A beam search draws no tokens: pass num_beams=1, or sampling=Sampling() for the likeliest ones."
            )
        sequence = self._begin(input_ids, attention_mask, source, decoder_input_ids, (images, videos))
        self._force(sequence, forced_bos_token_id)
        first = sequence.tokens
        if beams.num_beams > 1:
            return self._search(sequence, self._limit(max_new_tokens, sequence), beams)
        new = list(self._stream(sequence, max_new_tokens, sampling))
        return torch.cat([first, torch.stack(new, dim=1)], dim=1) if new else first

    def stream(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        input_features: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        batch_num_images: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        second_per_grid_ts: torch.Tensor | Sequence[float] | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        forced_bos_token_id: int | None = None,
    ) -> Iterator[torch.Tensor]:
        """Return the tokens of :meth:`generate` one step at a time, without a search.

        The inputs are checked, and the encoder runs, before it returns. An iterator has a cache of its own, so several
        can be read in turns.

        Args:
            input_ids: see :meth:`generate`.
            attention_mask: see :meth:`generate`.
            max_new_tokens: see :meth:`generate`.
            sampling: see :meth:`generate`.
            input_features: see :meth:`generate`.
            input_values: see :meth:`generate`.
            pixel_values: see :meth:`generate`.
            image_grid_thw: see :meth:`generate`.
            image_sizes: see :meth:`generate`.
            batch_num_images: see :meth:`generate`.
            pixel_values_videos: see :meth:`generate`.
            video_grid_thw: see :meth:`generate`.
            second_per_grid_ts: see :meth:`generate`.
            decoder_input_ids: see :meth:`generate`; a Whisper that has languages or times needs them here.
            forced_bos_token_id: see :meth:`generate`.

        Returns:
            An iterator over tensors of int64 of shape (batch,), one per new token.

        Raises:
            InvalidArgumentError: when the inputs do not fit the model or each other.
            GenerationError: when a file fails while it runs.
        """
        source = self._encoded(input_features, input_values, pixel_values)
        images = self.settings.images(pixel_values, image_grid_thw, image_sizes, batch_num_images)
        videos = self.settings.videos(pixel_values_videos, video_grid_thw, second_per_grid_ts)
        if self._is_whole_speech(input_features, decoder_input_ids, SpeechCall()):
            raise InvalidArgumentError(
                "This Whisper finds out language, task and times in loops of its own, which return all tokens at once: "
                "call generate(), or pass stream the tokens that begin a text:\n"
                "    stream(input_features=sound, decoder_input_ids=torch.tensor([[START, LANGUAGE, TASK, NO_TIMES]]))"
            )
        sequence = self._begin(input_ids, attention_mask, source, decoder_input_ids, (images, videos))
        self._force(sequence, forced_bos_token_id)
        return self._stream(sequence, max_new_tokens, sampling)

    # -- before the first token ----------------------------------------------------------------------------------------

    def _is_whole_speech(self, sound: torch.Tensor | None, first: torch.Tensor | None, asked: SpeechCall) -> bool:
        """Whether Whisper's own loop decides which tokens begin a text, and how sound is cut."""
        if sound is None or self.settings.speech is None:
            if asked.asks:
                raise InvalidArgumentError(
                    "language=, task= and return_timestamps= are for Whisper with input_features=, where "
                    "generation_config.json states its languages (lang_to_id) and times (no_timestamps_token_id)."
                )
            return False
        if first is not None and asked.asks:
            raise InvalidArgumentError(
                "decoder_input_ids already state language, task and times: pass these, or language=, task= and "
                "return_timestamps=."
            )
        return first is None

    def _encoded(
        self, features: torch.Tensor | None, samples: torch.Tensor | None, pixels: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """What is given for the encoder, but for text: pictures in a prompt are for a decoder."""
        given = {"input_features": features, "input_values": samples}
        if self.parts.encoder is not None and "pixel_values" in self.parts.encoder.ports:
            given["pixel_values"] = pixels
        return {name: value for name, value in given.items() if value is not None}

    def _force(self, sequence: _Sequence, token: int | None) -> None:
        sequence.forced = self.settings.forced_bos_token_id if token is None else token
        if token is not None and (type(token) is not int or token < 0):
            raise InvalidArgumentError(f"forced_bos_token_id must be a token, found {describe_class(token)}.")

    def _begin(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        encoded: dict[str, torch.Tensor],
        decoder_input_ids: torch.Tensor | None,
        pictures: Sequence[Pictures],
    ) -> _Sequence:
        context: dict[str, torch.Tensor] = {}
        seen: list[Seen] = []
        positions = types = None
        if self.parts.encoder is not None:
            self._check_read(encoded, pictures)
            context, batch = self._encode(input_ids, attention_mask, encoded)
            if decoder_input_ids is not None:
                tokens = _tokens("decoder_input_ids", decoder_input_ids)
            else:
                tokens = self._start_tokens(batch)
            if len(tokens) != batch:
                raise InvalidArgumentError(
                    f"decoder_input_ids has {len(tokens)} rows, and the encoder reads {batch}. Pass as many."
                )
            mask = torch.ones_like(tokens)
        else:
            if encoded or decoder_input_ids is not None:
                raise InvalidArgumentError(f"{self.parts.decoder.name} belongs to a model without an encoder.")
            tokens = _tokens("input_ids", input_ids)
            mask = torch.ones_like(tokens) if attention_mask is None else _integers("attention_mask", attention_mask)
            _check_mask(mask, tokens)
            seen = [s for one in pictures for s in one.seen_by(self.parts.vision, self.parts.decoder, tokens)]
            positions = self._positions(tokens, mask, pictures)
            if "token_type_ids" in self.parts.decoder.ports:
                types = self.settings.token_types(tokens)
        reader = self.parts.prefill or self.parts.decoder
        cache = {} if self.parts.prefill is not None else reader.cache(empty_cache(reader.slots, len(tokens)))
        source = tokens if self.parts.encoder is None else None if encoded else input_ids
        of_types = (types, self.settings.generated_type)
        return _Sequence(tokens, mask, tokens, cache, context, seen, source, positions, *of_types)

    def _check_read(self, given: dict[str, torch.Tensor], pictures: Sequence[Pictures]) -> None:
        """Refuse sound and pictures that the encoder does not read: the text would be that of a call without."""
        assert self.parts.encoder is not None
        unread = [name for name in given if name not in self.parts.encoder.ports]
        if "pixel_values" not in given:
            unread += ["pixel_values" for one in pictures if one.pixels is not None]
        if unread:
            reads = next((name for name in ("input_ids", *_READ) if name in self.parts.encoder.ports), "nothing")
            raise InvalidArgumentError(f"{self.parts.encoder.name} reads {reads}, and no {unread[0]}: leave it out.")

    def _start_tokens(self, batch: int) -> torch.Tensor:
        start = self.settings.decoder_start_token_id
        if start is None:
            raise InvalidArgumentError(
                "No decoder_start_token_id is known for this model. Pass decoder_input_ids of shape (batch, 1)."
            )
        return torch.full((batch, 1), start)

    def _encode(
        self, input_ids: torch.Tensor | None, mask: torch.Tensor | None, given: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], int]:
        encoder = self.parts.encoder
        assert encoder is not None
        check_ports(encoder.ports, _SOURCES, encoder.name)
        feeds = {}
        reads = next((name for name in _READ if name in encoder.ports), None)
        if reads is not None:
            (what, shape), value = _READ[reads], given.get(reads)
            if value is None or value.ndim != shape.count(",") + 1:
                raise InvalidArgumentError(f"{encoder.name} reads {what}. Pass {reads} of shape {shape}.")
            source = feeds[reads] = padded_sound(encoder, value) if reads == "input_features" else value
        else:
            source = feeds["input_ids"] = _tokens("input_ids", input_ids)
            mask = torch.ones_like(source) if mask is None else _integers("attention_mask", mask)
            if mask.shape != source.shape:
                raise InvalidArgumentError(
                    f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(source.shape)}. Pass the same."
                )
            feeds["attention_mask"] = mask
        outputs, _ = encoder.step(typed(encoder, feeds), {})
        context = {"encoder_hidden_states": outputs["last_hidden_state"]}
        if mask is not None:
            context["encoder_attention_mask"] = mask
        return context, len(source)

    def _positions(self, tokens: torch.Tensor, mask: torch.Tensor, pictures: Sequence[Pictures]) -> torch.Tensor | None:
        """Positions of the prompt in time, height and width; ``None`` where the decoder takes one per token."""
        port = self.parts.decoder.ports.get("position_ids")
        if port is None or len(port.shape) != 3:
            return None
        grids = [grid for one in pictures for grid in one.grids]
        return image_positions(tokens, mask, grids, self.settings.spatial_merge_size or 1)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _stream(
        self, sequence: _Sequence, max_new_tokens: int | None, sampling: Sampling | None
    ) -> Iterator[torch.Tensor]:
        chooser = TokenChooser(self.settings.sampling if sampling is None else sampling)
        return self._tokens(sequence, self._limit(max_new_tokens, sequence), chooser)

    def _limit(self, max_new_tokens: int | None, sequence: _Sequence) -> int:
        limit, longest, start = self.settings.max_new_tokens, self.settings.max_length, sequence.tokens.shape[1]
        if max_new_tokens is not None:
            limit = max_new_tokens
        elif longest is not None:
            if start >= longest:
                raise InvalidArgumentError(
                    f"There are {start} tokens, and generation_config.json ends at max_length={longest}. Pass "
                    "max_new_tokens."
                )
            limit = longest - start
        if type(limit) is not int or limit < 1:
            raise InvalidArgumentError(f"max_new_tokens must be an int of 1 or more, found {describe_class(limit)}.")
        return limit

    def _processors(self, sequence: _Sequence, limit: int) -> list[ScoreProcessor]:
        start = sequence.tokens.shape[1]
        # a decoder after an encoder has no padding in front
        padded = None if self.parts.encoder is not None else sequence.mask
        ends, source = self.settings.eos_token_ids, sequence.source
        call = GenerationCall(start, start + limit, ends, padded, source, sequence.forced)
        return self.settings.processors_for(call)

    def _tokens(self, sequence: _Sequence, limit: int, choose: TokenChooser) -> Iterator[torch.Tensor]:
        ends = torch.tensor(self.settings.eos_token_ids, dtype=torch.int64)
        ended = torch.zeros(len(sequence.tokens), dtype=torch.bool)
        processors = self._processors(sequence, limit)
        for number in range(limit):
            scores = self._step(sequence)
            for process in processors:
                scores = process(sequence.tokens, scores)
            chosen = choose(scores)
            if self.settings.pad_token_id is not None:
                chosen = torch.where(ended, self.settings.pad_token_id, chosen)
            yield chosen.clone()  # the caller's own
            ended |= torch.isin(chosen, ends)
            if bool(ended.all()) or number + 1 == limit:
                return
            sequence.follow(chosen[:, None])
            if processors or self.settings.switch is not None:
                sequence.tokens = torch.cat([sequence.tokens, sequence.new], dim=1)
            self._pass_switch(sequence)

    def _search(self, sequence: _Sequence, limit: int, settings: BeamSettings) -> torch.Tensor:
        """The sequences that a beam search finds; the prompt is read once, and then has as many rows as beams."""
        pad, ends = self.settings.pad_token_id, self.settings.eos_token_ids
        # transformers takes a padding token of 0 for none, and fills with the end
        fill = -1 if not ends else pad or ends[0]
        longest = sequence.tokens.shape[1] + limit
        search = BeamSearch(sequence.tokens, settings, longest, ends, fill)
        every = torch.arange(len(sequence.tokens)).repeat_interleave(settings.num_beams)
        scores, rows = self._step(sequence)[every], every
        sequence.repeat(every)
        processors = self._processors(sequence, limit)
        while True:
            scores = scores.log_softmax(-1)
            for process in processors:
                scores = process(search.tokens, scores)
            chosen = search.step(scores)
            if search.done:
                return search.sequences
            sequence.cache = self.parts.decoder.select_rows(sequence.cache, rows[chosen])
            rows = torch.arange(len(every))
            sequence.follow(search.tokens[:, -1:])
            sequence.tokens = search.tokens
            self._pass_switch(sequence)
            scores = self._step(sequence)

    def _pass_switch(self, sequence: _Sequence) -> None:
        """Let the next call read all tokens, with an empty cache, where the model's own loop does that."""
        switch, decoder = self.settings.switch, self.parts.decoder
        if switch is None or not switch.passed_at(sequence.mask.shape[1]):
            return
        if self.parts.embed is not None or self.parts.prefill is not None:
            raise GenerationError(
                f"This text grew past {switch.length} tokens, where the model reads it again from the first one, with "
                "its pictures or what its encoder read. These files do not: ask for fewer new tokens."
            )
        sequence.new = sequence.tokens
        sequence.cache = decoder.cache(empty_cache(decoder.slots, len(sequence.tokens)))

    def _step(self, sequence: _Sequence) -> torch.Tensor:
        """Run the files once; the scores of the token after the last one, float32 of shape (batch, vocabulary)."""
        self._check_positions(sequence)
        decoder = self.parts.decoder
        runner = decoder if sequence.cache or self.parts.prefill is None else self.parts.prefill
        outputs, cache = runner.step(self._feeds(runner, sequence), sequence.cache)
        if runner is not decoder:
            cache = {slot.port.name: cache[present_of(slot.port.name) or ""] for slot in decoder.slots}
        sequence.cache = cache
        return outputs["logits"][:, -1].float()

    def _check_positions(self, sequence: _Sequence) -> None:
        """Refuse a token that the model has no position for: what a file does with it depends on its runtime."""
        most = self.settings.positions
        if most is None:
            return
        used = int(sequence.mask.sum(-1).max())
        if used > most:
            begun = sequence.new.shape[1]
            raise InvalidArgumentError(
                f"The text has {used} tokens, and the model has {most} positions. "
                + (f"Pass a prompt of {most} or less." if begun > 1 else "Pass a shorter prompt, or max_new_tokens.")
            )

    def _feeds(self, runner: Runner, sequence: _Sequence) -> dict[str, torch.Tensor]:
        made = {**sequence.context, "input_ids": sequence.new, "attention_mask": sequence.mask}
        if "position_ids" in runner.ports:
            # of a padded row, the first token after the padding is at 0
            counted = (sequence.mask.cumsum(-1) - 1).clamp(min=0)[:, -sequence.new.shape[1] :]
            made["position_ids"] = counted if sequence.positions is None else sequence.positions
        if sequence.types is not None:
            made["token_type_ids"] = sequence.types
        if "deepstack_embeds" in runner.ports:
            of_token: list[Any] = list(runner.ports["deepstack_embeds"].shape[2:])  # layers, hidden size
            made["deepstack_embeds"] = added = torch.zeros(*sequence.new.shape, *of_token)
            for seen in sequence.seen:
                if seen.between is not None:
                    added[sequence.new == seen.token_id] = seen.between.to(added.dtype)
        if "inputs_embeds" in runner.ports:
            made["inputs_embeds"] = self._embed(sequence)
        sequence.seen = []
        return typed(runner, made)

    def _embed(self, sequence: _Sequence) -> torch.Tensor:
        if self.parts.embed is None:
            raise GenerationError(f"{self.parts.decoder.name} takes inputs_embeds, and no file makes them.")
        outputs, _ = self.parts.embed.step(typed(self.parts.embed, {"input_ids": sequence.new}), {})
        embeds = outputs["inputs_embeds"]
        if sequence.seen:
            embeds = embeds.clone()
        for seen in sequence.seen:
            embeds[sequence.new == seen.token_id] = seen.features.to(embeds.dtype)
        return embeds


def _integers(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.ndim != 2 or value.is_floating_point() or 0 in value.shape:
        found = (
            f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else describe_class(value)
        )
        raise InvalidArgumentError(f"{name} must be integers of shape (batch, length), not empty; found {found}.")
    return value.detach().cpu().long()


def _tokens(name: str, value: Any) -> torch.Tensor:
    """Integers of a vocabulary: files of some runtimes count negative ones from its end."""
    tokens = _integers(name, value)
    lowest = int(tokens.min())
    if lowest < 0:
        raise InvalidArgumentError(
            f"{name} holds {lowest}, which is not a token. Where it stands for padding, pass a token and a mask:\n"
            f"    generate(ids.clamp(min=0), attention_mask=(ids != {lowest}).long())"
        )
    return tokens


def _check_mask(mask: torch.Tensor, tokens: torch.Tensor) -> None:
    if mask.shape != tokens.shape:
        raise InvalidArgumentError(
            f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(tokens.shape)}. Pass the same."
        )
    if bool((mask[:, -1] == 0).any()):
        raise InvalidArgumentError(
            "attention_mask is 0 at the end of a row: the next token would follow padding. Pad prompts on the left:\n"
            '    tokenizer.padding_side = "left"'
        )
