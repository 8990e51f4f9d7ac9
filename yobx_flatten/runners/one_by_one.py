"""Run several new tokens of several rows as several calls, which ``GroupQueryAttention`` needs.

.. code-block:: text

    two rows, past 7, tokens 7 8 9     one_by_one  ──>  past 7, token 7 │ past 8, token 8 │ past 9, token 9
                                       row_by_row  ──>  row 0, past 7, tokens 7 8 9 │ row 1, past 7, tokens 7 8 9
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TOKENS = ("input_ids", "inputs_embeds")


def is_refused(inputs: Mapping[str, Any]) -> bool:
    """Return whether ``GroupQueryAttention`` refuses a call: several tokens after others are for one row only."""
    # inputs: the inputs of the call by name, with tokens or embeddings, and `attention_mask` over them and what is in
    # the cache
    tokens = _tokens(inputs)
    return bool(min(tokens.shape[:2]) > 1 and inputs["attention_mask"].shape[1] > tokens.shape[1])


def one_by_one(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of one call per token; inputs without a token axis are passed whole.

    >>> import torch
    >>> given = {"input_ids": torch.tensor([[7, 8], [5, 6]]), "attention_mask": torch.ones(2, 4)}
    >>> [(feeds["input_ids"].tolist(), feeds["attention_mask"].shape[1]) for feeds in one_by_one(given)]
    [([[7], [5]], 3), ([[8], [6]], 4)]
    """
    new = _tokens(inputs).shape[1]
    for token in range(new):
        cut = dict(inputs)
        for name in _TOKENS:
            if name in inputs:
                cut[name] = inputs[name][:, token : token + 1]
        if "position_ids" in inputs:
            cut["position_ids"] = inputs["position_ids"][..., token : token + 1]
        mask = inputs["attention_mask"]
        cut["attention_mask"] = mask[:, : mask.shape[1] - new + token + 1]
        yield cut


def row_by_row(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of one call per row, with its part of the cache.

    >>> import torch
    >>> given = {"input_ids": torch.tensor([[7, 8], [5, 6]]), "past_key_values.0.key": torch.zeros(2, 1, 3, 4)}
    >>> [[tuple(value.shape) for value in feeds.values()] for feeds in row_by_row(given)]
    [[(1, 2), (1, 1, 3, 4)], [(1, 2), (1, 1, 3, 4)]]
    """
    rows = _tokens(inputs).shape[0]
    for row in range(rows):
        yield {
            name: value[row : row + 1] if getattr(value, "ndim", 0) and value.shape[0] == rows else value
            for name, value in inputs.items()
        }


def _tokens(inputs: Mapping[str, Any]) -> Any:
    return next(inputs[name] for name in _TOKENS if name in inputs)
