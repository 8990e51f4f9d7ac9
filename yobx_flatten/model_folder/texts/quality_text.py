"""Provide a text, present on every machine, on which the perplexity of a language model is measured."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import ModelSourceError
from ...errors.failures import result_or
from ...files.document import read_text
from ...recipe.aliases import TransformersModel
from ..source.tokenizer_files import open_tokenizer

LENGTH = 128
"""Tokens of each row of the text."""

_LARGEST = 2**24  # bytes of a file of prompts

_MODULES = ("textwrap", "heapq", "statistics")  # half of each is English


def read_prompts(file: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the prompts of a file, one in each line."""
    path = pathlib.Path(file)
    lines = read_text(path, failure=ModelSourceError, most=_LARGEST).splitlines()
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ModelSourceError(f"{path} holds no prompts. Write one in each line.")
    return prompts


def python_text(
    model: TransformersModel, source: pathlib.Path | None, rows: int, text: str = ""
) -> torch.Tensor | None:
    """Return a text in the tokens of a model, int64 of shape (rows, length)."""
    # source: the folder of its tokenizer; `None` for a model that reads bytes, as those without a folder do
    # text: the text; by default the source of modules of Python
    # returns: `None` where there is no tokenizer, its tokens are not the model's, or the model has no room for 16
    config = model.config.get_text_config(decoder=True)
    room = getattr(config, "max_position_embeddings", None) or LENGTH
    found = tokens_of(source, [text or python_source()], add_special_tokens=False)
    tokens = found[0] if found else []
    length = min(LENGTH, room, len(tokens)) if text else min(LENGTH, room)
    rows = min(rows, len(tokens) // length)
    if length < 16 or not rows or max(tokens[: rows * length]) >= config.vocab_size:
        return None
    return torch.tensor(tokens[: rows * length]).reshape(rows, length)


def tokens_of(source: pathlib.Path | None, texts: Sequence[str], **options: Any) -> list[list[int]]:
    """Return texts in the tokens of a folder; none where it has no tokenizer that can be read."""
    # source: the folder; `None` for a model that reads bytes
    # options: further arguments of the tokenizer

    def read() -> list[list[int]]:
        from transformers import ByT5Tokenizer

        tokenizer: Any = (
            ByT5Tokenizer(extra_ids=0) if source is None else open_tokenizer(source, failure=ModelSourceError)
        )
        found: list[list[int]] = tokenizer(list(texts), verbose=False, **options)["input_ids"]
        return found

    return result_or(read, lambda error: [])  # each tokenizer has its own errors, and a model without one is exported


def python_source() -> str:
    """Return the source of modules of Python."""
    texts = []
    for name in _MODULES:
        found = importlib.util.find_spec(name)
        loader: Any = None if found is None else found.loader
        texts.append((loader.get_source(name) or "") if hasattr(loader, "get_source") else "")
    return "".join(texts)
