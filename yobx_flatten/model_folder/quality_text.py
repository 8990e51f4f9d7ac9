"""A text for the perplexity of a language model, which is on every machine: the source of a module of Python."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import torch

from ..errors import ModelSourceError
from ..recipe.aliases import TransformersModel
from .tokenizer_files import open_tokenizer

__all__ = ["LENGTH", "python_text"]

LENGTH = 128
"""Tokens of each row of the text."""

_MODULES = ("textwrap", "heapq", "statistics")  # half of each is English


def python_text(model: TransformersModel, source: pathlib.Path | None, rows: int) -> torch.Tensor | None:
    """Return a text in the tokens of a model, int64 of shape (rows, length).

    Args:
        model: a model of transformers.
        source: the folder of its tokenizer; ``None`` for a model that reads bytes, as those without a folder do.
        rows: the number of rows.

    Returns:
        ``None`` where there is no tokenizer, its tokens are not the model's, or the model has no room for 16.
    """
    config = model.config.get_text_config(decoder=True)
    room = getattr(config, "max_position_embeddings", None) or LENGTH
    length = min(LENGTH, room)
    tokens = _tokens(source)
    rows = min(rows, len(tokens) // length)
    if length < 16 or not rows or max(tokens[: rows * length]) >= config.vocab_size:
        return None
    return torch.tensor(tokens[: rows * length]).reshape(rows, length)


def _tokens(source: pathlib.Path | None) -> list[int]:
    from transformers import ByT5Tokenizer

    try:
        tokenizer: Any = (
            ByT5Tokenizer(extra_ids=0) if source is None else open_tokenizer(source, failure=ModelSourceError)
        )
        found: list[int] = tokenizer(_source(), add_special_tokens=False, verbose=False)["input_ids"]
    except Exception:  # each tokenizer has its own errors, and a model without one can be exported
        return []
    return found


def _source() -> str:
    texts = []
    for name in _MODULES:
        found = importlib.util.find_spec(name)
        loader: Any = None if found is None else found.loader
        texts.append((loader.get_source(name) or "") if hasattr(loader, "get_source") else "")
    return "".join(texts)
