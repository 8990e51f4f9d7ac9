"""Several tokens of several rows after others, as calls of one token each: ``GroupQueryAttention`` takes no others.

.. code-block:: text

    past 7, tokens 7 8 9  ──>  past 7, token 7 │ past 8, token 8 │ past 9, token 9
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["one_by_one", "takes_one_by_one"]

_TOKENS = ("input_ids", "inputs_embeds")


def takes_one_by_one(inputs: Mapping[str, Any]) -> bool:
    """Return whether ``GroupQueryAttention`` refuses a call: several tokens after others are for one row only.

    Args:
        inputs: the inputs of the call by name, with tokens or embeddings, and ``attention_mask`` over them
            and what is in the cache.
    """
    tokens = _tokens(inputs)
    return bool(min(tokens.shape[:2]) > 1 and inputs["attention_mask"].shape[1] > tokens.shape[1])


def one_by_one(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of one call per token; those that are not cut are handed on as they are.

    Args:
        inputs: see :func:`takes_one_by_one`.

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


def _tokens(inputs: Mapping[str, Any]) -> Any:
    return next(inputs[name] for name in _TOKENS if name in inputs)
