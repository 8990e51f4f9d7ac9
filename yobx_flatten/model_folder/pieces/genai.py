"""Split vision-language and Whisper models into the files that onnxruntime-genai runs."""

# the library does not insert image features into embeddings, so the file `embedding` inserts them:
# picture ──> vision_encoder ──> features ──┐
# tokens ───────────────────────────────────┴──> embedding ──> decoder_model_merged ──> scores, cache

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.export import Dim

from ...export.proof.eager_runs import Case
from ...registry.recipe.aliases import PlainCache, TransformersModel
from . import text
from .vision_language import image_token_of, vision_language_pieces

EMBEDDING = "embedding"  # name of the file that computes input embeddings from tokens and image features


class FlatVisionEncoder(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: Any) -> dict[str, Any]:
        return {"image_features": self.encoder(pixel_values)["image_features"].flatten(0, 1)}


class EmbeddingWithFeatures(torch.nn.Module):
    """Computes the input embeddings of a text, in which image features replace the embeddings of image tokens."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.embedding = model.get_input_embeddings()
        self.token = image_token_of(model)

    def forward(self, input_ids: Any, image_features: Any) -> dict[str, Any]:
        embeds = self.embedding(input_ids)
        is_picture = input_ids.eq(self.token)
        # one more row, because a lookup in zero rows would fail for a text without pictures
        rows = torch.cat([image_features.to(embeds.dtype), embeds.new_zeros(1, embeds.shape[-1])])
        place = (is_picture.flatten().cumsum(0) - 1).clamp(min=0, max=rows.shape[0] - 1).reshape(input_ids.shape)
        return {"inputs_embeds": torch.where(is_picture[..., None], rows[place], embeds)}


def genai_picture_pieces(model: TransformersModel, split: text.Split = text.EVERY) -> list[text.Piece]:
    rows = split.rows
    vision, embed, decoder = vision_language_pieces(model, split)
    vision = dataclasses.replace(vision, module=FlatVisionEncoder(vision.module).eval())
    with torch.no_grad():
        features = vision.module(**vision.kwargs)["image_features"]
    token, count = image_token_of(model), len(features)

    def given(batch: int, length: int, shown: int) -> dict[str, Any]:
        ids = text.random_tokens(model, (batch, length))
        ids[ids == token] = token + 1
        ids[0, 1 : 1 + shown] = token
        return {"input_ids": ids, "image_features": features[:shown]}

    cases = [Case("no picture", (), given(rows or 1, 3, 0)), Case("a token", (), given(rows or 3, 1, 0))]
    shapes = {"input_ids": {0: Dim.AUTO, 1: Dim.AUTO}, "image_features": {0: Dim.AUTO}}
    example = given(rows or 2, count + 3, count)
    return [vision, embed, text.Piece(EMBEDDING, EmbeddingWithFeatures(model).eval(), example, cases, shapes), decoder]


FRAMES = 3000  # number of audio frames that onnxruntime-genai passes to an audio encoder: 30 seconds
ALLOWED = "allowed_logits"  # the output whose logits are lowest for the tokens that the configuration suppresses
_LEAST = -1e4  # representable in float16, and 0 after a softmax


# Split a Whisper model into the two files that onnxruntime-genai runs.
#
#     sound  ──> encoder ──> features, keys and values of the sound for every layer of the decoder
#     tokens ──> decoder (also the first call, with its own empty cache) ──> scores, cache
#
# In the usual split, the first decoder file returns the keys of the sound; onnxruntime-genai has no first decoder file.


class SoundEncoderWithKeys(text.Encoder):
    """Whisper's encoder, which also returns the cross-attention keys and values for every decoder layer."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        attentions = [layer.encoder_attn for layer in model.model.decoder.layers]
        self.keys = torch.nn.ModuleList(one.k_proj for one in attentions)
        self.values = torch.nn.ModuleList(one.v_proj for one in attentions)
        self.heads = attentions[0].num_heads, attentions[0].head_dim

    def forward(self, input_features: Any) -> dict[str, Any]:
        hidden = self.encoder(input_features).last_hidden_state
        made = [
            {"key": self._by_head(key(hidden)), "value": self._by_head(value(hidden))}
            for key, value in zip(self.keys, self.values, strict=True)
        ]
        return {"last_hidden_state": hidden, "present": [{"encoder": layer} for layer in made]}

    def _by_head(self, side: torch.Tensor) -> torch.Tensor:
        return side.view(*side.shape[:2], *self.heads).transpose(1, 2)


class SoundDecoder(text.NextDecoder):
    """The Whisper decoder, in one file for all calls; in the first call, the self-attention cache is empty."""

    always: torch.Tensor  # whether each token is suppressed, of shape (vocabulary,)
    at_first: torch.Tensor  # the same for the token after the prompt

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model, text.encoder_output_class(model))
        config = model.generation_config
        vocabulary = model.config.vocab_size
        for name, stated in (("always", "suppress_tokens"), ("at_first", "begin_suppress_tokens")):
            suppressed = torch.zeros(vocabulary, dtype=torch.bool)
            suppressed[[token for token in getattr(config, stated, None) or () if 0 <= token < vocabulary]] = True
            self.register_buffer(name, suppressed, persistent=False)
        self.suppresses = bool((self.always | self.at_first).any())

    def forward(self, input_ids: Any, cache: PlainCache) -> dict[str, Any]:  # type: ignore[override] # no mask
        found = super().forward(input_ids, cache)
        if not self.suppresses:
            return found
        # the library does not suppress tokens; the cache is empty in the first call
        seen = torch.ones_like(cache[0]["decoder"]["key"][:1, 0, :, 0]).sum()
        suppressed = self.always | (self.at_first & seen.eq(0))
        scores = found["logits"]
        return {"logits": scores, ALLOWED: scores.masked_fill(suppressed, _LEAST), "present": found["present"]}


def genai_sound_pieces(model: TransformersModel, split: text.Split = text.EVERY) -> list[text.Piece]:
    encoder, decoder = SoundEncoderWithKeys(model).eval(), SoundDecoder(model).eval()

    @torch.no_grad()
    def calls(batch: int, past: int, new: int) -> tuple[dict[str, Any], dict[str, Any]]:
        read = {"input_features": text.encoder_input(model, batch, 0)}
        layers = encoder(**read)["present"]
        own = [{**one, "decoder": {n: side[:, :, :0] for n, side in one["encoder"].items()}} for one in layers]
        if past:
            begun = text.NextDecoder.forward(decoder, text.random_tokens(model, (batch, past)), own)
            own = [{**layer, **made} for layer, made in zip(layers, begun["present"], strict=True)]
        return read, {"input_ids": text.random_tokens(model, (batch, new)), "cache": own}

    others = split.named(("batch", "past", "new"), calls, (1, 0, 4), (3, 4, 1))
    return text.pieces_of_calls({"encoder": encoder, "decoder": decoder}, calls(split.rows or 2, 5, 3), others, {})
