"""Split a Whisper model into the two files that onnxruntime-genai runs.

.. code-block:: text

    sound  ──> encoder ──> features, keys and values of the sound for every layer of the decoder
    tokens ──> decoder (also the first call, with its own empty cache) ──> scores, cache

The usual split has the keys of the sound in the outputs of a first decoder, which that library does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.export import Dim

from ...export.proof.case import Case
from ...private_names.of_torch import pytree
from ...recipe.aliases import PlainCache, TransformersModel
from ...trees.shapes import dynamic_shapes
from .text import Encoder, NextDecoder, Piece, encoder_input, encoder_output_class, random_tokens

FRAMES = 3000
"""Frames of sound that the library hands to an encoder: 30 seconds."""

ALLOWED = "allowed_logits"
"""The scores in which tokens that the configuration suppresses are the least likely ones."""

_LEAST = -1e4  # float16 also has it, and a softmax makes it 0


class SoundEncoderWithKeys(Encoder):
    """Reads a spectrogram; returns the features that a decoder attends to."""

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model)
        attentions = [layer.encoder_attn for layer in model.model.decoder.layers]
        self.keys = torch.nn.ModuleList(one.k_proj for one in attentions)
        self.values = torch.nn.ModuleList(one.v_proj for one in attentions)
        self.heads = attentions[0].num_heads, attentions[0].head_dim

    def forward(self, input_features: Any) -> dict[str, Any]:
        """Return the features, and their keys and values in each layer of the decoder."""
        hidden = self.encoder(input_features).last_hidden_state
        made = [
            {"key": self._by_head(key(hidden)), "value": self._by_head(value(hidden))}
            for key, value in zip(self.keys, self.values, strict=True)
        ]
        return {"last_hidden_state": hidden, "present": [{"encoder": layer} for layer in made]}

    def _by_head(self, side: torch.Tensor) -> torch.Tensor:
        return side.view(*side.shape[:2], *self.heads).transpose(1, 2)


class SoundDecoder(NextDecoder):
    """Every call of the decoder, the first one with an empty cache of its own tokens."""

    always: torch.Tensor  # whether each token is suppressed, of shape (vocabulary,)
    at_first: torch.Tensor  # the same for the token after the prompt

    def __init__(self, model: TransformersModel) -> None:
        super().__init__(model, encoder_output_class(model))
        config = model.generation_config
        always, at_first = (
            _is_one_of(getattr(config, name, None), model.config.vocab_size)
            for name in ("suppress_tokens", "begin_suppress_tokens")
        )
        self.suppresses = bool((always | at_first).any())
        self.register_buffer("always", always, persistent=False)
        self.register_buffer("at_first", at_first, persistent=False)

    def forward(self, input_ids: Any, cache: PlainCache) -> dict[str, Any]:  # type: ignore[override] # no mask
        """Return the scores, the scores of allowed tokens, and the decoder's own keys and values."""
        found = super().forward(input_ids, cache)
        if not self.suppresses:
            return found
        # the library has no list of suppressed tokens: whether this is the first call, an empty cache states
        seen = torch.ones_like(cache[0]["decoder"]["key"][:1, 0, :, 0]).sum()
        suppressed = self.always | (self.at_first & seen.eq(0))
        scores = found["logits"]
        return {"logits": scores, ALLOWED: scores.masked_fill(suppressed, _LEAST), "present": found["present"]}


def _is_one_of(tokens: Sequence[int] | None, vocabulary: int) -> torch.Tensor:
    """Whether each token of a vocabulary is in a list."""
    found = torch.zeros(vocabulary, dtype=torch.bool)
    found[[token for token in tokens or () if 0 <= token < vocabulary]] = True
    return found


def genai_sound_pieces(model: TransformersModel, rows: int | None = None) -> list[Piece]:
    """An ``encoder`` with the keys and values of the sound, and a ``decoder``."""
    encoder, decoder = SoundEncoderWithKeys(model).eval(), SoundDecoder(model).eval()

    @torch.no_grad()
    def calls(batch: int, past: int, new: int) -> tuple[dict[str, Any], dict[str, Any]]:
        read = {"input_features": encoder_input(model, batch, 0)}
        layers = encoder(**read)["present"]
        own = [{**one, "decoder": {n: side[:, :, :0] for n, side in one["encoder"].items()}} for one in layers]
        if past:
            begun = NextDecoder.forward(decoder, random_tokens(model, (batch, past)), own)
            own = [{**layer, **made} for layer, made in zip(layers, begun["present"], strict=True)]
        return read, {"input_ids": random_tokens(model, (batch, new)), "cache": own}

    examples = calls(rows or 2, 5, 3)
    sizes = {f"batch {b}, past {p}, new {n}": (rows or b, p, n) for b, p, n in ((1, 0, 4), (3, 4, 1))}
    others = {name: calls(*size) for name, size in sizes.items()}
    pieces = []
    for place, (stem, module) in enumerate({"encoder": encoder, "decoder": decoder}.items()):
        shapes = dynamic_shapes(examples[place])
        if stem == "decoder":  # see `encoder_decoder_pieces`
            shapes["cache"] = pytree.tree_map(lambda _: {0: Dim.AUTO, 2: Dim.AUTO}, examples[place]["cache"])
        cases = [Case(name, (), made[place]) for name, made in others.items()]
        pieces.append(Piece(stem, module, examples[place], cases, shapes))
    return pieces
