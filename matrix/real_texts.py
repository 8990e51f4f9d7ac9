"""Questions, and texts that are on every machine, by which a model with trained weights is measured."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import pathlib
from typing import Any

import torch

__all__ = ["QUESTIONS", "text_tokens", "write_chats", "write_text"]

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


def write_text(file: pathlib.Path) -> None:
    """Write the help topics to a file, to be trained on."""
    file.write_text(_topics(), encoding="utf-8")


def write_chats(file: pathlib.Path) -> None:
    """Write a question and its answer for each help topic of Python whose first paragraph is prose."""
    from pydoc_data.topics import topics

    with open(file, "w", encoding="utf-8") as out:
        for name in sorted(topics):
            title, _, first, *_ = [*topics[name].replace("\n\n", "\n", 1).split("\n", 2), ""]
            words = first.partition("\n\n")[0].split()
            if len(words) > 12 and "::=" not in words:
                asked = {"role": "user", "content": f'What does the help of Python say about "{title}"?'}
                answer = {"role": "assistant", "content": " ".join(words[:40])}
                out.write(json.dumps({"prompt": [asked], "completion": [answer]}) + "\n")


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
