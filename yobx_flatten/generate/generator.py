"""The generation loop: read the prompt, choose a token, feed it with the cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from ..errors import InvalidArgumentError, describe_class
from ..errors.dependencies import require
from .beams import BeamSearch, BeamSettings
from .sampling import Sampling, TokenChooser
from .score_rules import GenerationCall, ScoreProcessor
from .settings import GenerationSettings
from .spectrogram import speak
from .speech import SpeechCall, refusals_named, transcribe
from .steps import Parts, Steps, TextState

__all__ = ["Generator", "Parts"]

# local names that are no keywords of transformers' generate
_OWN = ("self", "options", "sampling", "samples", "drawn")


class Generator:
    """Generates tokens with exported files. See :class:`.OnnxGenerator` and :class:`.ProgramGenerator`."""

    def __init__(self, parts: Parts, settings: GenerationSettings) -> None:
        self.parts, self.settings = parts, settings
        self.steps = Steps(parts, settings)

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
        **options: Any,
    ) -> Any:
        """Generate tokens until every row has ended.

        What is not passed is as ``generation_config.json`` states it, as for ``model.generate``. Any other keyword of
        ``model.generate`` (``do_sample``, ``temperature``, ``top_p``, ``max_length``, ``streamer``,
        ``logits_processor``, ``stopping_criteria``, ``generation_config``, ``assistant_model`` ...) lets transformers'
        own loop run the files, so that it does what it does for the model.

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
            num_return_sequences: sequences returned for each row, the best first, ``num_beams`` at most; samples where
                tokens are drawn; 1 without a configuration.
            **options: any other keyword of ``model.generate``.

        Returns:
            The prompt (of an encoder-decoder model: its start) and the new tokens, as ``model.generate`` returns
            them: int64 of shape (batch * num_return_sequences, length). Rows that ended early are filled with the
            padding token. Of a Whisper that has languages or times, as from ``model.generate``, only the new tokens.
            With ``return_dict_in_generate=True`` what ``model.generate`` returns then.

        Raises:
            InvalidArgumentError: when the inputs do not fit the model or each other, or transformers refuses a keyword.
            GenerationError: when a file fails while it runs.
            MissingDependencyError: when a keyword needs transformers, and it is not installed.
        """
        self._check_writes("generate")
        if options == {"do_sample": False} and sampling is None:  # which the loop here also does, and faster
            options, sampling = {}, Sampling()
        drawn = sampling is None and self.settings.sampling.do_sample and (num_beams or 1) == 1
        samples = drawn and (num_return_sequences or 1) > 1
        if options or samples:
            stated = {name: value for name, value in locals().items() if name not in _OWN and value is not None}
            return self._by_transformers({**stated, **options}, sampling)
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
            assert input_features is not None
            options = {"max_new_tokens": max_new_tokens, **given}
            return transcribe(self.steps, input_features, attention_mask, speech, sampling, options)
        sampling = self.settings.sampling if sampling is None else sampling
        if beams.num_beams > 1 and sampling.do_sample:
            raise InvalidArgumentError(
                "A beam search draws no tokens: pass num_beams=1, or sampling=Sampling() for the likeliest ones."
            )
        sequence = self.steps.begin(input_ids, attention_mask, source, decoder_input_ids, (images, videos))
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
        self._check_writes("stream")
        source = self._encoded(input_features, input_values, pixel_values)
        images = self.settings.images(pixel_values, image_grid_thw, image_sizes, batch_num_images)
        videos = self.settings.videos(pixel_values_videos, video_grid_thw, second_per_grid_ts)
        if self._is_whole_speech(input_features, decoder_input_ids, SpeechCall()):
            raise InvalidArgumentError(
                "This Whisper finds out language, task and times in loops of its own, which return all tokens at once: "
                "call generate(), or pass stream the tokens that begin a text:\n"
                "    stream(input_features=sound, decoder_input_ids=torch.tensor([[START, LANGUAGE, TASK, NO_TIMES]]))"
            )
        sequence = self.steps.begin(input_ids, attention_mask, source, decoder_input_ids, (images, videos))
        self._force(sequence, forced_bos_token_id)
        return self._stream(sequence, max_new_tokens, sampling)

    def generate_speech(
        self, read: torch.Tensor, speaker_embeddings: torch.Tensor | None = None, **options: Any
    ) -> Any:
        """Speak, with the files of SpeechT5.

        The model draws dropout while it speaks, and so does this: after ``torch.manual_seed`` both return the same.

        Args:
            read: tokens of shape (batch, length), or samples of sound where the model changes a voice.
            speaker_embeddings: a vector for each speaker, of shape (batch, size).
            **options: ``attention_mask``, ``threshold``, ``minlenratio``, ``maxlenratio``, ``vocoder`` and
                ``return_output_lengths``, as ``model.generate_speech`` takes them. A vocoder is a model, or the folder
                of one: ``open_model("vocoder")``.

        Returns:
            What ``model.generate_speech`` returns: a spectrogram of shape (frames, bins), of several rows (batch,
            frames, bins), or the sound of a vocoder.

        Raises:
            InvalidArgumentError: when the files write text, the inputs do not fit the model or each other, or
                transformers refuses a keyword.
            GenerationError: when a file fails while it runs.
            MissingDependencyError: when transformers is not installed.
        """
        if self.parts.postnet is None:
            raise InvalidArgumentError(
                f"{self.parts.decoder.name} writes tokens: call generate(), not generate_speech."
            )
        asked = {"speaker_embeddings": speaker_embeddings, **options}
        return refusals_named("generate_speech", lambda: speak(self.parts, self.settings, read, asked))

    def _check_writes(self, method: str) -> None:
        if self.parts.postnet is not None:
            raise InvalidArgumentError(
                f"{self.parts.decoder.name} writes spectrograms: call generate_speech(ids, speaker_embeddings), not "
                f"{method}."
            )

    def _by_transformers(self, given: dict[str, Any], sampling: Sampling | None) -> Any:
        """What the loops of transformers make of the files."""
        if sampling is not None:
            raise InvalidArgumentError(
                "sampling= is for the loop of this package, and other keywords are for that of transformers. Pass all "
                "as keywords: generate(..., do_sample=True, temperature=0.7, top_p=0.9)"
            )
        require("transformers", purpose="these keywords of generate", extra="transformers")
        return refusals_named("generate", lambda: self._model.generate(**given))

    @functools.cached_property
    def _model(self) -> Any:
        from .model_of_files import model_of_files

        return model_of_files(self.steps)

    # -- before the first token ----------------------------------------------------------------------------------------

    def _is_whole_speech(self, sound: torch.Tensor | None, first: torch.Tensor | None, asked: SpeechCall) -> bool:
        """Whether Whisper's own loop decides which tokens begin a text, and how sound is cut."""
        if sound is None or not self.settings.is_speech:
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

    def _force(self, sequence: TextState, token: int | None) -> None:
        sequence.forced = self.settings.forced_bos_token_id if token is None else token
        if token is not None and (type(token) is not int or token < 0):
            raise InvalidArgumentError(f"forced_bos_token_id must be a token, found {describe_class(token)}.")

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _stream(
        self, sequence: TextState, max_new_tokens: int | None, sampling: Sampling | None
    ) -> Iterator[torch.Tensor]:
        chooser = TokenChooser(self.settings.sampling if sampling is None else sampling)
        return self._tokens(sequence, self._limit(max_new_tokens, sequence), chooser)

    def _limit(self, max_new_tokens: int | None, sequence: TextState) -> int:
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

    def _processors(self, sequence: TextState, limit: int) -> list[ScoreProcessor]:
        start = sequence.tokens.shape[1]
        # a decoder after an encoder has no padding in front
        padded = None if self.parts.encoder is not None else sequence.mask
        ends, source = self.settings.eos_token_ids, sequence.source
        call = GenerationCall(start, start + limit, ends, padded, source, sequence.forced)
        return self.settings.processors_for(call)

    def _tokens(self, sequence: TextState, limit: int, choose: TokenChooser) -> Iterator[torch.Tensor]:
        ends = torch.tensor(self.settings.eos_token_ids, dtype=torch.int64)
        ended = torch.zeros(len(sequence.tokens), dtype=torch.bool)
        processors = self._processors(sequence, limit)
        for number in range(limit):
            scores = self.steps.step(sequence)
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
            self.steps.pass_switch(sequence)

    def _search(self, sequence: TextState, limit: int, settings: BeamSettings) -> torch.Tensor:
        """The sequences that a beam search finds; the prompt is read once, and then has as many rows as beams."""
        pad, ends = self.settings.pad_token_id, self.settings.eos_token_ids
        # transformers takes a padding token of 0 for none, and fills with the end
        fill = -1 if not ends else pad or ends[0]
        longest = sequence.tokens.shape[1] + limit
        search = BeamSearch(sequence.tokens, settings, longest, ends, fill)
        every = torch.arange(len(sequence.tokens)).repeat_interleave(settings.num_beams)
        scores, rows = self.steps.step(sequence)[every], every
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
            self.steps.pass_switch(sequence)
            scores = self.steps.step(sequence)
