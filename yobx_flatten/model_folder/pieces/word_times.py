"""Return the weights of attention by which Whisper finds out when a word was said."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...errors import InvalidArgumentError
from ...recipe.aliases import TransformersModel

Head = tuple[int, int]
"""A layer, and a head of its attention to what the encoder read."""


def heads_of(model: TransformersModel) -> list[Head]:
    """Return the heads that a model's configuration of generation names."""
    stated = getattr(getattr(model, "generation_config", None), "alignment_heads", None)
    if not stated or not hasattr(model, "_extract_token_timestamps"):
        raise InvalidArgumentError(
            f"word_times=True is for a Whisper whose generation_config names alignment_heads, and this "
            f"{type(model).__qualname__} names none. Set model.generation_config.alignment_heads, a list of [layer, "
            "head], or leave word_times= out."
        )
    layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
    for layer, head in stated:
        if not (0 <= layer < layers and 0 <= head < heads):
            raise InvalidArgumentError(
                f"generation_config.alignment_heads has [{layer}, {head}], and the decoder has {layers} layers of "
                f"{heads} heads. Set the heads of this model."
            )
    return sorted({(int(layer), int(head)) for layer, head in stated})


class HeadRecorder:
    """Takes the weights of some heads out of a call of the decoder."""

    def __init__(self, model: TransformersModel, heads: Sequence[Head]) -> None:
        self.model, self.heads = model, heads

    @contextlib.contextmanager
    def recorded(self) -> Iterator[dict[int, torch.Tensor]]:
        """Return the weights of each layer with such a head, after the block."""
        # fused attention computes no weights: in these layers it is written out meanwhile
        found: dict[int, torch.Tensor] = {}
        layers = {index for index, _ in self.heads}
        with contextlib.ExitStack() as undone:
            for index in layers:
                attention = self.model.model.decoder.layers[index].encoder_attn
                before, written_out = attention.config, copy.copy(attention.config)
                written_out._attn_implementation = "eager"

                def keep(_module: Any, _given: Any, returned: Any, index: int = index) -> None:
                    found[index] = returned[1]

                undone.callback(setattr, attention, "config", before)
                attention.config = written_out
                undone.callback(attention.register_forward_hook(keep).remove)
            yield found

    def outputs(self, found: dict[int, torch.Tensor]) -> dict[str, Any]:
        """Return what a file returns of them: ``cross_attentions.LAYER.HEAD``, of shape (batch, tokens, source)."""
        if not self.heads:
            return {}
        made: dict[str, dict[str, torch.Tensor]] = {}
        for layer, head in self.heads:
            made.setdefault(str(layer), {})[str(head)] = found[layer][:, head]
        return {"cross_attentions": made}
