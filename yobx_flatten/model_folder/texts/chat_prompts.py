"""Build prompts from the tokenizer's chat template, to compare answers of a quantised model."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import ModelSourceError
from ...errors.failures import result_or
from ...files.limited import Limited
from ...recipe.aliases import TransformersModel
from ..source.tokenizer_files import open_tokenizer

CHATS = "cases/generate-chats.case"
"""Where a folder keeps the answers of the model."""

CHAT_TOKENS = 50
"""New tokens of each answer, at most."""

_QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "What is 12 times 7?",
    "Explain what a computer program is to a child.",
    "Name three animals that live in Africa.",
    "Give me some advice for a job interview.",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that adds two numbers.",
)


def chat_prompts(
    model: TransformersModel, source: pathlib.Path | None, rows: int, questions: Sequence[str] = ()
) -> dict[str, torch.Tensor] | None:
    """Return questions in the tokens of a model and their mask, int64 of shape (rows, length), padded on the left."""
    # questions: what to ask; by default ten questions of our own. Without a chat template these are read as they are.
    # returns: `None` where there is no tokenizer, or, for our own questions, none with a chat template; its tokens are
    # not the model's, or the model has no room for an answer
    prompts = [] if source is None else _tokens(source, (questions or _QUESTIONS)[:rows], plain=bool(questions))
    if not prompts or not all(prompts):
        return None
    config: Any = model.config.get_text_config(decoder=True)
    longest = max(map(len, prompts))
    room = getattr(config, "max_position_embeddings", None) or longest + CHAT_TOKENS
    if longest + CHAT_TOKENS > room or max(map(max, prompts)) >= config.vocab_size:
        return None
    ids, mask = torch.zeros(len(prompts), longest, dtype=torch.int64), torch.zeros(len(prompts), longest).long()
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _tokens(source: pathlib.Path, questions: Sequence[str], *, plain: bool) -> list[list[int]]:
    def read() -> list[list[int]]:
        tokenizer: Any = open_tokenizer(source, failure=ModelSourceError)
        if getattr(tokenizer, "chat_template", None):
            messages = [[{"role": "user", "content": question}] for question in questions]
            written = Limited(tokenizer.apply_chat_template)
            texts = [written(one, add_generation_prompt=True, tokenize=False) for one in messages]
        elif plain:
            texts = list(questions)
        else:
            return []
        found: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    # templates are programs of others, each tokenizer has its own errors; none is needed
    return result_or(read, lambda error: [])
