"""Find the number of positions of a model with a position table: longer texts are refused.

Rotations go on past what a configuration states, and tables do not. Which of them a model has is found by calling it:
the runtimes do not agree on what a row after the last one is, and one of them returns zeros.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...core.effects import undisturbed
from ...errors.failures import result_or
from ...recipe.aliases import TransformersModel
from .text import encoder_output_class

_NAMES = ("max_position_embeddings", "max_target_positions", "n_positions", "n_ctx")
_MOST = 2048  # tokens of a call that has to be made as long as the table


@torch.no_grad()
def positions_of(model: TransformersModel, *, is_large: bool) -> int | None:
    """Return the number of tokens that a model reads at most; ``None`` where none is known."""
    # is_large: whether a call of many tokens takes too long, so that only models that take positions are asked
    config = model.config.get_text_config(decoder=True)
    stated = next((getattr(config, name) for name in _NAMES if type(getattr(config, name, None)) is int), 0)
    takes = inspect.signature(model.forward).parameters
    is_decoder = not getattr(model.config, "is_encoder_decoder", False)
    if stated < 2 or (is_decoder and model.main_input_name != "input_ids"):
        return None
    if is_decoder and "position_ids" in takes:
        return stated if _ends_at(lambda last: {"position_ids": torch.tensor([[last]])}, 1, model, stated) else None
    if is_large or stated > _MOST:
        return None
    return stated if _ends_at(lambda last: {}, None, model, stated) else None


def _ends_at(more: Any, length: int | None, model: TransformersModel, stated: int) -> bool:
    """Whether a call with the last position is made, and one with the position after it fails."""

    def is_read(last: int) -> bool:
        tokens = torch.zeros(1, length or last + 1, dtype=torch.int64)

        def called() -> bool:
            with undisturbed(model=model):  # rotations may be made anew for positions that are far away
                _call(model, tokens, more(last))
            return True

        return result_or(called, lambda error: False)  # the model's own code refuses, in its own way

    return is_read(stated - 1) and not is_read(stated)


def _call(model: TransformersModel, tokens: torch.Tensor, more: dict[str, torch.Tensor]) -> None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        of_encoder = getattr(config, "encoder", config)  # a model of two configurations
        size = getattr(of_encoder, "d_model", None) or of_encoder.hidden_size
        hidden = torch.zeros(1, 2, size, dtype=model.dtype)
        read = encoder_output_class(model)(last_hidden_state=hidden)
        model(decoder_input_ids=tokens, encoder_outputs=read, use_cache=False)
    else:
        model(input_ids=tokens, use_cache=False, **more)
