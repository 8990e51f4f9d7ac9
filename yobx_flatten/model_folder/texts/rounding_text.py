"""Build the calibration text for rounding to 4 bits: chats with the model's own answers, and a text.

.. code-block:: text

    prompts ──> model draws answers ──┐
    text that is not measured on ─────┴──> one row after the other, of equal length
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ...core.effects import undisturbed
from ...errors.log import STEP
from ...recipe.aliases import TransformersModel

logger = logging.getLogger("yobx_flatten")

_ANSWERS = 2
"""Answers that are drawn to each prompt."""

_NEW = 64
"""Tokens of an answer, at most."""


def unanswered(prompts: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return prompts without their padding."""
    pairs = zip(prompts["input_ids"], prompts["attention_mask"], strict=True)
    return [row[mask == 1] for row, mask in pairs]


def answered(model: TransformersModel, prompts: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return prompts with answers that the model draws, one after the other, int64 of shape (length,)."""
    # prompts: tokens and their mask, of shape (rows, length), padded on the left
    ids, mask = (prompts[name].repeat(_ANSWERS, 1) for name in ("input_ids", "attention_mask"))
    logger.info("drawing answers of %s", type(model).__qualname__, extra=STEP)
    ends: Any = getattr(model.generation_config, "eos_token_id", None)
    with undisturbed(seed=0, model=model):
        found = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=_NEW,
            max_length=None,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
            **in_own_cache(model),
        )
    stops = torch.tensor([] if ends is None else ends, dtype=torch.int64).reshape(-1)
    length, rows = ids.shape[1], []
    for row, read in zip(found, mask, strict=True):
        ended = torch.isin(row[length:], stops).nonzero()
        end = int(ended[0]) + 1 if len(ended) else len(row) - length
        rows.append(torch.cat([row[:length][read == 1], row[length : length + end]]))
    return rows


def in_own_cache(model: TransformersModel) -> dict[str, str]:
    """The keyword of ``generate`` for keys and values as the model computes them, as files have them."""
    asked = getattr(model.generation_config, "cache_implementation", None)
    return {} if asked is None else {"cache_implementation": "dynamic"}


def in_rows(texts: list[torch.Tensor], length: int, multiple: int = 1) -> torch.Tensor | None:
    """Cut texts, one after the other, into rows of equal length; ``None`` where there is less than one."""
    # multiple: what the number of rows is a multiple of
    whole = torch.cat(texts) if texts else torch.zeros(0, dtype=torch.int64)
    rows = len(whole) // length // multiple * multiple
    return whole[: rows * length].reshape(rows, length) if rows else None
