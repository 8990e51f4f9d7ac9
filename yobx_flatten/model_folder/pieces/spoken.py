"""Split a model that writes spectrograms (SpeechT5) into exported modules."""

# SpeechT5 applies dropout also in evaluation mode, so the dropout masks are an input of the file:
# text or samples ──> encoder_model ──> the encoder's keys, layer by layer
# last frame, speaker, masks of dropout, cache ──> frame_decoder ──> next frames, stop scores, cache
# all frames ──> postnet ──> the spectrogram

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import Dim

from ...core.effects import undisturbed
from ...generate.spectrogram import drawn_masks
from ...huggingface.cache_names import cache_of, installed_name
from ...huggingface.decoders import pair_of
from ...registry.recipe.aliases import PlainCache, TransformersModel
from ...storage.cases import StoredCase
from .text import EVERY, Piece, Split, features_of, filled_cache, pieces_of_calls, random_tokens, random_values

_SAMPLES = 400  # audio samples for each token of a text


class _WithCache(torch.nn.Module):
    """Base class of modules that call SpeechT5's decoder layers without the prenet before them."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.layers = model.speecht5.decoder.wrapped_decoder

    def decode(self, frame: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor, cache: Any) -> Any:
        given = {"encoder_hidden_states": hidden, "encoder_attention_mask": mask, installed_name(): cache}
        return self.layers(hidden_states=frame, use_cache=True, return_dict=True, **given)


class TextEncoder(_WithCache):
    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        self.encoder = model.speecht5.encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
        return self.keys(self.encoder(input_values=input_ids, attention_mask=attention_mask)[0], attention_mask)

    def keys(self, hidden: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """Return the cross-attention keys and values that the decoder computes from the encoder's features."""
        cross = cache_of(self.decode(hidden[:, :1], hidden, mask, None)).cross_attention_cache
        return {"encoder_attention_mask": mask, "present": [{"encoder": pair_of(layer)} for layer in cross.layers]}


class SoundEncoder(TextEncoder):
    def forward(self, input_values: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
        hidden = self.encoder(input_values=input_values, attention_mask=attention_mask)[0]
        # transformers' speech loop computes the mask in this way
        mask = self.encoder.prenet._get_feature_vector_attention_mask(hidden.shape[1], attention_mask)
        return self.keys(hidden, mask.long())


class FrameDecoder(_WithCache):
    """Computes the next spectrogram frames from the last frame; the first call gets zeros and an empty cache."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        self.prenet, self.postnet = model.speecht5.decoder.prenet, model.speech_decoder_postnet
        self.dropout, self.bins = model.config.speech_decoder_prenet_dropout, model.config.num_mel_bins

    def forward(
        self,
        frame: torch.Tensor,
        speaker_embeddings: torch.Tensor,
        dropout_masks: torch.Tensor,
        cache: PlainCache,
        encoder_attention_mask: torch.Tensor,
    ) -> dict[str, Any]:
        # the prenet, on one frame with given dropout masks; transformers runs it on all frames in every call
        net, hidden, place = self.prenet, frame, cache[0]["decoder"]["key"].shape[2]
        for index, layer in enumerate(net.layers):
            hidden = torch.nn.functional.relu(layer(hidden))
            hidden = torch.where(dropout_masks[index] == 1, hidden, 0) * 1 / (1 - self.dropout)
        positions = net.encode_positions
        hidden = net.final_layer(hidden) + positions.alpha * positions.pe[:, torch.arange(place, place + 1)]
        speaker = torch.nn.functional.normalize(speaker_embeddings).unsqueeze(1)
        hidden = torch.nn.functional.relu(net.speaker_embeds_layer(torch.cat([hidden, speaker], dim=-1)))
        found = self.decode(hidden, features_of(cache), encoder_attention_mask, filled_cache(cache))
        last = found.last_hidden_state.squeeze(1)
        frames = self.postnet.feat_out(last).view(last.shape[0], -1, self.bins)
        layers = cache_of(found).self_attention_cache.layers
        return {
            "frames": frames,
            "stop_logits": self.postnet.prob_out(last),
            "present": [{"decoder": pair_of(layer)} for layer in layers],
        }


class Postnet(torch.nn.Module):
    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.model = model.speech_decoder_postnet

    def forward(self, frames: torch.Tensor) -> dict[str, Any]:
        return {"spectrogram": self.model.postnet(frames)}


def spoken_input(model: TransformersModel, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Make random inputs for SpeechT5, in which the first sequence of the batch is padded."""
    if model.main_input_name == "input_ids":
        ids = random_tokens(model, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, length - 2 :] = 0
        return {"input_ids": ids, "attention_mask": mask}
    sound = random_values(model, (rows, _SAMPLES * length))
    mask = torch.ones(sound.shape, dtype=torch.int64)
    mask[0, _SAMPLES * (length - 2) :] = 0
    return {"input_values": sound, "attention_mask": mask}


def spoken_pieces(model: TransformersModel, split: Split = EVERY) -> list[Piece]:
    reads = model.main_input_name
    encoder = (TextEncoder if reads == "input_ids" else SoundEncoder)(model)
    decoder, postnet = FrameDecoder(model), Postnet(model)
    config = model.config
    layers, width = config.speech_decoder_prenet_layers, config.speech_decoder_prenet_units

    @torch.no_grad()
    def calls(batch: int, length: int, past: int) -> tuple[Mapping[str, Any], ...]:
        read = spoken_input(model, batch, length)
        found = encoder(**read)
        size = batch, config.decoder_attention_heads, past, config.hidden_size // config.decoder_attention_heads
        own = [{"key": random_values(model, size), "value": random_values(model, size)} for _ in found["present"]]
        step = {
            "frame": random_values(model, (batch, 1, config.num_mel_bins)),
            "speaker_embeddings": random_values(model, (batch, config.speaker_embedding_dim)),
            "dropout_masks": (random_values(model, (layers, width)) > 0).to(model.dtype),
            "cache": [{"decoder": mine} | theirs for mine, theirs in zip(own, found["present"], strict=True)],
            "encoder_attention_mask": found["encoder_attention_mask"],
        }
        return read, step, {"frames": random_values(model, (batch, past + 2, config.num_mel_bins))}

    with undisturbed(model=model):
        example = calls(split.rows or 2, 7, 5)
        others = split.named(("batch", "source", "frames"), calls, (1, 9, 0), (3, 5, 4))
    modules = {"encoder_model": encoder, "frame_decoder": decoder, "postnet": postnet}
    shapes: dict[str, dict[str, Any]] = {
        "frame_decoder": {"frame": {0: Dim.AUTO}, "speaker_embeddings": {0: Dim.AUTO}, "dropout_masks": {}},
        "postnet": {"frames": {0: Dim.AUTO, 1: Dim.AUTO}},
    }
    return pieces_of_calls(modules, example, others, shapes)


FRAMES = 12  # number of decoder calls in the stored test of a SpeechT5 folder
SAMPLED_FRAMES = 3  # the same with `proof="sample"`
_LENGTH = 9  # tokens of the text
NEVER = math.inf  # a threshold that no frame reaches, so that the number of calls ends the loop


@torch.no_grad()
def spoken_case(model: TransformersModel, rows: int, calls: int) -> StoredCase:
    """Make a test case: speech that the eager model generates from random inputs."""
    config = model.config
    read = spoken_input(model, rows, _LENGTH)
    speaker = random_values(model, (rows, config.speaker_embedding_dim), rows)
    first = read.get("input_ids", read.get("input_values"))
    with undisturbed(model=model):
        length = model.speecht5.encoder(first, attention_mask=read["attention_mask"])[0].shape[1]
        ratio = (calls + 0.5) * config.reduction_factor / length
        asked = {"threshold": NEVER, "maxlenratio": ratio, "return_output_lengths": True}
        with undisturbed(seed=0):
            found = model.generate_speech(first, speaker, read["attention_mask"], **asked)[0]
    with undisturbed(seed=0):
        masks = torch.stack([drawn_masks(config, count, model.dtype) for count in range(1, calls + 1)])
    inputs = {**read, "speaker_embeddings": speaker, "dropout_masks": masks}
    return StoredCase(inputs, {"spectrogram": found, "maxlenratio": ratio})
