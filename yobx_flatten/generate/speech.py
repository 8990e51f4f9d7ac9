"""Transcribe with the files of Whisper: transformers' own ``generate`` of the model, whose calls run the files.

.. code-block:: text

    sound ──> windows, language, task, timestamps, fallbacks: WhisperGenerationMixin.generate
                  │ encoder(window)          │ forward(tokens, cache)
                  v                          v
              encoder_model       decoder_model, decoder_with_past_model
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import FlattenError, GenerationError, InvalidArgumentError
from ..errors.dependencies import require
from ..files.damage import damage_as
from ..huggingface.builders import make_dynamic_cache, make_encoder_decoder_cache
from ..huggingface.cache_names import cache_of, installed_name
from ..runners.ports import present_of
from ..runners.runner import Runner
from .sampling import Sampling
from .slots import typed

__all__ = ["SpeechCall", "SpeechSettings", "padded_sound", "speech_of", "transcribe"]

# entries of a generation_config.json that Whisper's own loop reads
_OWN = ("lang_to_id", "no_timestamps_token_id")
_STRIDE = 2  # frames of sound for each position of the encoder


@dataclasses.dataclass(frozen=True)
class SpeechSettings:
    """What Whisper's own loop needs to know of its model: both configurations, as they are written.

    Attributes:
        config: the configuration of the model.
        generation: the configuration of its generation.
    """

    config: Mapping[str, Any] = dataclasses.field(repr=False)
    generation: Mapping[str, Any] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class SpeechCall:
    """What a call asks of the loop, in addition to the sound.

    Attributes:
        language: spoken language, as ``"de"``; one for each row, or one for all; ``None`` to detect it.
        task: ``"transcribe"`` or ``"translate"``; ``None`` for what the model does by itself.
        return_timestamps: whether tokens of times stand around each segment; ``None`` for as configured.
    """

    language: str | list[str] | None = None
    task: str | None = None
    return_timestamps: bool | None = None

    def __post_init__(self) -> None:
        if self.return_timestamps not in (None, True, False):
            raise InvalidArgumentError(
                f"return_timestamps must be True or False, found {self.return_timestamps!r}. Times of words are "
                "read off the weights of attention, which the files do not return: the model itself has them, by\n"
                "    model.generate(..., return_token_timestamps=True)"
            )

    @property
    def asks(self) -> bool:
        """Whether anything is asked."""
        return any(value is not None for value in dataclasses.astuple(self))


def speech_of(config: Mapping[str, Any], generation: Mapping[str, Any]) -> SpeechSettings | None:
    """Return the settings of Whisper's own loop; ``None`` for a model without languages and times.

    Args:
        config: the configuration of the model.
        generation: the configuration of its generation.
    """
    stated = any(generation.get(name) is not None for name in _OWN)
    return SpeechSettings(config, generation) if stated and config.get("max_source_positions") else None


def padded_sound(encoder: Runner, sound: torch.Tensor) -> torch.Tensor:
    """Return sound as long as the window that an encoder reads: a shorter one is padded by zeros, as Whisper pads it.

    Args:
        encoder: the file.
        sound: features of shape (batch, bins, frames).

    Raises:
        InvalidArgumentError: when the sound is longer, or has other bins.
    """
    _, bins, frames = encoder.ports["input_features"].shape
    if bins is not None and sound.shape[1] != bins:
        raise InvalidArgumentError(
            f"input_features has {sound.shape[1]} bins, and {encoder.name} reads {bins}. Pass features of shape "
            f"(batch, {bins}, frames)."
        )
    if frames is None or sound.shape[2] == frames:
        return sound
    if sound.shape[2] > frames:
        raise InvalidArgumentError(
            f"input_features has {sound.shape[2]} frames, and {encoder.name} reads windows of {frames}. Longer sound "
            "takes several, which Whisper's own loop cuts:\n    generate(input_features=sound, return_timestamps=True)"
        )
    return torch.nn.functional.pad(sound, (0, frames - sound.shape[2]))


def transcribe(
    settings: SpeechSettings,
    parts: Any,
    sound: torch.Tensor,
    mask: torch.Tensor | None,
    call: SpeechCall,
    sampling: Sampling | None,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Return the tokens of ``model.generate``, without those that begin every text.

    Args:
        settings: both configurations.
        parts: the files.
        sound: features of shape (batch, bins, frames), of any number of frames.
        mask: a mask of (batch, frames), 0 where a row is padded; ``None`` without padding.
        call: language, task and times.
        sampling: how tokens are drawn; ``None`` for the likeliest.
        options: further arguments of ``model.generate``.

    Raises:
        InvalidArgumentError: when Whisper's loop refuses the call.
        GenerationError: when a file fails.
    """
    require("transformers", purpose="transcription", extra="transformers")
    asked: dict[str, Any] = {**dataclasses.asdict(call), **options, "attention_mask": mask}
    draws = sampling is not None and sampling.do_sample
    if sampling is not None and draws:
        names = ("temperature", "top_p", "min_p", "typical_p")
        asked |= {name: getattr(sampling, name) for name in names} | {"top_k": sampling.top_k or 0}
    seed = sampling.seed if sampling is not None and draws else None
    with damage_as(GenerationError, "config.json or generation_config.json"):
        model = _model_class()(settings, parts)
    with torch.no_grad(), contextlib.nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            found = model.generate(sound, **{name: value for name, value in asked.items() if value is not None})
        except FlattenError:
            raise
        except ValueError as error:  # what transformers refuses: a language, a task, a length
            raise InvalidArgumentError(f"Whisper's generate refuses this call: {error}") from error
    assert isinstance(found, torch.Tensor)
    return found


@functools.cache
def _model_class() -> Callable[[SpeechSettings, Any], Any]:
    """Whisper without layers: its loops are those of transformers, its calls those of files."""
    from transformers import GenerationConfig, PreTrainedModel, WhisperConfig, WhisperForConditionalGeneration
    from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

    class EncoderOfFile(torch.nn.Module):
        """Sound of one window to features."""

        main_input_name = "input_features"

        def __init__(self, runner: Runner) -> None:
            super().__init__()
            self.runner = runner
            # what the loop reads of the layers: how many frames of sound a position has
            self.conv1, self.conv2 = types.SimpleNamespace(stride=(1,)), types.SimpleNamespace(stride=(_STRIDE,))

        def forward(self, input_features: torch.Tensor, attention_mask: Any = None, **_: Any) -> Any:
            sound = padded_sound(self.runner, input_features)
            outputs, _cache = self.runner.step(typed(self.runner, {"input_features": sound}), {})
            return BaseModelOutput(last_hidden_state=outputs["last_hidden_state"])

    class WhisperOfFiles(WhisperForConditionalGeneration):  # type: ignore[misc] # transformers is untyped
        """Not one weight: ``generate`` is the model's, ``forward`` runs the files."""

        def __init__(self, settings: SpeechSettings, parts: Any) -> None:
            config = WhisperConfig.from_dict(dict(settings.config))
            PreTrainedModel.__init__(self, config)
            # what the loop reads of the layers: how many frames a position has
            self.model = torch.nn.Module()
            self.model.config, self.model.encoder = config, EncoderOfFile(parts.encoder)
            self.anchor = torch.nn.Parameter(torch.zeros(()), requires_grad=False)  # states device and type
            self.generation_config = GenerationConfig.from_dict(copy.deepcopy(dict(settings.generation)))
            self.of_files = parts

        def get_encoder(self, modality: str | None = None) -> Any:
            return self.model.encoder

        def forward(
            self,
            input_features: Any = None,
            attention_mask: Any = None,
            decoder_input_ids: Any = None,
            decoder_attention_mask: Any = None,
            encoder_outputs: Any = None,
            decoder_position_ids: Any = None,
            use_cache: Any = None,
            return_dict: Any = None,
            **others: Any,  # the cache, under the word of the installed release
        ) -> Any:
            if decoder_attention_mask is not None and not bool(decoder_attention_mask.all()):
                raise InvalidArgumentError(
                    "Texts of several lengths before the new one (condition_on_prev_tokens) need a mask, which the "
                    "decoders' files do not take. Transcribe one sound at a time."
                )
            encoder: Any = self.model.encoder
            hidden = (encoder(input_features) if encoder_outputs is None else encoder_outputs)[0]
            scores, filled = _decode(self.of_files, decoder_input_ids, hidden, cache_of(others))
            return Seq2SeqLMOutput(logits=scores, **{installed_name(): filled})

    return WhisperOfFiles


def _decode(parts: Any, tokens: torch.Tensor, hidden: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """One call of a decoder's file; keys and values are tensors here, which a search may reorder."""
    names = [slot.port.name for slot in parts.decoder.slots]
    if cache is None or cache.get_seq_length() == 0:
        found = parts.prefill.run({"input_ids": tokens, "encoder_hidden_states": hidden})
        filled = {name: found[present_of(name) or ""] for name in names}
    else:
        sides = {"decoder": cache.self_attention_cache.layers, "encoder": cache.cross_attention_cache.layers}
        # past_key_values.0.decoder.key
        given = {
            name: getattr(sides[side][int(layer)], {"key": "keys", "value": "values"}[part])
            for name in names
            for layer, side, part in [name.split(".")[1:]]
        }
        found = parts.decoder.run({"input_ids": tokens, **given})
        filled = {name: found.get(present_of(name) or "", given[name]) for name in names}
    layers: dict[str, dict[int, dict[str, torch.Tensor]]] = {"decoder": {}, "encoder": {}}
    for name, value in filled.items():
        _, layer, side, part = name.split(".")
        layers[side].setdefault(int(layer), {})[part] = value
    own, cross = (
        make_dynamic_cache(
            [(layers[side][index]["key"], layers[side][index]["value"]) for index in sorted(layers[side])]
        )
        for side in ("decoder", "encoder")
    )
    return found["logits"], make_encoder_decoder_cache(own, cross)
