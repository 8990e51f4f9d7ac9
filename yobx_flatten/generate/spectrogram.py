"""Generate speech with exported files of SpeechT5 through the ``generate_speech`` of transformers."""

# generate_speech of transformers ──> encoder, prenet, decoder, postnet of a stand-in for the model
#                                         │ draws the masks of dropout as the model does
#                                         v
#                                     the runners of three files

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import GenerationError, InvalidArgumentError, require
from ..huggingface.cache_names import installed_name
from ..runners.ports import present_of
from .pictures import empty_cache, typed
from .settings import GenerationSettings
from .steps import Parts


def speak(
    parts: Parts,
    settings: GenerationSettings,
    read: torch.Tensor,
    asked: Mapping[str, Any],
    masks: Iterator[torch.Tensor] | None = None,
) -> Any:
    # read: tokens of shape (batch, length), or samples of sound
    # masks: dropout masks, one for each frame in turn; `None` to draw random masks
    require("transformers", purpose="speech", extra="transformers")
    import transformers

    from .stand_ins import config_from

    if asked.get("output_cross_attentions"):
        raise InvalidArgumentError(
            "output_cross_attentions: exported files return only spectrogram frames. Call the model itself: "
            "model.generate_speech(..., output_cross_attentions=True)"
        )
    stated = {} if settings.documents is None else settings.documents.config
    config = config_from(stated, encoder=True)
    if not isinstance(config, transformers.SpeechT5Config):
        raise GenerationError(
            f"The model type is {config.model_type!r} (config.json), but spectrograms are supported for SpeechT5 only."
        )
    frames = _Frames(parts, config, masks)
    kinds = (transformers.SpeechT5ForTextToSpeech, transformers.SpeechT5ForSpeechToSpeech)
    own: Any = kinds["input_values" in frames.encoder.ports]
    # the attributes and methods of a model that transformers' speech loop uses
    found, count = types.SimpleNamespace, config.reduction_factor * config.num_mel_bins
    layers = found(prenet=frames.read, wrapped_decoder=frames.decode)
    # the loop computes frames and stop scores from one hidden state, so that `decode` returns both in one tensor
    ends = found(feat_out=lambda last: last[:, :count], prob_out=lambda last: last[:, count:], postnet=frames.smoothed)
    inner = found(encoder=frames.encode, decoder=layers)
    model = found(config=config, speecht5=inner, speech_decoder_postnet=ends)
    with torch.no_grad():
        return own.generate_speech(model, read, **asked)


def drawn_masks(config: Any, length: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Draw dropout masks as the eager model does, and return the masks of the last frame, of shape (layers, width)."""
    like = torch.zeros(length, config.speech_decoder_prenet_units, dtype=dtype)
    every = range(config.speech_decoder_prenet_layers)
    return torch.stack([torch.bernoulli(like, p=config.speech_decoder_prenet_dropout)[-1] for _ in every])


class _Frames:
    """Runs exported files instead of the submodules that transformers' speech loop calls."""

    def __init__(self, parts: Parts, config: Any, masks: Iterator[torch.Tensor] | None) -> None:
        assert parts.encoder is not None
        assert parts.postnet is not None
        self.encoder, self.decoder, self.smooth = parts.encoder, parts.decoder, parts.postnet
        self.config, self.masks = config, masks
        self.dtype = self.decoder.ports["frame"].dtype
        self.mask = torch.ones(0, 0)
        self.given: dict[str, torch.Tensor] = {}

    def encode(self, input_values: torch.Tensor, attention_mask: torch.Tensor, return_dict: bool) -> Any:
        made = {"input_ids": input_values, "input_values": input_values, "attention_mask": attention_mask}
        if attention_mask.shape != input_values.shape:
            raise InvalidArgumentError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, but the input has shape "
                f"{tuple(input_values.shape)}. Pass equal shapes."
            )
        outputs, keys = self.encoder.step(typed(self.encoder, made), {})
        self.mask = outputs["encoder_attention_mask"]
        slots, rows = self.decoder.slots, len(input_values)
        own = [slot for slot in slots if slot.present is not None]
        theirs = {slot.port.name: keys[present_of(slot.port.name) or ""] for slot in slots if slot.present is None}
        self.cache = {**self.decoder.cache(empty_cache(own, rows)), **theirs}
        from transformers.modeling_outputs import BaseModelOutput

        # the loop reads the shape and the dtype of this tensor
        return BaseModelOutput(last_hidden_state=torch.zeros(*self.mask.shape, 1, dtype=self.dtype))

    def read(self, frames: torch.Tensor, speaker: torch.Tensor) -> torch.Tensor:
        """Keep the inputs of the next decoder call: the last frame, the vectors of the speakers, and dropout masks."""
        config, length = self.config, frames.shape[1]
        if length > config.max_speech_positions:
            raise InvalidArgumentError(
                f"The speech has {length} frames, but the model has {config.max_speech_positions} positions. Pass a "
                "smaller maxlenratio, or a shorter text."
            )
        shape = len(frames), config.speaker_embedding_dim
        if tuple(speaker.shape) != shape:
            raise InvalidArgumentError(
                f"speaker_embeddings has shape {tuple(speaker.shape)}; it must be {shape}: one vector for each row."
            )
        masks = drawn_masks(config, length, self.dtype) if self.masks is None else next(self.masks)
        self.given = {"frame": frames[:, -1:], "speaker_embeddings": speaker, "dropout_masks": masks}
        return frames

    def decode(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        made = {**self.given, "encoder_attention_mask": self.mask}
        found, self.cache = self.decoder.step(typed(self.decoder, made), self.cache)
        last = torch.cat([found["frames"].flatten(1), found["stop_logits"]], dim=1)
        return types.SimpleNamespace(last_hidden_state=last.unsqueeze(1), **{installed_name(): None})

    def smoothed(self, frames: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.smooth.run(typed(self.smooth, {"frames": frames}))["spectrogram"]
        return found
