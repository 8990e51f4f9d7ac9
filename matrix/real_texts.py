"""Questions, and texts that are on every machine, by which a model with trained weights is measured."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
from typing import Any

import torch

__all__ = ["QUESTIONS", "text_tokens"]

# but for the first, others than those by which the export judges a quantised folder
QUESTIONS = (
    "What is the capital of France?",
    "How many days are in a week?",
    "Write two sentences about trees.",
    "What do bees make?",
    "Explain why we sleep.",
    "Give me a recipe for pancakes.",
    "What is the largest planet?",
    "Write a short email to thank a friend.",
    "How can I learn to swim?",
    "Name a colour, and say what it reminds you of.",
)


def text_tokens(tokenizer: Any, name: str, length: int) -> torch.Tensor:
    """Return the first tokens of a text, int64 of shape (length,).

    Args:
        tokenizer: that of the model.
        name: ``"help topics"``, ``"source of Python"`` or ``"licences"``.
        length: how many.
    """
    found = tokenizer(_TEXTS[name]()[: 20 * length], add_special_tokens=False, verbose=False)["input_ids"][:length]
    return torch.tensor(found)


def _topics() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in ("class", "function", "import", "with", "lambda", "bltin-type-objects"))


def _source() -> str:
    return inspect.getsource(argparse)


def _licences() -> str:
    files = importlib.metadata.files("transformers") or []
    (licence,) = [file for file in files if file.name == "LICENSE"]
    return licence.read_text(encoding="utf-8")


_TEXTS = {"help topics": _topics, "source of Python": _source, "licences": _licences}
